"""Computes the joined projection of one new token, and its attention inputs and cache entries, in one launch
(`enter_row` of entry_reference.py). The layer must not have norms of q and k.

On Hopper, the kernel starts before the previous kernel ends (row_product/op.py). The caller may divide the rows of the
weight among several launches: the first computes the rows that the selection needs, and the others run beside later
kernels that leave memory bandwidth unused.
"""

import torch

from gsa_kernels.checks import (
    check_dtype_and_device,
    check_head_size,
    check_kernel_dtype,
    check_product_columns,
    check_shape,
)
from gsa_kernels.decode.entry import check_entry_cache, check_norms
from gsa_kernels.decode.entry_reference import AngleTable, Entered, EntryCache, EntrySizes, JoinedProduct
from gsa_kernels.decode.triton_joined import (
    DEFAULT_TILING,
    GATE,
    HEADS,
    INDEX,
    PairTiling,
    Part,
    launch_joined,
)
from gsa_kernels.devices import can_chain, launching_on

WHOLE = Part((HEADS, GATE, INDEX))


@torch.no_grad()
def enter_row(
    x: torch.Tensor,
    product: JoinedProduct,
    sizes: EntrySizes,
    table: AngleTable,
    cache: EntryCache,
    slot: torch.Tensor,
    tiling: PairTiling = DEFAULT_TILING,
    part: Part = WHOLE,
) -> Entered:
    """Compute `enter_row` of entry_reference.py for x [1, d], with all tensors in bf16 or all in fp32.

    Intermediate values are not rounded.

    Args:
        part: the sections of the result to compute; the other sections are not changed

    Raises:
        ValueError: the kernel does not support a shape, size or dtype.
    """
    check_shape("x", x, "[1, d]", (1, None))
    check_kernel_dtype("x", x)
    columns = x.shape[1]
    check_product_columns(columns)
    weight = product.weight
    check_shape("product.weight", weight, "[N, d]", (None, columns))
    if weight.shape[0] < sizes.width:
        raise ValueError(f"product.weight has {weight.shape[0]} rows; pass at least {sizes.width}")
    check_shape("product.norm.weight", product.norm.weight, "[d]", (columns,))
    if product.bias is not None:
        check_shape("product.bias", product.bias, "[N]", (weight.shape[0],))
    check_head_size(sizes.head_dim)
    if sizes.index_heads and sizes.index_dim % 2 != 0:
        raise ValueError(f"the indexer's head size is {sizes.index_dim}; pass an even number")
    check_entry_cache(sizes, cache, slot, batch=1)
    channels, index_channels = table.channels, table.index_channels
    check_shape("table.values", table.values, "[positions + 1, angles]", (None, table.width))
    check_shape("table.lengths", table.lengths, "[1]", (1,))
    most = sizes.index_dim if sizes.index_heads else index_channels  # all layers have one table
    for name, count, size in (
        ("channels", channels, sizes.head_dim),
        ("index_channels", index_channels, most),
    ):
        if count % 2 != 0 or not 0 <= count <= size:
            raise ValueError(f"table.{name} is {count}; pass an even number of at most {size}")
    named = {
        "x": x,
        "product.weight": weight,
        "product.norm.weight": product.norm.weight,
        "product.bias": product.bias,
        "table.values": table.values,
        **check_norms("product.index_norms", product.index_norms, sizes.index_dim),
    }
    cached = {"cache.k": cache.k, "cache.v": cache.v, "cache.index_keys": cache.index_keys}
    check_dtype_and_device("x", x, named | cached)
    for name, tensor in (named | cached).items():
        if tensor is not None and (tensor.stride(-1) != 1 or (name in named and not tensor.is_contiguous())):
            raise ValueError(f"{name} has stride {tensor.stride()}; make it contiguous")
    if not part.sections or set(part.sections) - set(WHOLE.sections):
        raise ValueError(f"part.sections is {part.sections}; pass one or more of {WHOLE.sections}")
    if not (part.beside or part.waits):
        raise ValueError(
            "part.waits is False with part.beside False; only a part beside another kernel need not wait"
        )
    for name, counter in (("restarts", part.restarts), ("arrivals", part.arrivals)):
        if counter is not None:
            check_shape(f"part.{name}", counter, "[1]", (1,))
        if counter is not None and part.beside:
            raise ValueError(
                f"part.{name} is a counter with part.beside True; pass it to a part that waits first"
            )
    if product.index_norms is not None and INDEX in part.sections and part.arrivals is None:
        raise ValueError("part.arrivals is None with product.index_norms; pass int32 [1] with the value 0")
    out = _new_entered(x, sizes) if part.into is None else part.into
    with launching_on(x, "x"):
        launch_joined(x, product, sizes, table, cache, slot, out, tiling, part, can_chain(x))
    return out


def _new_entered(x: torch.Tensor, sizes: EntrySizes) -> Entered:
    q = x.new_empty(1, sizes.q // sizes.head_dim, sizes.head_dim)
    gate = torch.empty_like(q) if sizes.gate else None
    if not sizes.index_heads:
        return Entered(q, gate, None, None)
    index_queries = x.new_empty(1, 1, sizes.index_heads, sizes.index_dim)
    return Entered(q, gate, index_queries, x.new_empty(1, 1, sizes.index_heads))
