"""Adds sums over tensors to existing values in one or two launches, deterministically."""

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import check_kernel_dtype, check_shape
from gsa_kernels.devices import launching_on
from gsa_kernels.limits import ceil_div, next_power_of_2

BLOCK, WARPS = 16384, 16
"""Elements that the only program of `add_total` takes at a time, 32 per thread."""

ROWS, COLUMNS, COLUMN_WARPS = 32, 256, 4
"""Tile of `add_column_sums`: each thread makes eight loads of 16 bytes in bf16 (docs/kernels.md, Tuning)."""

PROGRAMS, MOST_PARTS = 640, 128
"""Number of programs that an H200 runs at once, and largest number of programs per column. The partial sums of a column
must fit the registers of one thread."""


def add_total(values: torch.Tensor, total: torch.Tensor) -> None:
    """Add the sum of `values` to `total`.

    Args:
        values: any shape, fp32; copied if not contiguous
        total: fp64, 0-d
    """
    check_shape("total", total, "0-d", ())
    if total.dtype != torch.float64 or values.dtype != torch.float32:
        raise ValueError(f"values is {values.dtype} and total {total.dtype}; pass fp32 and fp64")
    with launching_on(values, "values"):
        _total_kernel[(1,)](values.contiguous(), total, values.numel(), BLOCK=BLOCK, num_warps=WARPS)


def add_column_sums(rows: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the sum over n of rows[n, c], computed in fp32, to sums[c].

    Args:
        rows: [N, C], bf16 or fp32; copied if not contiguous
        sums: [C], fp32, contiguous
    """
    check_shape("rows", rows, "[N, C]", (None, None))
    count, columns = rows.shape
    check_shape("sums", sums, "[C]", (columns,))
    check_kernel_dtype("rows", rows, "rows.sum(0)")
    if sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ValueError(f"sums is {sums.dtype} with strides {sums.stride()}; pass fp32, contiguous")
    if count == 0:
        return
    across = ceil_div(columns, COLUMNS)
    wanted = min(max(PROGRAMS // across, 1), MOST_PARTS)
    height = ceil_div(count, wanted * ROWS) * ROWS  # rows per program
    parts = ceil_div(count, height)
    partial_sums = torch.empty(parts, columns, dtype=torch.float32, device=rows.device)
    with launching_on(rows, "rows"):
        _column_sums_kernel[(across, parts)](
            rows.contiguous(),
            partial_sums,
            count,
            columns,
            height,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=COLUMN_WARPS,
        )
        block = next_power_of_2(parts)
        _add_parts_kernel[(ceil_div(columns, 32),)](
            partial_sums, sums, parts, columns, PARTS=block, COLUMNS=32, num_warps=4
        )


@triton.jit
def _total_kernel(values, total, size, BLOCK: tl.constexpr):
    summed = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        summed += tl.load(values + place, mask=place < size, other=0.0).to(tl.float64)
    tl.store(total, tl.load(total) + tl.sum(summed))


@triton.jit
def _column_sums_kernel(
    rows, partial_sums, count, columns, height, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * height
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + height, count), ROWS):
        exists = (start + row < count)[:, None] & (column < columns)[None, :]
        pointers = rows + (start + row).to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    out = partial_sums + tl.program_id(1) * columns + column
    tl.store(out, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _add_parts_kernel(partial_sums, sums, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    exists = (part < parts)[:, None] & (column < columns)[None, :]
    values = tl.load(partial_sums + part[:, None] * columns + column[None, :], mask=exists, other=0.0)
    before = tl.load(sums + column, mask=column < columns, other=0.0)
    tl.store(sums + column, before + tl.sum(values, 0), mask=column < columns)
