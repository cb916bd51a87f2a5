"""Measure budgets, selections and attention probabilities from a layer's tensors in logged steps and validations.

`MeasuredQueries` computes only once what all layers share, which saves kernel launches.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from gsa_kernels import api
from gsa_kernels.attention.reference import attention_probs
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.reference import adjacent_overlap, sparse_attention, union_ratio
from gsa_kernels.types import Implementation, Selection
from gsa_train.model.probes.measured_queries import MeasuredQueries, SparseQueries
from gsa_train.model.probes.stats import POSITIONS, Statistics, Vector

MOST_PROBABILITIES = 1 << 24
"""Maximum number of attention probabilities in memory, unless one key-value head has more."""


@torch.no_grad()
def measure_selection(
    selection: Selection, variance_ema: torch.Tensor, queries: MeasuredQueries, implementation: Implementation
) -> Statistics:
    """Measure the budgets of all queries that select, and the sampled queries' selections."""
    sample = queries.sample
    statistics = budget_statistics(selection.budget, selection.variance, queries)
    statistics.means["variance_ema"] = variance_ema.clone()  # a copy, because it changes after the step
    if selection.key_lists is not None:
        statistics.means["union_density"] = selection.key_lists.density().reshape(1)
    if len(sample) == 0:
        return statistics
    mask, grouped = selection.packed_rows(sample.rows), len(sample.grouped) > 0
    if implementation == "triton":
        from gsa_kernels.selection.triton_statistics import statistics_of_packed_mask  # imports Triton

        found = statistics_of_packed_mask(mask, sample.neighbours, sample.grouped, sample.group)
        sizes, overlaps = found.sizes, found.overlaps
        ratios = found.union_ratios if grouped else None
    else:
        selected = unpack_mask(mask, queries.num_keys)
        sizes, overlaps = selected.sum(-1), adjacent_overlap(selected)[:, sample.neighbours]
        ratios = union_ratio(selected[:, sample.grouped], sample.group) if grouped else None
    statistics.join(selection_statistics(queries, sizes, overlaps, ratios))
    return statistics


@torch.no_grad()
def measure_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    selection: Selection | None,
    sparse: bool,
    queries: MeasuredQueries,
    implementation: Implementation,
    tp_group: dist.ProcessGroup,
    most_keys: int,
) -> Statistics:
    """Measure recall and overlap of the selection, and attention probability by position in the document, for the
    queries `QuerySample.sparse`.

    Separate kernels compute these statistics, so measuring does not change the pass.

    Args:
        q, k: all of the chunk's queries and keys, for this rank's heads
        sparse: whether the layer attends to selected keys only
        most_keys: largest selection that leaves causal keys out
    """
    few, rows, first_head = queries.sparse, queries.sample.sparse, tp_group.rank() * q.shape[2]
    chosen = None if selection is None else selection.packed_rows(rows)
    attended = chosen if sparse else few.causal_packed
    assert attended is not None
    masks, q = few.position_masks & attended[:, None], q.index_select(1, rows)
    if chosen is None:
        return sink_statistics(log_sums(q, k, masks, implementation), few, first_head)
    selected = unpack_mask(chosen, queries.num_keys)
    found = top_key_overlap(q, k, selected, few.causal, most_keys, tp_group)
    if implementation == "reference":
        statistics = sink_statistics(log_sums(q, k, masks, implementation), few, first_head)
        recall: torch.Tensor | None = found.recall_of_mean
        if sparse:
            recall = sparse_attention(q, k, k, selected, recall_among=few.causal).recall
    else:
        other = few.causal_packed if sparse else chosen
        sums = log_sums(q, k, torch.cat([masks, other[:, None]], dim=1), implementation)
        by_position, of_other = sums[:, :, :-1], sums[:, :, -1]
        statistics = sink_statistics(by_position, few, first_head)
        log_ratio = by_position.logsumexp(2) - of_other
        recall = (log_ratio if sparse else -log_ratio).exp().transpose(1, 2)
    assert recall is not None
    leaves_out = (selected != few.causal).any(-1, keepdim=True)
    for name, values in (
        ("recall", recall),
        ("overlap_heads", found.of_heads),
        ("overlap_mean", found.of_mean),
    ):
        statistics.average(name, values, leaves_out)
    return statistics


class TopKeyOverlap(NamedTuple):
    of_heads: torch.Tensor
    """Share of each head's top keys (by attention probability) that are selected, for this rank's heads, [B, T,
    n_h]."""
    of_mean: torch.Tensor
    """Share of the top keys (by mean probability over all ranks' heads) that are selected, [B, T, 1]."""
    recall_of_mean: torch.Tensor
    """Total probability of the selected keys, averaged over all ranks' heads, [B, T, 1]."""


@torch.no_grad()
def top_key_overlap(
    q: torch.Tensor,
    k: torch.Tensor,
    selected: torch.Tensor,
    causal: torch.Tensor,
    most_keys: int,
    tp_group: dist.ProcessGroup,
) -> TopKeyOverlap:
    """Compare a query's n selected keys with its n causal keys of highest attention probability.

    Args:
        q: [B, T, n_h, d_k]
        k: [B, L_k, n_kv, d_k]
        selected, causal: bool [B, T, L_k]
        most_keys: as in `measure_attention`
    """
    group, num_keys = q.shape[2] // k.shape[2], k.shape[1]
    sizes, depth = selected.sum(-1)[:, None], min(most_keys, num_keys)
    within = torch.arange(depth, device=q.device) < sizes[..., None]

    def overlap(probs: torch.Tensor) -> torch.Tensor:
        """[B, heads, T, L_k] -> [B, T, heads]"""
        top = probs.topk(depth, dim=-1).indices
        held = selected[:, None].expand_as(probs).gather(-1, top) & within
        return (held.sum(-1) / sizes).transpose(1, 2)

    at_once = max(1, MOST_PROBABILITIES // (group * selected.numel()))  # key-value heads
    of_heads, sums = [], []
    for queries, keys in zip(q.split(at_once * group, 2), k.split(at_once, 2), strict=True):
        probs = attention_probs(queries, keys, causal)
        of_heads.append(overlap(probs))
        sums.append(probs.sum(1))
    head_sum = reduce(torch.add, sums)
    dist.all_reduce(head_sum, group=tp_group)
    recall = torch.where(selected, head_sum, 0).sum(-1, keepdim=True) / (q.shape[2] * tp_group.size())
    return TopKeyOverlap(torch.cat(of_heads, dim=2), overlap(head_sum[:, None]), recall)


@torch.no_grad()
def budget_statistics(budget: torch.Tensor, variance: torch.Tensor, queries: MeasuredQueries) -> Statistics:
    """Measure the budgets of the queries.

    Args:
        budget: k_t, int [B, L]
        variance: of each query's scores, fp32 [B, L]
    """
    chooses = budget < queries.visible
    members, in_groups = queries.by_position
    # Integer sums do not depend on the order. A scatter would serialize the additions.
    of_groups = torch.where(members, budget.flatten(), 0).sum(1)
    statistics = Statistics(
        # Queries with one causal key contribute 0, or NaN. A NaN must show in the mean.
        means={"variance": variance},
        counts={"variance": queries.number_with_choice},
        vectors={"k_by_position": Vector(of_groups, in_groups)},
    )
    statistics.average("k_mean", budget, chooses)
    statistics.average("dense_query_share", ~chooses, queries.with_choice)
    statistics.maximum("k_max", budget, chooses)
    statistics.maximum("k_min", -budget, chooses)
    return statistics


@torch.no_grad()
def selection_statistics(
    queries: MeasuredQueries,
    sizes: torch.Tensor,
    overlaps: torch.Tensor,
    union_ratios: torch.Tensor | None,
) -> Statistics:
    """Measure the selections of the sampled queries.

    Averages of overlap, union ratio and random recall leave out queries that select all their causal keys. Overlap and
    union ratio compare only queries within the same document, because queries of two documents share no key.

    Args:
        sizes: |S_t|, int [B, S]
        overlaps: of neighbouring pairs, fp32 [B, P]
        union_ratios: `union_ratio` of groups of neighbours, fp32 [B, G]; None without groups
    """
    sample = queries.sample
    chooses = (sizes < queries.sampled_visible)[:, sample.compared]
    pairs, members, sparse = len(sample.neighbours), len(sample.grouped), len(sample.sparse)
    earlier, later, of_groups, of_sparse = chooses.split([pairs, pairs, members, sparse], dim=1)
    statistics = Statistics(means={"selected_keys": sizes})
    statistics.average("adjacent_overlap", overlaps, earlier & later & queries.pairs_in_one_document)
    if union_ratios is not None:
        whole = of_groups.unflatten(1, (-1, sample.group)).all(-1) & queries.groups_in_one_document
        statistics.average("union_ratio_32", union_ratios, whole)
    if sparse > 0:
        # For |S_t| uniformly random causal keys, the expected share of the probability equals their share of the keys.
        share = sizes[:, sample.sparse_rows] / queries.sparse.visible
        statistics.average("random_recall", share, of_sparse)
    return statistics


@torch.no_grad()
def log_sums(
    q: torch.Tensor, k: torch.Tensor, masks: torch.Tensor, implementation: Implementation
) -> torch.Tensor:
    """Compute the log-sum-exp of each query over several sets of keys, in one launch: fp32 [B, n_h, sets, T].

    Args:
        q: [B, T, n_h, d_k]
        k: [B, L_k, n_kv, d_k]
        masks: packed masks [B, sets, T, ceil(L_k / 32)]
    """
    sets = masks.shape[1]
    repeated = q[:, None].expand(-1, sets, -1, -1, -1).flatten(1, 2)
    lse = api.sampled_lse(repeated, k, masks.flatten(1, 2), implementation=implementation)
    return lse.unflatten(2, (sets, -1))


@torch.no_grad()
def sink_statistics(by_position: torch.Tensor, queries: SparseQueries, first_head: int) -> Statistics:
    """Measure the attention probability by the key's position in the query's document.

    Args:
        by_position: log-sum-exps (`log_sums`) over the attended keys in each position range of
            `SparseQueries.position_masks`, [B, n_h, groups, T]
        first_head: index of the first of these heads in the whole model
    """
    masses = by_position.softmax(2).permute(0, 3, 1, 2)  # [B, T, n_h, groups]
    first, heads = masses[..., 0], by_position.shape[1]
    sums = torch.where(queries.counts_in_sink[..., None, None], masses, 0).sum((0, 1))
    of_heads, number = sums[:, 0], queries.number_in_sink * heads
    of_positions = torch.nn.functional.pad(sums.sum(0), (0, len(POSITIONS) - sums.shape[1]))
    statistics = Statistics(
        means={"first_token_attention": of_heads},
        counts={"first_token_attention": number},
        vectors={
            "head_first_token_attention": Vector(of_heads, queries.number_in_sink.expand(heads), first_head),
            "sink_by_position": Vector(of_positions, number.expand(len(POSITIONS))),
        },
    )
    # The average is over all queries, because a query of a later document gives the sequence's first token 0.
    statistics.average("sequence_start_attention", first, queries.in_first_document[..., None])
    statistics.counts["sequence_start_attention"] = first.numel()
    return statistics
