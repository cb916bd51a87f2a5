"""Computes the product of one row with multiply-add instructions, or of up to 16 rows with the matrix units.

If x has one row, a program loads its rows of the weight into registers before it waits for the previous kernel, so that
memory is never idle between two products. RMSNorm multiplies each row of x by one number, 1 / rms(x). Each program
computes this number while it computes the product, and multiplies the result by it at the end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.limits import ROW_PRODUCT_ROWS, ceil_div, next_power_of_2
from gsa_kernels.row_product.reference import Norm
from gsa_kernels.row_product.tiling import Tiling
from gsa_kernels.row_product.triton_counter import await_count
from gsa_kernels.selection.triton_search import INT_MAX

_LEAST_COLUMNS = 16  # in a piece of a row, so that the threads of a tile load at least this number at once


class Awaited(NamedTuple):
    """Describes the kernel before the previous one, which writes x and counts the parts that are ready."""

    counter: torch.Tensor
    """int32 [1]"""
    total: int
    """Value of the counter when all of x is ready."""


class Launch(NamedTuple):
    tiling: Tiling | None = None
    """How the weight's rows are divided among programs. None: `default_tiling` chooses."""
    awaited: Awaited | None = None
    """The kernel that writes x, if it is not the previous kernel."""
    advances: tuple[torch.Tensor, torch.Tensor] | None = None
    """Two integer counters [1], which are incremented when all previous kernels have ended."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_gate: torch.Tensor | None,
    norm: Norm | None,
    added: tuple[torch.Tensor | None, torch.Tensor | None],
    gated: bool,
    out: torch.Tensor,
    launch: Launch,
    chained: bool,
) -> None:
    """Launch the kernel with a tiling and the arguments that `row_product` has checked.

    `added` is the pair of bias and residual. If `chained` is true, the kernel starts before the previous kernel ends.
    """
    batch, columns = x.shape
    rows = out.shape[1]
    tiling, awaited, advances = launch
    assert tiling is not None
    tiles = ceil_div(rows, tiling.rows)
    norm_weight, eps = (None, 0.0) if norm is None else norm
    operands = (x, x_gate, weight, norm_weight, *added, out)
    shared = {
        "ROWS": rows,
        "COLUMNS": columns,
        "TILE": tiling.rows,
        "GATED": gated,
        "CHAINED": chained,
        "num_warps": tiling.warps,
        **({"launch_pdl": True} if chained else {}),
    }
    if batch == 1:
        first, second = pieces(columns)
        counter, total = (None, 0) if awaited is None else awaited
        counters = (counter, *(advances or (None, None)))
        waiting = {"AWAITED": total, "COMPILED": x.is_cuda}
        _one_row_kernel[(tiles,)](*operands, *counters, eps, FIRST=first, SECOND=second, **waiting, **shared)
        return
    _several_rows_kernel[(tiles,)](
        *operands,
        batch,
        eps,
        BATCH=ROW_PRODUCT_ROWS[-1],
        CHUNK=min(tiling.chunk, max(next_power_of_2(columns), _LEAST_COLUMNS)),
        STAGES=tiling.stages,
        PRECISION="tf32" if x.dtype == torch.bfloat16 else "ieee",
        **shared,
    )


def pieces(columns: int) -> tuple[int, int]:
    """Return two powers of two, the second possibly 0, whose sum is at least `columns` and not much more."""
    whole = next_power_of_2(columns)
    if whole == columns or whole <= _LEAST_COLUMNS:
        return max(whole, _LEAST_COLUMNS), 0
    first = whole // 2
    second = max(next_power_of_2(columns - first), _LEAST_COLUMNS)
    return (whole, 0) if first + second >= whole else (first, second)


@triton.jit
def _wide_enough(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return row numbers, in int64 if offsets into the weight exceed int32. The output layer of a large vocabulary
    needs int64."""
    if ROWS * COLUMNS > INT_MAX:
        return rows.to(tl.int64)
    else:  # noqa: RET505 (the compiler reads what follows a return)
        return rows


@triton.jit
def _second_half(weight_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a pointer past the first ROWS rows of a weight, which belong to the gate. A large offset is computed in
    int64, because as an int32 constant it would become negative."""
    if ROWS * COLUMNS > INT_MAX:
        return weight_ptr + tl.full([], ROWS, tl.int64) * COLUMNS
    else:  # noqa: RET505
        return weight_ptr + ROWS * COLUMNS


@triton.jit
def load_rows(weight_ptr, rows, row_ok, COLUMNS: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of a weight, columns from START on: [TILE, WIDTH]; zeros where `row_ok` is false."""
    columns = START + tl.arange(0, WIDTH)
    ptrs = weight_ptr + rows[:, None] * COLUMNS + columns[None, :]
    mask = row_ok[:, None]
    if START + WIDTH > COLUMNS:
        mask &= (columns < COLUMNS)[None, :]
    # The weight is read once per step, so the L2 cache keeps other data.
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_piece(
    vector_ptr, COLUMNS: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, CACHE: tl.constexpr
):
    """Load fp32 [WIDTH] of a vector, zeros beyond its end."""
    columns = START + tl.arange(0, WIDTH)
    return tl.load(vector_ptr + columns, mask=columns < COLUMNS, other=0.0, cache_modifier=CACHE).to(
        tl.float32
    )


@triton.jit
def _one_row_kernel(
    x_ptr,
    x_gate_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    awaited_ptr,
    advanced_ptr,
    other_advanced_ptr,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GATED: tl.constexpr,
    AWAITED: tl.constexpr,
    COMPILED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    rows = _wide_enough(tl.program_id(0) * TILE + tl.arange(0, TILE), ROWS, COLUMNS)
    row_ok = rows < ROWS
    up_ptr = _second_half(weight_ptr, ROWS, COLUMNS)
    # The weight is loaded before the wait, because no kernel of the chain writes it, and kept in registers.
    w = load_rows(weight_ptr, rows, row_ok, COLUMNS, 0, FIRST)
    if SECOND:
        w_second = load_rows(weight_ptr, rows, row_ok, COLUMNS, FIRST, SECOND)
    if GATED:
        up = load_rows(up_ptr, rows, row_ok, COLUMNS, 0, FIRST)
        if SECOND:
            up_second = load_rows(up_ptr, rows, row_ok, COLUMNS, FIRST, SECOND)
    if norm_ptr is not None:
        norm = load_piece(norm_ptr, COLUMNS, 0, FIRST, "")
        if SECOND:
            norm_second = load_piece(norm_ptr, COLUMNS, FIRST, SECOND, "")
    if CHAINED:
        gdc_wait()
    # All loads come before the first use, starting with data that is ready before x.
    added = tl.zeros([TILE], tl.float32)
    if bias_ptr is not None:
        added += tl.load(bias_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        added += tl.load(residual_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)
    if x_gate_ptr is not None:
        gate = load_piece(x_gate_ptr, COLUMNS, 0, FIRST, "")
        if SECOND:
            gate_second = load_piece(x_gate_ptr, COLUMNS, FIRST, SECOND, "")
    if awaited_ptr is not None:
        await_count(awaited_ptr, AWAITED, COMPILED)

    # Awaited data bypasses the first-level cache, because this kernel started before the data was written.
    CACHE: tl.constexpr = "" if awaited_ptr is None else ".cg"
    x = load_piece(x_ptr, COLUMNS, 0, FIRST, CACHE)
    if SECOND:
        x_second = load_piece(x_ptr, COLUMNS, FIRST, SECOND, CACHE)
    if x_gate_ptr is not None:
        x *= tl.sigmoid(gate)
        if SECOND:
            x_second *= tl.sigmoid(gate_second)
    scale = 1.0
    if norm_ptr is not None:
        squares = tl.sum(x * x)
        x *= norm
        if SECOND:
            squares += tl.sum(x_second * x_second)
            x_second *= norm_second
        scale = tl.rsqrt(squares / COLUMNS + eps)

    out = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if SECOND:
        out += tl.sum(w_second.to(tl.float32) * x_second[None, :], axis=1)
    out *= scale
    if GATED:
        gated = tl.sum(up.to(tl.float32) * x[None, :], axis=1)
        if SECOND:
            gated += tl.sum(up_second.to(tl.float32) * x_second[None, :], axis=1)
        out = out * tl.sigmoid(out) * (gated * scale)
    out += added
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=row_ok)
    if advanced_ptr is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.program_id(0) == 0:
            tl.store(advanced_ptr, tl.load(advanced_ptr) + 1)
            tl.store(other_advanced_ptr, tl.load(other_advanced_ptr) + 1)


@triton.jit
def _several_rows_kernel(
    x_ptr,
    x_gate_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    batch,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program takes TILE rows of the weight, in chunks of columns, for all rows of x."""
    if CHAINED:
        gdc_launch_dependents()
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_batch = tl.arange(0, BATCH)
    up_ptr = _second_half(weight_ptr, ROWS, COLUMNS)
    acc = tl.zeros([TILE, BATCH], tl.float32)
    up_acc = tl.zeros([TILE, BATCH], tl.float32)
    squares = tl.zeros([BATCH], tl.float32)
    if CHAINED:  # the loop prefetches its loads, including x, before it starts
        gdc_wait()
    for first in tl.range(0, COLUMNS, CHUNK, num_stages=STAGES):
        columns = first + tl.arange(0, CHUNK)
        weight_mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
        offsets = _wide_enough(rows, ROWS, COLUMNS)[:, None] * COLUMNS + columns[None, :]
        x_mask = (columns < COLUMNS)[:, None] & (in_batch < batch)[None, :]
        x_offsets = in_batch[None, :] * COLUMNS + columns[:, None]
        x = tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0)
        w = tl.load(weight_ptr + offsets, mask=weight_mask, other=0.0)
        value = x.to(tl.float32)
        if x_gate_ptr is not None:
            value *= tl.sigmoid(tl.load(x_gate_ptr + x_offsets, mask=x_mask, other=0.0).to(tl.float32))
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
            squares += tl.sum(value * value, axis=0)
            value *= norm[:, None]
        x = value.to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(up_ptr + offsets, mask=weight_mask, other=0.0)
            up_acc = tl.dot(up, x, up_acc, input_precision=PRECISION)
    if norm_ptr is not None:
        scale = tl.rsqrt(squares / COLUMNS + eps)
        acc *= scale[None, :]
        up_acc *= scale[None, :]
    if GATED:
        acc = acc * tl.sigmoid(acc) * up_acc
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)[:, None]
    places = in_batch[None, :] * ROWS + rows[:, None]
    mask = (rows < ROWS)[:, None] & (in_batch < batch)[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)
