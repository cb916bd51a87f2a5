"""What both cores measure of budgets, selections and attention probabilities: which queries count, and where in its
document a key stands."""

from __future__ import annotations

import torch

from gsa_kernels import api
from gsa_kernels.selection.causal_packed_mask import packed_mask_of_ranges
from gsa_kernels.types import Geometry, Implementation
from gsa_train.model.query_sample import QuerySample
from gsa_train.model.stats import POSITIONS, Statistics, Vector

LEAST_KEYS = 64
"""Queries that see fewer keys do not count in a sink: where there is little else, the first token gets much."""


def visible_keys(geometry: Geometry, num_keys: int, device: torch.device) -> torch.Tensor:
    """Keys that each query sees, of its document and not behind it: int64 [B or 1, L].

    Args:
        num_keys: L_k, the last query's own included.
    """
    ends = torch.arange(geometry.query_start + 1, num_keys + 1, device=device)[None]
    return ends if geometry.document_starts is None else ends - geometry.document_starts


def position_groups(positions: torch.Tensor) -> torch.Tensor:
    """The number of each position's group in POSITIONS: int64, of the same shape."""
    firsts = 4 ** torch.arange(len(POSITIONS) - 1, device=positions.device)  # made there: nothing is copied
    return torch.bucketize(positions, firsts, right=True)


@torch.no_grad()
def budget_statistics(budget: torch.Tensor, variance: torch.Tensor, visible: torch.Tensor) -> Statistics:
    """Of the queries that select.

    Args:
        budget: k_t, int [B, R]
        variance: of their scores, fp32 [B, R]
        visible: their `visible_keys`, [B or 1, R]
    """
    visible = visible.expand_as(budget)
    chooses, counted = budget < visible, visible >= 2
    numbers = budget.double()
    statistics = Statistics(
        # Of a query that sees one key it is 0, or NaN, which shows.
        means={"variance": variance},
        counts={"variance": counted.sum()},
        maxima={
            "k_max": torch.where(chooses, numbers, -torch.inf).amax(),
            "k_min": torch.where(chooses, -numbers, -torch.inf).amax(),
        },
        vectors={"k_by_position": _sums_by_position(numbers, visible - 1)},
    )
    statistics.average("k_mean", numbers, chooses)
    statistics.average("dense_query_share", (~chooses).double(), counted)
    return statistics


@torch.no_grad()
def selection_statistics(
    sample: QuerySample,
    sizes: torch.Tensor,
    visible: torch.Tensor,
    overlaps: torch.Tensor,
    union_ratios: torch.Tensor | None,
) -> Statistics:
    """Of the sampled queries. What compares selections, with each other or with chance, is of those that leave keys
    out: a query that sees no more keys than it may select has no choice, and neighbours of two documents share no key.

    Args:
        sizes: |S_t|, int [B, S]
        visible: their `visible_keys`, [B or 1, S]
        overlaps: of the pairs of neighbours, fp32 [B, P]
        union_ratios: of the groups of neighbours, fp32 [B, G]; None without groups
    """
    visible = visible.expand_as(sizes)
    chooses = sizes < visible
    statistics = Statistics(means={"selected_keys": sizes})
    pairs = sample.neighbours
    # In one document each query sees one key more than its neighbour.
    in_one = visible[:, pairs + 1] == visible[:, pairs] + 1
    statistics.average("adjacent_overlap", overlaps, chooses[:, pairs] & chooses[:, pairs + 1] & in_one)
    if union_ratios is not None:
        grouped = sample.grouped.view(-1, sample.group)
        first, last = visible[:, grouped[:, 0]], visible[:, grouped[:, -1]]
        whole = chooses[:, grouped].all(-1) & (last == first + sample.group - 1)
        statistics.average("union_ratio_32", union_ratios, whole)
    if len(sample.sparse) > 0:
        rows = sample.sparse_rows
        # The exact expectation for as many keys drawn at random: each causal key is as likely as any other,
        # so the expected share of the probability is the share of the keys.
        statistics.average("random_recall", sizes[:, rows] / visible[:, rows], chooses[:, rows])
    return statistics


def _sums_by_position(values: torch.Tensor, positions: torch.Tensor) -> Vector:
    """Whole numbers, so that their sums in fp64 do not depend on the order."""
    groups = position_groups(positions).flatten()
    sums = values.new_zeros(len(POSITIONS))
    ones = torch.ones_like(values).flatten()
    return Vector(
        sums.scatter_add(0, groups, values.flatten()),
        sums.scatter_add(0, groups, ones),
    )


@torch.no_grad()
def sink_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    attended: torch.Tensor,
    positions: torch.Tensor,
    document_starts: torch.Tensor | None,
    first_head: int,
    implementation: Implementation,
) -> Statistics:
    """Attention probability by the position of the key in the query's document.

    Args:
        q: [B, T, n_h, d_k], of some queries
        k: [B, L_k, n_kv, d_k]
        attended: packed mask [B or 1, T, ceil(L_k / 32)]
        positions: int64 [T], of the queries in the sequence
        document_starts: int32 [B, T], of their documents; 0 if None
        first_head: number of the first of these heads in the whole model
    """
    starts = torch.zeros_like(positions[None]) if document_starts is None else document_starts
    starts = starts.expand(len(q), -1)
    masses = _attention_by_position(q, k, attended.expand(len(q), -1, -1), starts, implementation)
    counted = positions + 1 - starts >= LEAST_KEYS  # [B, T]
    count, heads = counted.sum(), q.shape[2]
    first = masses[..., 0]
    of_heads = torch.where(counted[..., None], first, 0).sum((0, 1))
    of_positions = torch.where(counted[..., None, None], masses, 0).sum((0, 1, 2))
    return Statistics(
        means={
            "first_token_attention": of_heads,
            "sequence_start_attention": torch.where((starts == 0)[..., None], first, 0),
        },
        counts={"first_token_attention": count * heads},
        vectors={
            "head_first_token_attention": Vector(of_heads, count.expand(heads), first_head),
            "sink_by_position": Vector(of_positions, (count * heads).expand(len(of_positions))),
        },
    )


def _attention_by_position(
    q: torch.Tensor,
    k: torch.Tensor,
    attended: torch.Tensor,
    starts: torch.Tensor,
    implementation: Implementation,
) -> torch.Tensor:
    """Probability on the keys of each group of POSITIONS: fp32 [B, T, n_h, groups], from the log-sum-exp over each."""
    num_keys = k.shape[1]
    groups = sum(first < num_keys for first in POSITIONS)
    bounds = torch.stack(
        [*(starts + first for first in POSITIONS[:groups]), torch.full_like(starts, num_keys)]
    )
    masks = packed_mask_of_ranges(bounds[:-1], bounds[1:], num_keys) & attended
    starts = starts.to(torch.int32)
    lse = api.sampled_lse(q, k, masks, starts, implementation=implementation)
    masses = lse.softmax(0).permute(1, 3, 2, 0)
    return torch.nn.functional.pad(masses, (0, len(POSITIONS) - groups))
