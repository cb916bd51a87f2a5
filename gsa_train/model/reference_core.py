"""The attention core in plain torch: exact, differentiable, with L_q x L_k tensors; what the fused core must equal.

Equations 7, 8, 11, 12, 14 and 15 of the paper, and section 9 of the specification. A selection is a bool mask
[B, L_q, L_k].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gsa_kernels import (
    adaptive_budget,
    adjacent_overlap,
    expand_block_selection,
    indexer_kl,
    local_window_mask,
    renormalise_target,
    score_moments,
    select_top_k,
    sigmoid_gate,
    sparse_attention,
    sum_over_blocks,
    union_ratio,
    visible_mask,
)
from gsa_kernels.sampling import sample_rows
from gsa_train.model.attention_core import indexer_graph
from gsa_train.model.indexer import IndexerProjections
from gsa_train.model.query_sample import QuerySample
from gsa_train.profiling.spans import span

if TYPE_CHECKING:
    from gsa_train.model.gsa_attention import GSASelfAttention


class ReferenceCore:
    """Selection, attention and indexer loss of one layer; see `AttentionCore`."""

    def __init__(self, attention: GSASelfAttention) -> None:
        self.attention = attention
        self.gsa, self.runtime, self.layer = attention.gsa, attention.runtime, attention.layer

    def select(
        self,
        projections: IndexerProjections,
        document_ids: torch.Tensor | None,
        query_start: int,
        sample: QuerySample | None,
    ) -> torch.Tensor | None:
        runtime, gsa = self.runtime, self.gsa
        indexer, tracker = self.attention.indexer, self.attention.variance
        assert indexer is not None
        assert tracker is not None
        counted = runtime.counts_this_pass()
        with torch.no_grad():
            num_keys, device = projections.keys.shape[1], projections.keys.device
            rows = torch.arange(query_start, num_keys, gsa.selection_block, device=device)
            visible = visible_mask(num_keys, query_positions=rows, document_ids=document_ids, device=device)
            scores = indexer.scores(projections, query_stride=gsa.selection_block)
            _, variance = score_moments(scores, visible)
            if counted and not runtime.evaluating:
                tracker.record(variance)
            if not (runtime.sparse or runtime.measuring):
                return None
            budget = adaptive_budget(
                variance,
                tracker.ema,
                visible.sum(-1),
                k_base=gsa.k_base,
                k_min=gsa.k_min,
                k_max=gsa.k_max,
                mode=gsa.adaptive_k,
            )
            positions = torch.arange(query_start, num_keys, device=device)
            selected = self._complete(select_top_k(scores, visible, budget), document_ids, positions)
            if sample is not None:
                self._measure(selected, budget, variance, tracker.ema, document_ids, positions, sample)
            return selected

    def _complete(
        self, chosen: torch.Tensor, document_ids: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Top-k of the selecting queries [B, R, L_k] -> S_t of the queries at `positions` (section 9)."""
        block, window, num_keys = self.gsa.selection_block, self.gsa.local_window, chosen.shape[-1]
        if block > 1:
            chosen = expand_block_selection(chosen, block, len(positions))
        if window > 0:
            chosen = chosen | local_window_mask(num_keys, window, query_positions=positions)
        if block > 1 or window > 0:
            chosen = chosen & visible_mask(num_keys, query_positions=positions, document_ids=document_ids)
        return chosen

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output_gate: torch.Tensor | None,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        weight_logits: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        selected: torch.Tensor | None,
        query_start: int,
        sample: QuerySample | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        runtime, stats, layer = self.runtime, self.runtime.stats, self.layer
        counted, measured = runtime.counts_this_pass(), sample is not None
        positions = torch.arange(query_start, k.shape[1], device=q.device)
        visible = visible_mask(k.shape[1], query_positions=positions, document_ids=document_ids)
        mask = selected if runtime.sparse else visible
        assert mask is not None
        distils = queries is not None and counted and (runtime.train_indexer or measured)
        dense_recall = measured and not runtime.sparse and selected is not None
        attention = sparse_attention(
            q,
            k,
            v,
            mask,
            visible=visible,
            return_probs=distils or dense_recall,
            return_recall=measured and runtime.sparse,
            return_sink=measured,
        )
        out, probs = attention.out, attention.head_sum_probs
        if probs is not None:
            dist.all_reduce(probs, group=self.attention.groups.tp)  # the target averages all ranks' heads
        if sample is not None:
            recall = attention.recall
            if dense_recall:
                assert probs is not None
                assert selected is not None
                recall = torch.where(selected, probs, 0).sum(-1) / self.attention.config.num_attention_heads
            if recall is not None:
                stats.add("recall", layer, recall[:, sample.sparse])
            assert attention.sink is not None
            stats.add("first_token_attention", layer, attention.sink[:, sample.sparse])
        kl = None
        if distils:
            assert probs is not None
            assert queries is not None
            assert keys is not None
            assert weight_logits is not None
            with indexer_graph(runtime), span("kl"):
                rows = self._indexer_loss(IndexerProjections(queries, keys, weight_logits), probs, mask)
                kl, logged = self._sum_or_estimate(rows)
            if measured:
                stats.add("indexer_kl", layer, logged)
        out = out if output_gate is None else sigmoid_gate(out, output_gate.flatten(2, 3))  # eq. 10
        return out, kl if runtime.train_indexer else None

    def _indexer_loss(
        self, projections: IndexerProjections, probs: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """KL(p_t || softmax over the support of beta * I[t, :]) of each scored query, [B, R] (eqs. 14, 15).

        The support is what the query attended to: all visible keys in a dense phase, S_t in a sparse one.
        """
        indexer, block = self.attention.indexer, self.gsa.selection_block
        assert indexer is not None
        support = mask[:, ::block]
        target = renormalise_target(sum_over_blocks(probs, block), support)
        scores = indexer.scores(projections, query_stride=block)
        return indexer_kl(scores, target, support, indexer.inverse_temperature())

    def _sum_or_estimate(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KL of the rows [B, R] -> their sum, and what to log: the rows, or the mean of a sample of them."""
        fraction, seed = self.runtime.draw_rows(self.layer)
        if fraction == 1:
            return rows.sum(), rows
        sample, factor = sample_rows(rows.shape[1], fraction, seed)
        kl = rows[:, sample.rows(rows.device)].sum() * factor
        return kl, kl.detach() / rows.numel()

    def _measure(
        self,
        selected: torch.Tensor,
        budget: torch.Tensor,
        variance: torch.Tensor,
        variance_ema: torch.Tensor,
        document_ids: torch.Tensor | None,
        positions: torch.Tensor,
        sample: QuerySample,
    ) -> None:
        stats, layer = self.runtime.stats, self.layer
        stats.add("k_mean", layer, budget)
        stats.maximum("k_max", layer, budget.max())
        stats.maximum("k_min", layer, -budget.min())
        stats.add("variance", layer, variance)
        stats.add("variance_ema", layer, variance_ema)
        if len(sample) == 0:
            return
        selected = selected[:, sample.rows]
        stats.add("adjacent_overlap", layer, adjacent_overlap(selected)[:, sample.neighbours])
        if len(sample.grouped) > 0:
            stats.add("union_ratio_32", layer, union_ratio(selected[:, sample.grouped], sample.group))
        stats.add("selected_keys", layer, selected.sum(-1))
        # The exact expectation for as many keys drawn at random: each visible key is as likely as any other,
        # so the expected share of the probability is the share of the keys.
        visible = visible_mask(
            selected.shape[-1], query_positions=positions[sample.sparse], document_ids=document_ids
        )
        share = selected[:, sample.sparse_rows].sum(-1) / visible.sum(-1)
        stats.add("random_recall", layer, share)
