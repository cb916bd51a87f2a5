"""Computes the statistics of `statistics.py` on packed masks for a sample of the queries."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gsa_kernels.devices import launching_on
from gsa_kernels.limits import next_power_of_2
from gsa_kernels.selection.triton_search import count_bits

_COLUMNS = 1024
"""Words of a query that are read at a time."""


@dataclass(frozen=True)
class SelectionStatistics:
    sizes: torch.Tensor
    """|S_t|: int32 [B, R]."""
    overlaps: torch.Tensor
    """|S_t & S_{t-1}| / |S_t| of the P pairs: fp32 [B, P]; 0 where S_t is empty."""
    union_ratios: torch.Tensor
    """|union of S_t in the group| / mean |S_t| of the G groups: fp32 [B, G]; 0 where all are empty."""


def statistics_of_packed_mask(
    packed_mask: torch.Tensor, neighbours: torch.Tensor, grouped: torch.Tensor, group: int
) -> SelectionStatistics:
    """Compute all statistics in one launch, so that the host stays ahead of the device in logged steps.

    Args:
        packed_mask: int32 [B, R, ceil(Lk / 32)]
        neighbours: int64 [P]: t of each pair of queries t - 1 and t
        grouped: int64 [G * group], the queries of all groups, group by group
        group: at least 1
    """
    batch, rows, columns = packed_mask.shape
    pairs, groups = len(neighbours), len(grouped) // group
    sizes = torch.empty(batch, rows, dtype=torch.int32, device=packed_mask.device)
    overlaps = torch.empty(batch, pairs, device=packed_mask.device)
    union_ratios = torch.empty(batch, groups, device=packed_mask.device)
    if batch * rows > 0:
        with launching_on(packed_mask, "packed_mask"):
            _statistics_kernel[(rows + pairs + groups, batch)](
                packed_mask.contiguous(),
                neighbours,
                grouped,
                sizes,
                overlaps,
                union_ratios,
                rows,
                pairs,
                groups,
                columns,
                group,
                COLUMNS=min(_COLUMNS, next_power_of_2(columns)),
                ASM=packed_mask.is_cuda,
                num_warps=4,
            )
    return SelectionStatistics(sizes, overlaps, union_ratios)


@triton.jit(do_not_specialize=["rows", "pairs", "groups", "columns", "group"])
def _statistics_kernel(
    words, neighbours, grouped, sizes, overlaps, union_ratios, rows, pairs, groups, columns, group,
    COLUMNS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One program computes the size of one query's selection, one pair, or one group."""
    item = tl.program_id(0)
    batch = tl.program_id(1)
    words += batch.to(tl.int64) * rows * columns
    joined_bits = tl.zeros([COLUMNS], tl.int32)
    single_bits = tl.zeros([COLUMNS], tl.int32)
    is_pair = (item >= rows) & (item < rows + pairs)
    pair = tl.load(neighbours + item - rows, mask=is_pair, other=0)
    first = (item - rows - pairs) * group
    members = tl.where(item < rows, 1, tl.where(is_pair, 2, group))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        joined = tl.zeros([COLUMNS], tl.int32)
        for member in range(members):
            of_group = tl.load(grouped + first + member, mask=item >= rows + pairs, other=0)
            row = tl.where(item < rows, item, tl.where(is_pair, pair + member, of_group))
            own = tl.load(words + row * columns + column, mask=column < columns, other=0)
            joined = tl.where(is_pair & (member > 0), joined & own, joined | own)
            # Only the later query of a pair counts.
            single_bits += tl.where(is_pair & (member == 0), 0, count_bits(own, ASM))
        joined_bits += count_bits(joined, ASM)
    union = tl.sum(joined_bits)
    single = tl.sum(single_bits)
    tl.store(sizes + batch * rows + item, single, mask=item < rows)
    share = tl.div_rn(union.to(tl.float32), tl.maximum(single, 1).to(tl.float32))
    tl.store(overlaps + batch * pairs + item - rows, share, mask=is_pair)
    ratio = tl.div_rn((union * group).to(tl.float32), tl.maximum(single, 1).to(tl.float32))
    tl.store(union_ratios + batch * groups + item - rows - pairs, ratio, mask=item >= rows + pairs)
