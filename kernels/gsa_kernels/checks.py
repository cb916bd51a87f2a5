"""Checks arguments of all operations. Each check raises ValueError with the argument, its value and a remedy."""

from collections.abc import Mapping

import torch

from gsa_kernels.limits import HEAD_SIZES, INDEXER_ACTIVATIONS, INDEXER_HEAD_SIZES, ROW_PRODUCT_COLUMNS

KERNEL_DTYPES = (torch.bfloat16, torch.float32)
"""Input dtypes of the Triton kernels. fp16 would need loss scaling in training, which does not exist here."""

_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def compute_dtype(**tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the operation computes: fp64 if any tensor is fp64, else fp32."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; pass a floating-point tensor")
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def check_kernel_dtype(
    name: str, tensor: torch.Tensor, reference: str = "implementation='reference'"
) -> None:
    """Raise unless the kernels support the dtype. The error recommends `reference` for other dtypes, such as fp16."""
    if tensor.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; pass bfloat16 or float32, or use {reference}")


def check_shape(name: str, tensor: torch.Tensor, layout: str, sizes: tuple[int | None, ...]) -> None:
    """Compare a shape with `sizes`, in which None accepts any size. The error message shows `layout`."""
    shape = tensor.shape
    fits = len(shape) == len(sizes)
    if fits:
        for got, want in zip(shape, sizes, strict=True):  # a loop: all() over a generator takes twice as long
            fits = fits and (want is None or want == got)
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name} has shape {tuple(shape)}; pass {layout} = [{wanted}]")


def check_dtype_and_device(name: str, like: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Check that all tensors have the dtype and device of `like`, the argument `name`."""
    for other, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != like.dtype or tensor.device != like.device):
            raise ValueError(
                f"{other} is {tensor.dtype} on {tensor.device} and {name} {like.dtype} on {like.device}; pass one "
                "dtype on one device"
            )


def check_layout(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Check dtype and device, and that the tensor is contiguous."""
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; pass {dtype} on {device}, "
            "contiguous"
        )


def check_unit_strides(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Check that the elements of the last dimension are adjacent in memory."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of {name} has stride {tensor.stride(-1)}; make it contiguous"
            )


def check_head_counts(heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads and k has {kv_heads}; pass query heads in a multiple of k's")


def check_head_size(dim: int) -> None:
    if dim not in HEAD_SIZES:
        raise ValueError(f"the head size is {dim}; pass one of {HEAD_SIZES}")


def check_indexer_sizes(heads: int, dim: int, supported_heads: range) -> None:
    if heads not in supported_heads:
        raise ValueError(f"indexer.queries has {heads} heads; pass 1 to {supported_heads[-1]}")
    if dim not in INDEXER_HEAD_SIZES:
        raise ValueError(
            f"indexer.queries has head size {dim}; pass {INDEXER_HEAD_SIZES[0]} to {INDEXER_HEAD_SIZES[-1]}"
        )


def check_product_columns(columns: int) -> None:
    if columns not in ROW_PRODUCT_COLUMNS:
        raise ValueError(
            f"x has {columns} columns; pass {ROW_PRODUCT_COLUMNS[0]} to {ROW_PRODUCT_COLUMNS[-1]}, a multiple of "
            f"{ROW_PRODUCT_COLUMNS.step}"
        )


def check_mask(name: str, mask: torch.Tensor, batch: int, rows: int, num_keys: int) -> None:
    """Check that a mask is bool [B or 1, rows, num_keys]."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} has dtype {mask.dtype}; pass a bool mask (True = the key takes part)")
    shape = tuple(mask.shape)
    if shape not in ((batch, rows, num_keys), (1, rows, num_keys)):
        raise ValueError(f"{name} has shape {shape}; pass [{batch} or 1, {rows}, {num_keys}]")


def check_row_counts(name: str, counts: torch.Tensor, batch: int, rows: int) -> None:
    """Check that there is one integer per row: [B or 1, rows]."""
    if counts.dtype not in _INTEGER_DTYPES:
        raise ValueError(f"{name} has dtype {counts.dtype}; pass an integer tensor, for example int64")
    shape = tuple(counts.shape)
    if shape not in ((batch, rows), (1, rows)):
        raise ValueError(f"{name} has shape {shape}; pass [{batch} or 1, {rows}]")


def check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}; pass a number of at least {minimum}")


def kernels_use_sigmoid(activation: str) -> bool:
    """Return whether the activation is sigmoid, and False for relu. Any other activation raises an error."""
    if activation not in INDEXER_ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, which the kernels do not have; pass one of {INDEXER_ACTIVATIONS}, or "
            "implementation='reference'"
        )
    return activation == "sigmoid"


def check_activation(activation: str, heads: int, **biases: torch.Tensor | None) -> None:
    """Check the indexer's activation: sigmoid with biases [HI] or None, or relu without biases."""
    if activation not in ("sigmoid", "relu"):
        raise ValueError(f"activation is {activation!r}; pass 'sigmoid' or 'relu'")
    for name, bias in biases.items():
        if bias is not None and activation == "relu":
            raise ValueError(f"{name} is given with activation 'relu', which has no biases; pass None")
        if bias is not None:
            check_shape(name, bias, "[HI]", (heads,))


def check_budget_rule(k_base: int, k_min: int, k_max: int, adaptive_k: str, dense_below: int) -> None:
    check_at_least("k_base", k_base, 1)
    check_at_least("k_min", k_min, 1)
    check_at_least("dense_below", dense_below, 0)
    if k_max < k_min:
        raise ValueError(f"k_max is {k_max}, below k_min {k_min}; pass k_max >= k_min")
    if adaptive_k not in ("inverse", "direct", "off"):
        raise ValueError(f"adaptive_k is {adaptive_k!r}; pass 'inverse', 'direct' or 'off'")


def count_queries(query_start: int, num_keys: int) -> int:
    """Count the queries at positions query_start .. num_keys - 1."""
    if not 0 <= query_start < num_keys:
        raise ValueError(
            f"query_start is {query_start} with {num_keys} keys; pass 0 <= query_start < {num_keys}, and the keys up "
            "to the last query's own"
        )
    return num_keys - query_start


def beta_tensor(inverse_temperature: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an indexer's beta as a tensor of one element on the device, with its gradient."""
    if isinstance(inverse_temperature, torch.Tensor):
        return inverse_temperature
    return torch.full((), inverse_temperature, dtype=torch.float32, device=device)


def check_differentiated_once() -> None:
    """Raise ValueError if the caller asks autograd for a graph of the gradients (`create_graph=True`).

    The kernels' backward passes record no graph, so autograd would silently compute a wrong second derivative. torch's
    `once_differentiable` does not detect all cases: it raises an error only if the upstream gradient requires a
    gradient.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "create_graph is True, and the kernels have no second derivatives; pass False, or use plain torch "
            "(implementation='reference')"
        )
