"""The attention core on fused kernels: the same values as `ReferenceCore`, nothing L x L in floating point.

A selection is int32 words [B, L, ceil(L / 32)]: bit s % 32 of word s // 32 in row t says that t attends to s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.selection.op import Selection, select_keys
from gsa_kernels.statistics.words import (
    adjacent_overlap_of_words,
    selected_per_row,
    union_ratio_of_words,
)
from gsa_train.model.attention_core import indexer_graph, train_indexer
from gsa_train.model.indexer import IndexerProjections

if TYPE_CHECKING:
    from gsa_train.model.gsa_attention import GSASelfAttention


def document_starts(document_ids: torch.Tensor | None) -> torch.Tensor | None:
    """First position of each token's document, int32 [B, L]; the ids never decrease along a row."""
    if document_ids is None:
        return None
    return torch.searchsorted(document_ids, document_ids, out_int32=True)


class TritonCore:
    """Selection, attention and indexer loss of one layer; see `AttentionCore`."""

    def __init__(self, attention: GSASelfAttention) -> None:
        self.attention = attention
        self.gsa, self.runtime, self.layer = attention.gsa, attention.runtime, attention.layer

    def select(
        self, projections: IndexerProjections, document_ids: torch.Tensor | None
    ) -> torch.Tensor | None:
        runtime, gsa = self.runtime, self.gsa
        indexer, tracker = self.attention.indexer, self.attention.variance
        assert indexer is not None
        assert tracker is not None
        counted = runtime.counts_this_pass()
        with torch.no_grad():
            starts = document_starts(document_ids)
            selection = select_keys(
                projections.queries,
                projections.keys,
                projections.weight_logits,
                tracker.ema,
                score_bias=indexer.score_bias,
                weight_bias=indexer.weight_bias,
                activation=gsa.indexer_activation,
                k_base=gsa.k_base,
                k_min=gsa.k_min,
                k_max=gsa.k_max,
                mode=gsa.adaptive_k,
                document_starts=starts,
                local_window=gsa.local_window,
            )
            if counted and not runtime.evaluating:
                tracker.record(selection.variance)
            if counted and runtime.measuring:
                self._measure(selection, tracker.ema, starts)
        return selection.words

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output_gate: torch.Tensor | None,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        weight_logits: torch.Tensor | None,
        selected: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        runtime = self.runtime
        counted = runtime.counts_this_pass()
        measured = counted and runtime.measuring
        starts = document_starts(document_ids)
        words = selected if runtime.sparse else None
        out, lse = masked_attention(q, k, v, words, document_starts=starts, output_gate_logits=output_gate)
        if measured:
            self._measure_attention(q, k, v, lse, words, selected, starts)
        distils = queries is not None and counted and (runtime.train_indexer or measured)
        if distils:
            assert queries is not None
            assert keys is not None
            assert weight_logits is not None
            with indexer_graph(runtime):
                kl, rows = self._indexer_loss(
                    IndexerProjections(queries, keys, weight_logits), q, k, lse, words, starts
                )
                if runtime.train_indexer:
                    out = train_indexer(runtime, out, kl)
            if measured:
                runtime.stats.add("indexer_kl", self.layer, rows)
        return out

    def _indexer_loss(
        self,
        projections: IndexerProjections,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        words: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the rows of KL(p_t || softmax over the support of beta * I[t, :]), and the rows [B, L]."""
        indexer, group = self.attention.indexer, self.attention.groups.tp
        assert indexer is not None

        def target_rows(row_start: int, rows: int) -> torch.Tensor:
            probs = head_sum_probs_rows(
                q.detach(), k.detach(), lse, words, row_start, rows, document_starts=starts
            )
            if group.size() > 1:
                dist.all_reduce(probs, group=group)  # the target averages all ranks' heads
            return probs

        result = indexer_kl_loss(
            projections.queries,
            projections.keys,
            projections.weight_logits,
            target_rows,
            score_bias=indexer.score_bias,
            weight_bias=indexer.weight_bias,
            activation=self.gsa.indexer_activation,
            inverse_temperature=indexer.inverse_temperature(),
            words=words,
            document_starts=starts,
            return_rows=True,
        )
        assert isinstance(result, tuple)
        return result

    @torch.no_grad()
    def _measure_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        words: torch.Tensor | None,
        selected: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> None:
        """Recall from the masses of selected and of visible keys; first-token attention from one dot product."""
        stats, layer = self.runtime.stats, self.layer
        if selected is not None:
            other = None if words is not None else selected
            _, other_lse = masked_attention(q, k, v, other, document_starts=starts)
            mass = lse - other_lse if words is not None else other_lse - lse
            stats.add("recall", layer, mass.exp())
        first_key = k[:, :1].repeat_interleave(self.attention.heads_per_group, dim=2)
        logits = (q.float() * first_key.float()).sum(-1) * q.shape[-1] ** -0.5  # [B, L, n_h]
        sees_first = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
        if words is not None:
            sees_first = words[..., 0] & 1 == 1
        elif starts is not None:
            sees_first = starts == 0
        probability = (logits - lse.transpose(1, 2)).exp()
        stats.add("first_token_attention", layer, torch.where(sees_first[..., None], probability, 0))

    def _measure(self, selection: Selection, variance_ema: torch.Tensor, starts: torch.Tensor | None) -> None:
        stats, layer, words = self.runtime.stats, self.layer, selection.words
        stats.add("k_mean", layer, selection.budget)
        stats.maximum("k_max", layer, selection.budget.max())
        stats.maximum("k_min", layer, -selection.budget.min())
        stats.add("variance", layer, selection.variance)
        stats.add("variance_ema", layer, variance_ema)
        stats.add("adjacent_overlap", layer, adjacent_overlap_of_words(words))
        stats.add("union_ratio_32", layer, union_ratio_of_words(words, 32))
        positions = torch.arange(words.shape[1], device=words.device)
        visible = positions + 1 if starts is None else positions - starts + 1
        selected = selected_per_row(words)
        stats.add("random_recall", layer, selected / visible)
        stats.add("selected_keys", layer, selected)
