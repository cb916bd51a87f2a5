"""Splits the indexer's joint projection into queries, key and weights, and applies RoPE. The results have the batch as
the first axis. The forward pass and the backward pass run one kernel each."""

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_at_least, check_differentiated_once, check_shape

ROWS, WARPS = 16, 4
"""Tokens and warps of a program."""


def split_projection(
    together: torch.Tensor,
    heads: int,
    dim: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [L, B, columns] into queries [B, L, heads, dim], keys [B, L, dim] and weight logits [B, L, heads].

    All results are contiguous.

    Args:
        together: contiguous; columns of the queries, the key and the weights. Any further columns get gradients of 0.
        cos, sin: fp32 [L, dim / 2], contiguous, without gradient: the rotary embedding of queries and keys, applied in
            fp32 to pairs from the two halves of a head; no rotation if None
    """
    check_shape("together", together, "[L, B, columns]", (None, None, None))
    check_at_least("heads", heads, 1)
    check_at_least("dim", dim, 1)
    if together.shape[2] < heads * dim + dim + heads:
        raise ValueError(
            f"together has {together.shape[2]} columns; pass heads * dim + dim + heads, with heads {heads}, dim {dim}"
        )
    if not together.is_contiguous():
        raise ValueError(f"together has strides {together.stride()}; make it contiguous")
    for name, table in (("cos", cos), ("sin", sin)):
        if (table is None) != (cos is None):
            raise ValueError(
                f"{name} is {'None' if table is None else 'given'} and cos is not; pass both or none"
            )
        if table is None:
            continue
        if dim % 2:
            raise ValueError(f"dim is {dim} with {name}; pass an even one, whose halves are turned in pairs")
        check_shape(name, table, "[L, dim / 2]", (together.shape[0], dim // 2))
        if table.dtype != torch.float32 or table.device != together.device or not table.is_contiguous():
            raise ValueError(
                f"{name} is {table.dtype} on {table.device} with strides {table.stride()}; pass float32 on "
                f"{together.device}, contiguous"
            )
    queries, keys, weights = _SplitProjection.apply(together, heads, dim, cos, sin)
    return queries, keys, weights


class _SplitProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        together: torch.Tensor,
        heads: int,
        dim: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length, batch, columns = together.shape
        ctx.columns, ctx.tables = columns, (cos, sin)
        queries = together.new_empty(batch, length, heads, dim)
        keys = together.new_empty(batch, length, dim)
        weights = together.new_empty(batch, length, heads)
        _copy(together, queries, keys, weights, ctx.tables, backward=False)
        return queries, keys, weights

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        check_differentiated_once()
        queries, keys, weights = (grad.contiguous() for grad in grads)
        batch, length = keys.shape[:2]
        together = keys.new_empty(length, batch, ctx.columns)
        _copy(together, queries, keys, weights, ctx.tables, backward=True)
        return together, None, None, None, None


def _copy(
    together: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
    backward: bool,
) -> None:
    length, batch, columns = together.shape
    heads, dim = queries.shape[2:]
    _copy_kernel[(triton.cdiv(length, ROWS), batch)](
        together,
        queries,
        keys,
        weights,
        *tables,
        length,
        batch,
        HEADS=heads,
        DIM=dim,
        COLUMNS=columns,
        BLOCK_QUERIES=triton.next_power_of_2(heads * dim),
        BLOCK_DIM=triton.next_power_of_2(dim),
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_REST=triton.next_power_of_2(columns - heads * dim - dim - heads),
        BACKWARD=backward,
        ROWS=ROWS,
        num_warps=WARPS,
    )


@triton.jit
def _copy_kernel(
    together, queries, keys, weights, cos, sin, length, batch,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_REST: tl.constexpr,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    exists = rows < length
    mixed = together + (rows * batch + sequence) * COLUMNS
    token = sequence * length + rows
    WIDTH: tl.constexpr = HEADS * DIM
    if cos is None:
        _copy_part(mixed, queries + token * WIDTH, exists, WIDTH, BLOCK_QUERIES, BACKWARD)
        _copy_part(mixed + WIDTH, keys + token * DIM, exists, DIM, BLOCK_DIM, BACKWARD)
    else:
        c, s = cos + rows * (DIM // 2), sin + rows * (DIM // 2)
        _rotate_part(mixed, queries + token * WIDTH, c, s, exists, WIDTH, DIM, BLOCK_QUERIES, BACKWARD)
        _rotate_part(mixed + WIDTH, keys + token * DIM, c, s, exists, DIM, DIM, BLOCK_DIM, BACKWARD)
    _copy_part(mixed + WIDTH + DIM, weights + token * HEADS, exists, HEADS, BLOCK_HEADS, BACKWARD)
    USED: tl.constexpr = WIDTH + DIM + HEADS
    if BACKWARD and USED < COLUMNS:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        nothing = tl.zeros([ROWS, BLOCK_REST], together.dtype.element_ty)
        tl.store(mixed + USED + rest, nothing, mask=exists & (rest < COLUMNS - USED))


@triton.jit
def _copy_part(mixed, part, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    mask = exists & (columns < WIDTH)
    if BACKWARD:
        tl.store(mixed + columns, tl.load(part + columns, mask=mask), mask=mask)
    else:
        tl.store(part + columns, tl.load(mixed + columns, mask=mask), mask=mask)


@triton.jit
def _rotate_part(
    mixed, part, cos, sin, exists, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    """Rotate the halves (a, b) of each head to (a cos - b sin, b cos + a sin). The backward pass rotates the gradients
    by the opposite angle."""
    HALF: tl.constexpr = DIM // 2
    columns = tl.arange(0, BLOCK)[None, :]
    mask = exists & (columns < WIDTH)
    in_head = columns % DIM
    is_first = in_head < HALF
    partners = tl.where(is_first, columns + HALF, columns - HALF)
    if BACKWARD:
        source, target = part, mixed
    else:
        source, target = mixed, part
    own = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(source + partners, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + in_head % HALF, mask=mask, other=0.0)
    s = tl.load(sin + in_head % HALF, mask=mask, other=0.0)
    turned = partner * s
    negative = is_first == (not BACKWARD)
    result = own * c + tl.where(negative, -turned, turned)
    tl.store(target + columns, result.to(target.dtype.element_ty), mask=mask)
