"""The attention core in plain torch: exact, differentiable, with L x L_k tensors; what the fused core must equal.

Equations 7, 8, 11, 12, 14 and 15 of the paper, and what goes beyond it (docs/concepts.md). A selection is a bool mask
[B, L, L_k].
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gsa_kernels.indexer.pool import (
    earlier_groups,
    firsts_of,
    keys_of_groups,
    sum_over_groups,
    whole_groups,
)
from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.reference import (
    adaptive_budget,
    adjacent_overlap,
    causal_mask,
    expand_block_selection,
    indexer_kl,
    indexer_scores,
    local_window_mask,
    renormalise_target,
    score_moments,
    select_top_k,
    sigmoid_gate,
    sparse_attention,
    sum_over_blocks,
    union_ratio,
)
from gsa_kernels.sampling import sample_rows
from gsa_kernels.types import Geometry, Indexer, RowSample
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.attention_statistics import (
    budget_statistics,
    log_sums,
    selection_statistics,
    sink_statistics,
)
from gsa_train.model.cores.interface import (
    AttentionInputs,
    AttentionResult,
    CoreSettings,
    IndexerLossInputs,
    SelectionResult,
)
from gsa_train.model.group_lesson import TargetSum
from gsa_train.model.measured_queries import MeasuredQueries
from gsa_train.model.stats import Statistics
from gsa_train.profiling.trace_spans import trace_span


class ReferenceCore:
    """Selection, attention and indexer loss of one layer; see `AttentionCore`."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings

    @torch.no_grad()
    def select(
        self,
        indexer: Indexer,
        variance_ema: torch.Tensor,
        geometry: Geometry,
        attention_pass: AttentionPass,
        measured: MeasuredQueries | None,
    ) -> SelectionResult:
        rule = self.settings.rule
        causal = _causal_keys(geometry, indexer.keys.shape[1], indexer.keys.device)
        rows, scores = causal[:, :: geometry.selection_block], _scores(indexer)
        firsts = firsts_of(geometry, indexer.keys)
        candidates = rows if firsts is None else earlier_groups(firsts, rows)
        _, variance = score_moments(scores, candidates)
        if not (attention_pass.sparse or attention_pass.measuring):
            return SelectionResult(None, variance)
        budget = adaptive_budget(
            variance,
            variance_ema,
            rows.sum(-1),
            k_base=rule.k_base,
            k_min=rule.k_min,
            k_max=rule.k_max,
            adaptive_k=rule.adaptive_k,
            dense_below=rule.dense_below,
        )
        if firsts is None:
            chosen = select_top_k(scores, rows, budget)
        else:
            groups = select_top_k(scores, candidates, budget // geometry.indexer_pool)
            chosen = keys_of_groups(groups, firsts, causal)
        selected = _complete(chosen, causal, geometry)
        statistics = Statistics()
        if measured is not None:
            statistics = budget_statistics(budget, variance, measured)
            statistics.means["variance_ema"] = variance_ema.clone()  # it moves behind the step
            statistics.join(_selection_statistics(selected, measured))
        return SelectionResult(selected, variance, statistics)

    def attend(
        self,
        inputs: AttentionInputs,
        selection: torch.Tensor | None,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
        measured: MeasuredQueries | None,
        target_sum: TargetSum | None = None,
    ) -> AttentionResult:
        q, k, v = inputs.q, inputs.k, inputs.v
        causal = _causal_keys(geometry, k.shape[1], q.device)
        attended = selection if attention_pass.sparse else causal
        assert attended is not None
        dense_recall = measured is not None and not attention_pass.sparse and selection is not None
        attention = sparse_attention(
            q,
            k,
            v,
            attended,
            recall_among=causal if measured is not None and attention_pass.sparse else None,
            return_probs=loss is not None or dense_recall or target_sum is not None,
        )
        out, probs, statistics = attention.out, attention.head_sum_probs, Statistics()
        if probs is not None:
            dist.all_reduce(probs, group=self.settings.tp_group)  # the target averages all ranks' heads
        if measured is not None:
            recall, rows = attention.recall, measured.sample.sparse
            if dense_recall:
                assert probs is not None
                assert selection is not None
                recall = torch.where(selection, probs, 0).sum(-1) / (
                    q.shape[2] * self.settings.tp_group.size()
                )
            if len(rows) > 0:
                statistics = self._sink_statistics(q, k, attended, measured)
            if recall is not None:
                assert selection is not None
                chooses = (selection[:, rows] != measured.sparse.causal).any(-1)
                recall = recall[:, rows]
                statistics.average("recall", recall, chooses if recall.ndim == 2 else chooses[..., None])
        kl = None
        target = probs
        if target_sum is not None:
            assert probs is not None
            target = target_sum.add(probs)
        if loss is not None:
            assert target is not None
            with attention_pass.indexer_graph(), trace_span("kl"):
                rows = self._kl_of_rows(loss.indexer, target, attended, causal, geometry)
                kl, logged = _sum_or_estimate(rows, loss.rows, geometry.selection_block)
            if loss.counted_rows is not None:
                # Of a query that sees one key it is 0.
                statistics.means["indexer_kl"], statistics.counts["indexer_kl"] = logged, loss.counted_rows
        if inputs.output_gate is not None:
            out = sigmoid_gate(out, inputs.output_gate.flatten(2, 3))  # eq. 10
        return AttentionResult(out, kl if attention_pass.trains_indexer else None, statistics)

    def _kl_of_rows(
        self,
        indexer: Indexer,
        probs: torch.Tensor,
        attended: torch.Tensor,
        causal: torch.Tensor,
        geometry: Geometry,
    ) -> torch.Tensor:
        """KL(p_t || softmax over the attended set of beta * I[t, :]) of each scored query, [B, R] (eqs. 14, 15).

        With groups of keys p is summed over each, and the set is that of the groups which the query attends to whole.
        """
        block, firsts = geometry.selection_block, firsts_of(geometry, indexer.keys)
        if firsts is None:
            rows, target = attended[:, ::block], sum_over_blocks(probs, block)
        else:
            candidates = earlier_groups(firsts, causal)
            rows = whole_groups(attended, candidates, firsts, geometry.indexer_pool)
            target = sum_over_groups(probs, firsts, geometry.indexer_pool)
        target = renormalise_target(target, rows)
        return indexer_kl(_scores(indexer), target, rows, indexer.inverse_temperature)

    def _sink_statistics(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        attended: torch.Tensor,
        measured: MeasuredQueries,
    ) -> Statistics:
        rows, sparse = measured.sample.sparse, measured.sparse
        masks = sparse.position_masks & pack_mask(attended[:, rows])[:, None]
        by_position = log_sums(q[:, rows], k, masks, "reference")
        return sink_statistics(by_position, sparse, self.settings.tp_group.rank() * q.shape[2])


def _complete(chosen: torch.Tensor, causal: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Top-k of the selecting queries [B, R, L_k] -> S_t of all L queries, with block sharing and local window."""
    block, window = geometry.selection_block, geometry.local_window
    length, num_keys = causal.shape[1:]
    if block > 1:
        chosen = expand_block_selection(chosen, block, length)
    if window > 0:
        positions = torch.arange(geometry.query_start, num_keys, device=chosen.device)
        chosen = chosen | local_window_mask(num_keys, window, query_positions=positions)
    if block > 1 or window > 0:
        chosen = chosen & causal
    return chosen


def _scores(indexer: Indexer) -> torch.Tensor:
    """I[t, s] of the selecting queries against all keys: fp32 [B, R, L_k]."""
    return indexer_scores(
        indexer.queries,
        indexer.keys,
        indexer.head_weight_logits,
        score_bias=indexer.score_bias,
        weight_bias=indexer.head_weight_bias,
        activation=indexer.activation,
    )


def _causal_keys(geometry: Geometry, num_keys: int, device: torch.device) -> torch.Tensor:
    """The keys of its document that each query sees: bool [B or 1, L, L_k]."""
    positions = torch.arange(geometry.query_start, num_keys, device=device)
    causal = causal_mask(num_keys, query_positions=positions)
    if geometry.document_starts is None:
        return causal
    return causal & (torch.arange(num_keys, device=device) >= geometry.document_starts[..., None])


def _sum_or_estimate(
    rows: torch.Tensor, taken: RowSample, queries_per_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL of the rows [B, R] -> their sum, and what to log: the rows, or the estimate of their sum by a sample."""
    if taken.fraction == 1:
        return rows.sum(), rows
    sample, factor = sample_rows(rows.shape[1], taken.fraction, taken.seed, queries_per_row=queries_per_row)
    kl = rows[:, sample.rows(rows.device)].sum() * factor
    return kl, kl.detach()


def _selection_statistics(selected: torch.Tensor, measured: MeasuredQueries) -> Statistics:
    """Of the sampled queries."""
    sample = measured.sample
    if len(sample) == 0:
        return Statistics()
    selected = selected[:, sample.rows]
    overlaps = adjacent_overlap(selected)[:, sample.neighbours]
    ratios = union_ratio(selected[:, sample.grouped], sample.group) if len(sample.grouped) > 0 else None
    return selection_statistics(measured, selected.sum(-1), overlaps, ratios)
