"""Computes `row_product` (reference.py) by a kernel that reads each weight once.

In decoding, each kernel of a chain starts while the previous kernel (its predecessor) still runs (programmatic
dependent launch). Five rules make this safe for all kernels of this package that are launched this way:

1. Before its `gdc_wait` (PTX griddepcontrol.wait), a kernel neither writes nor reads results of other kernels. The wait
   ends when the predecessor has ended and its writes are visible.
2. At least one program of every kernel waits before it ends (except in rule 5). A kernel therefore ends after its
   predecessor, and a wait for the predecessor is a wait for all earlier kernels.
3. Data that a kernel reads before its wait (weights, positions) is not written by earlier kernels of its chain. Only
   the last kernel may write such data, after its own wait, when all readers have ended. The first kernel of the next
   chain starts only after all earlier kernels have ended (look_up.py).
4. A kernel may run beside its predecessor P, and read results of kernels before P, if P lets it start only after P's
   own wait. It may write what P neither reads nor writes. For rule 2, one of its programs waits before it ends.
5. A kernel B beside its predecessor A need not wait if the next kernel C waits for both: for B by `gdc_wait`, and for A
   by a counter (`Awaited`) that A increments when its results are written. C cannot wait forever, because all programs
   of A are on the device before C starts. An earlier kernel sets the counter to 0 after its own wait, and before any
   program of A counts.
"""

import torch

from gsa_kernels.checks import check_dtype_and_device, check_kernel_dtype, check_product_columns, check_shape
from gsa_kernels.devices import can_chain, launching_on
from gsa_kernels.limits import ROW_PRODUCT_ROWS
from gsa_kernels.row_product.reference import Norm, check_row_product
from gsa_kernels.row_product.tiling import default_tiling
from gsa_kernels.row_product.triton_product import Launch, multiply


@torch.no_grad()
def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    x_gate: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Compute `row_product` of reference.py. All tensors are bf16 or all fp32, contiguous, and on one device.

    The product is deterministic and not differentiable. On Hopper, its kernel starts before the previous kernel of
    its chain ends. Kernels of the chain must therefore not write weight, bias or norm (rule 3 above).

    Args:
        x: [B, K], B in limits.ROW_PRODUCT_ROWS and K in limits.ROW_PRODUCT_COLUMNS
        launch: with one row of x, the launch may also wait for a counter (rule 5) or advance counters

    Raises:
        ValueError: also if the kernel does not support a size, dtype, layout or device.
    """
    count = check_row_product(x, weight, norm, bias, residual, gated)
    batch, columns = x.shape
    if batch not in ROW_PRODUCT_ROWS:
        raise ValueError(f"x has {batch} rows; pass 1 to {ROW_PRODUCT_ROWS[-1]}")
    check_product_columns(columns)
    check_kernel_dtype("x", x)
    launch = Launch() if launch is None else launch
    counters: tuple[torch.Tensor, ...] = () if launch.awaited is None else (launch.awaited.counter,)
    counters += launch.advances or ()
    for counter in counters:
        check_shape("launch's counters", counter, "[1]", (1,))
        if batch > 1:
            raise ValueError(f"x has {batch} rows with something awaited or advanced; pass one row")
    if x_gate is not None:
        check_shape("x_gate", x_gate, "[B, K]", (batch, columns))
    named = {
        "weight": weight,
        "norm.weight": None if norm is None else norm.weight,
        "bias": bias,
        "residual": residual,
        "x_gate": x_gate,
    }
    check_dtype_and_device("x", x, named)
    for name, tensor in {"x": x, **named}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has stride {tensor.stride()}; make it contiguous")
    if launch.tiling is None:
        launch = launch._replace(tiling=default_tiling(batch, columns, count, gated))
    out = torch.empty(batch, count, dtype=x.dtype, device=x.device)
    with launching_on(x, "x"):
        multiply(x, weight, x_gate, norm, (bias, residual), gated, out, launch, can_chain(x))
    return out
