"""Splits the indexer's joint projection and applies RMSNorm and RoPE. One kernel computes the forward pass, and one
kernel computes the backward pass. If there are norms, another kernel then sums the gradients of the norms' weights."""

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import (
    check_at_least,
    check_differentiated_once,
    check_kernel_dtype,
    check_layout,
    check_shape,
)
from gsa_kernels.devices import launching_on
from gsa_kernels.limits import ceil_div, next_power_of_2

ELEMENTS, WARPS = 4096, 4
"""Elements of the queries that a program takes at a time, 32 per thread, and warps of a program."""

MOST_ROWS = 16
"""Most tokens of a program, for few and small heads."""

PARTS, COLUMNS = 512, 8
"""Tile of the kernel that sums the gradients of the norms' weights: partial sums and columns."""


def fused_split_projection(
    together: torch.Tensor,
    heads: int,
    dim: int,
    *,
    has_weights: bool = True,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-5,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries [B, L, heads, dim], keys [B, L, dim] and weight logits [B, L, heads], all contiguous.

    `split_projection` of split_reference.py defines the result. With norms, `together` is kept for the backward pass.

    Args:
        together: [L, B, columns], contiguous, bf16 or fp32. Columns after the weights get gradients of 0
        norms: [dim], contiguous, dtype of `together`
        eps: above 0
        tables: fp32 [L, dim / 2], contiguous, without gradient

    Raises:
        ValueError: a shape, dtype, device or stride differs from these.
    """
    check_shape("together", together, "[L, B, columns]", (None, None, None))
    check_kernel_dtype("together", together, "indexer/split_reference.py")
    check_at_least("heads", heads, 1)
    check_at_least("dim", dim, 1)
    needed = heads * dim + dim + heads * has_weights
    if together.shape[2] < needed:
        raise ValueError(
            f"together has {together.shape[2]} columns; pass heads * dim + dim{' + heads' * has_weights} or more, with "
            f"heads {heads}, dim {dim}"
        )
    if tables is not None and dim % 2:
        raise ValueError(f"dim is {dim} with tables; pass an even one, whose halves are turned in pairs")
    if norms is not None and not eps > 0:
        raise ValueError(f"eps is {eps}; pass a positive number")
    given = {"together": (together, together.dtype)}
    for number, norm in enumerate(norms or ()):
        check_shape(f"norms[{number}]", norm, "[dim]", (dim,))
        given[f"norms[{number}]"] = (norm, together.dtype)
    for number, table in enumerate(tables or ()):
        check_shape(f"tables[{number}]", table, "[L, dim / 2]", (together.shape[0], dim // 2))
        given[f"tables[{number}]"] = (table, torch.float32)
    for name, (tensor, dtype) in given.items():
        check_layout(name, tensor, dtype, together.device)
    queries, keys, weights = _SplitProjection.apply(
        together, heads, dim, has_weights, *(norms or (None, None)), eps, *(tables or (None, None))
    )
    return queries, keys, weights


class _SplitProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        together: torch.Tensor,
        heads: int,
        dim: int,
        has_weights: bool,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        length, batch, ctx.columns = together.shape
        ctx.eps = eps
        ctx.save_for_backward(None if query_norm is None else together, query_norm, key_norm, cos, sin)
        queries = together.new_empty(batch, length, heads, dim)
        keys = together.new_empty(batch, length, dim)
        weights = together.new_empty(batch, length, heads) if has_weights else None
        grid, constants = _grid_and_constants(queries, ctx.columns)
        with launching_on(together, "together"):
            _split_kernel[grid](
                together,
                queries,
                keys,
                weights,
                query_norm,
                key_norm,
                cos,
                sin,
                eps,
                length,
                batch,
                **constants,
            )
        return queries, keys, weights

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once()
        together, query_norm, key_norm, cos, sin = ctx.saved_tensors
        queries, keys, weights = (None if grad is None else grad.contiguous() for grad in grads)
        assert queries is not None
        assert keys is not None
        batch, length, heads, dim = queries.shape
        grid, constants = _grid_and_constants(queries, ctx.columns)
        grad_together = queries.new_empty(length, batch, ctx.columns)
        parts = grid[0] * batch
        partial_sums = None
        if query_norm is not None:
            partial_sums = queries.new_empty(parts, 2 * dim, dtype=torch.float32)
        used = heads * dim + dim + (0 if weights is None else heads)
        _split_backward_kernel[grid](
            queries,
            keys,
            weights,
            together,
            query_norm,
            key_norm,
            cos,
            sin,
            grad_together,
            partial_sums,
            ctx.eps,
            length,
            batch,
            **constants,
            BLOCK_REST=next_power_of_2(ctx.columns - used),
        )
        if partial_sums is None:
            return (grad_together, *(None,) * 8)
        grad_norms = queries.new_empty(2, dim)
        _sum_parts_kernel[(ceil_div(2 * dim, COLUMNS),)](
            partial_sums, grad_norms, parts, 2 * dim, PARTS=PARTS, COLUMNS=COLUMNS, num_warps=WARPS
        )
        return grad_together, None, None, None, grad_norms[0], grad_norms[1], None, None, None


def _grid_and_constants(queries: torch.Tensor, columns: int) -> tuple[tuple[int, int], dict[str, int]]:
    batch, length, heads, dim = queries.shape
    block_heads, block_half = next_power_of_2(heads), next_power_of_2(ceil_div(dim, 2))
    rows = min(max(ELEMENTS // (block_heads * 2 * block_half), 1), MOST_ROWS)
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "TOTAL": columns,
        "BLOCK_HEADS": block_heads,
        "BLOCK_HALF": block_half,
        "ROWS": rows,
        "num_warps": WARPS,
    }
    return (ceil_div(length, rows), batch), constants


# --- kernels: tensors have the axes token, head, half of a head's elements -----------------------------------


@triton.jit
def _split_kernel(
    together, queries, keys, weights, query_norm, key_norm, cos, sin, eps, length, batch,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, exists, mixed, token = _rows_of_program(length, batch, TOTAL, ROWS)
    WIDTH: tl.constexpr = HEADS * DIM
    source, of_key = together + mixed, together + mixed + WIDTH
    _split_part(
        source, queries + token * WIDTH, query_norm, cos, sin, eps, rows, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF
    )  # fmt: skip
    _split_part(of_key, keys + token * DIM, key_norm, cos, sin, eps, rows, exists, 1, DIM, 1, BLOCK_HALF)
    if weights is not None:
        head = tl.arange(0, BLOCK_HEADS)[None, None, :]
        mask = exists & (head < HEADS)
        logits = tl.load(source + WIDTH + DIM + head, mask=mask)
        tl.store(weights + token * HEADS + head, logits, mask=mask)


@triton.jit
def _split_backward_kernel(
    queries, keys, weights, together, query_norm, key_norm, cos, sin, grad_together, partial_sums, eps, length, batch,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`queries`, `keys` and `weights` are gradients of the forward kernel's results of the same names. If there are
    norms, each program also stores its part of the norm weights' gradients: DIM values for the query norm, then DIM
    for the key norm."""
    rows, exists, mixed, token = _rows_of_program(length, batch, TOTAL, ROWS)
    WIDTH: tl.constexpr = HEADS * DIM
    inputs, of_key, query_sums, key_sums = None, None, None, None
    if query_norm is not None:
        inputs, of_key = together + mixed, together + mixed + WIDTH
        query_sums = partial_sums + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * (2 * DIM)
        key_sums = query_sums + DIM
    target = grad_together + mixed
    _split_backward_part(
        queries + token * WIDTH, inputs, target, query_norm, query_sums, cos, sin, eps, rows, exists,
        HEADS, DIM, BLOCK_HEADS, BLOCK_HALF,
    )  # fmt: skip
    _split_backward_part(
        keys + token * DIM, of_key, target + WIDTH, key_norm, key_sums, cos, sin, eps, rows, exists,
        1, DIM, 1, BLOCK_HALF,
    )  # fmt: skip
    USED: tl.constexpr = WIDTH + DIM + (0 if weights is None else HEADS)
    if weights is not None:
        head = tl.arange(0, BLOCK_HEADS)[None, None, :]
        mask = exists & (head < HEADS)
        tl.store(target + WIDTH + DIM + head, tl.load(weights + token * HEADS + head, mask=mask), mask=mask)
    if USED < TOTAL:
        rest = tl.arange(0, BLOCK_REST)[None, None, :]
        nothing = tl.zeros([ROWS, 1, BLOCK_REST], grad_together.dtype.element_ty)
        tl.store(target + USED + rest, nothing, mask=exists & (rest < TOTAL - USED))


@triton.jit
def _sum_parts_kernel(partial_sums, sums, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum partial_sums [parts, columns] over the parts, in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS)).to(tl.int64)
        exists = (part < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(partial_sums + part[:, None] * columns + column[None, :], mask=exists, other=0.0)
    tl.store(sums + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)


@triton.jit
def _rows_of_program(length, batch, TOTAL: tl.constexpr, ROWS: tl.constexpr):
    """Return four values for each token of the program: its position, whether it exists, the offset of its projection,
    and its number in the order [B, L]."""
    sequence = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    return rows, rows < length, (rows * batch + sequence) * TOTAL, sequence * length + rows


@triton.jit
def _split_part(
    source, target, norm, cos, sin, eps, rows, exists,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    first, second = _load_halves(source, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)
    if norm is not None:
        scale = _inverse_rms(first, second, eps, DIM)
        norm_first, norm_second = _load_halves(norm, True, 1, DIM, 1, BLOCK_HALF)
        first = first * scale * norm_first
        second = second * scale * norm_second
    if cos is not None:
        c, s = _load_angles(cos, sin, rows, exists, DIM, BLOCK_HALF)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    _store_halves(target, first, second, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)


@triton.jit
def _split_backward_part(
    grads, source, target, norm, sums, cos, sin, eps, rows, exists,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    first, second = _load_halves(grads, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)
    if cos is not None:  # by the opposite angle
        c, s = _load_angles(cos, sin, rows, exists, DIM, BLOCK_HALF)
        turned = first * c + second * s
        second = second * c - first * s
        first = turned
    if norm is not None:
        # x is the projection, x' = x scale is normed, and g the gradient of x' norm:
        # grad norm = sum of g x', grad x = scale (g norm - x' mean(g norm x')).
        x_first, x_second = _load_halves(source, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)
        scale = _inverse_rms(x_first, x_second, eps, DIM)
        x_first *= scale
        x_second *= scale
        half = tl.arange(0, BLOCK_HALF)
        HALF: tl.constexpr = (DIM + 1) // 2
        tl.store(sums + half, tl.sum(tl.sum(first * x_first, 1), 0), mask=half < HALF)
        tl.store(sums + HALF + half, tl.sum(tl.sum(second * x_second, 1), 0), mask=half < DIM - HALF)
        norm_first, norm_second = _load_halves(norm, True, 1, DIM, 1, BLOCK_HALF)
        first *= norm_first
        second *= norm_second
        mean = tl.sum(first * x_first + second * x_second, 2, keep_dims=True) / DIM
        first = (first - x_first * mean) * scale
        second = (second - x_second * mean) * scale
    _store_halves(target, first, second, exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)


@triton.jit
def _inverse_rms(first, second, eps, DIM: tl.constexpr):
    return tl.rsqrt(tl.sum(first * first + second * second, 2, keep_dims=True) / DIM + eps)


@triton.jit
def _load_angles(cos, sin, rows, exists, DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    half = tl.arange(0, BLOCK_HALF)[None, None, :]
    offsets = rows * (DIM // 2) + half
    mask = exists & (half < DIM // 2)
    return tl.load(cos + offsets, mask=mask, other=0.0), tl.load(sin + offsets, mask=mask, other=0.0)


@triton.jit
def _load_halves(
    pointer, exists,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Load the two halves of each head in fp32. If DIM is odd, the second half is shorter."""
    offsets, in_first, in_second = _places(exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)
    first = tl.load(pointer + offsets, mask=in_first, other=0.0)
    second = tl.load(pointer + (DIM + 1) // 2 + offsets, mask=in_second, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_halves(
    pointer, first, second, exists,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    offsets, in_first, in_second = _places(exists, HEADS, DIM, BLOCK_HEADS, BLOCK_HALF)
    dtype = pointer.dtype.element_ty
    tl.store(pointer + offsets, first.to(dtype), mask=in_first)
    tl.store(pointer + (DIM + 1) // 2 + offsets, second.to(dtype), mask=in_second)


@triton.jit
def _places(
    exists, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    half = tl.arange(0, BLOCK_HALF)[None, None, :]
    in_head = exists & (head < HEADS)
    in_first = in_head & (half < (DIM + 1) // 2)
    return head * DIM + half, in_first, in_head & (half < DIM // 2)
