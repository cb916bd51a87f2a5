"""The attention core on fused kernels: the same values as `ReferenceCore`, nothing L x L in floating point."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gsa_data.pack import document_starts
from gsa_kernels.distillation.op import can_distil
from gsa_kernels.gates.op import fused_sigmoid_gate
from gsa_kernels.statistics.words import statistics_of_words
from gsa_kernels.sums.op import add_total
from gsa_kernels.visibility.words import visible_words
from gsa_train.model.attention_core import indexer_graph
from gsa_train.model.dense_attention import build_dense_attention
from gsa_train.model.indexer import IndexerProjections
from gsa_train.model.query_sample import QuerySample
from gsa_train.model.selecting import GATHERED_BELOW_DENSITY, LayerSelection, select_for_layer
from gsa_train.model.supports import (
    AllVisible,
    LossInputs,
    Selected,
    SelectedBits,
    SelectedLists,
    Support,
    sampled_lse,
)
from gsa_train.profiling.spans import span

if TYPE_CHECKING:
    from gsa_train.model.gsa_attention import GSASelfAttention

logger = logging.getLogger(__name__)


def gather_heads(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The heads of all tensor-parallel ranks in the order of the ranks, without gradient. Collective."""
    local = local.detach()
    if group.size() == 1:
        return local
    local = local.contiguous()
    every = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(every, local, group=group)
    return torch.cat(every.chunk(group.size()), dim=dim)


class TritonCore:
    """Selection, attention and indexer loss of one layer; see `AttentionCore`."""

    def __init__(self, attention: GSASelfAttention, dense_attention: str = "triton") -> None:
        self.attention = attention
        self.dense = build_dense_attention(dense_attention)
        self.gsa, self.runtime, self.layer = attention.gsa, attention.runtime, attention.layer
        self._kernels: dict[int, str] = {}
        self._said_behind = False

    def select(
        self,
        projections: IndexerProjections,
        document_ids: torch.Tensor | None,
        query_start: int,
        sample: QuerySample | None,
    ) -> Selected:
        runtime = self.runtime
        indexer, tracker = self.attention.indexer, self.attention.variance
        assert indexer is not None
        assert tracker is not None
        counted = runtime.counts_this_pass()
        starts = None if document_ids is None else document_starts(document_ids, query_start)
        selection = select_for_layer(
            self._of_rows(projections),
            indexer,
            tracker.ema,
            self.gsa,
            starts,
            query_start,
            with_log_sum=runtime.sparse and runtime.train_indexer,
        )
        self._say_kernel(selection, query_start)
        if counted and not runtime.evaluating:
            add_total(selection.variance, tracker.step_sum)  # `tracker.record` in one launch
        if sample is not None:
            self._measure(selection, tracker.ema, starts, query_start, sample)
        return selection.selected

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
        selected: Selected | None,
        query_start: int,
        sample: QuerySample | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        runtime = self.runtime
        counted, measured = runtime.counts_this_pass(), sample is not None
        starts = None if document_ids is None else document_starts(document_ids, query_start)
        support: Support = AllVisible(self.gsa.selection_block)
        if runtime.sparse:
            assert selected is not None
            support = selected
        distils = queries is not None and counted and (runtime.train_indexer or measured)
        lse: torch.Tensor | None = None
        behind = distils and self._distils_behind(support, q, k)
        if behind:
            assert isinstance(support, SelectedBits)
            assert queries is not None
            assert keys is not None
            assert weight_logits is not None
            out, lse = support.distilling_attention(
                q,
                k,
                v,
                starts,
                output_gate,
                IndexerProjections(queries, keys, weight_logits),
                loss_scale=runtime.kl_grad_scale,
                on_rows=partial(runtime.stats.add, "indexer_kl", self.layer) if measured else None,
                **self._loss_options(),
            )
        elif runtime.sparse or self.dense is None or (distils and runtime.train_indexer):
            out, lse = support.attention(q, k, v, starts, output_gate)
        else:
            out = self.dense(q, k, v)
            if output_gate is not None:
                out = fused_sigmoid_gate(out, output_gate.flatten(2, 3))
        if sample is not None and len(sample.sparse) > 0:
            self._measure_attention(q, k, v, lse, selected, starts, sample)
        kl = None
        if distils and not behind:
            assert lse is not None
            assert queries is not None
            assert keys is not None
            assert weight_logits is not None
            with indexer_graph(runtime), span("kl"):
                projections = self._of_rows(IndexerProjections(queries, keys, weight_logits))
                kl, rows = self._indexer_loss(support, projections, q, k, lse, starts)
            if measured:
                runtime.stats.add("indexer_kl", self.layer, rows)
        return out, kl if runtime.train_indexer else None

    def _distils_behind(self, support: Support, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether attention's backward pass gives the indexer's gradients, too: it has the loss's target at hand where
        this rank has all heads, and all rows count."""
        runtime = self.runtime
        behind = (
            isinstance(support, SelectedBits)
            and runtime.train_indexer
            and torch.is_grad_enabled()
            and runtime.row_fraction == 1
            and self.attention.groups.tp.size() == 1
            and can_distil(q, k)
        )
        if behind and not self._said_behind:
            self._said_behind = True
            logger.info("layer %d: the indexer loss in attention's backward pass", self.layer)
        return behind

    def _loss_options(self) -> dict[str, Any]:
        """What the kernels of the indexer loss take of the indexer besides its projections."""
        indexer = self.attention.indexer
        assert indexer is not None
        return {
            "score_bias": indexer.score_bias,
            "weight_bias": indexer.weight_bias,
            "activation": self.gsa.indexer_activation,
            "inverse_temperature": indexer.inverse_temperature(),
        }

    def _of_rows(self, projections: IndexerProjections) -> IndexerProjections:
        """Queries that select, [B, ceil(L_q / selection_block), ...], and all keys."""
        block = self.gsa.selection_block
        if block == 1:
            return projections
        return IndexerProjections(
            projections.queries[:, ::block], projections.keys, projections.weight_logits[:, ::block]
        )

    def _indexer_loss(
        self,
        support: Support,
        projections: IndexerProjections,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        starts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the rows of KL(p_t || softmax over the support of beta * I[t, :]), and the rows [B, R]; of a
        sample of rows an estimate of the sum, and its mean over all rows, 0-d.

        The target has the heads of all tensor-parallel ranks. These exchange queries, keys and log-sum-exps, which grow
        with L, instead of probabilities, which grow with L^2, and each takes its share of the rows. The sum is this
        rank's, times their number: the indexer's gradients are averaged over these ranks (indexer.py).
        """
        tp = self.attention.groups.tp
        fraction, seed = self.runtime.draw_rows(self.layer)
        options = {
            **self._loss_options(),
            "row_fraction": fraction,
            "seed": seed,
            "share": (tp.rank(), tp.size()),
        }
        q, k, lse = (gather_heads(x, dim, tp) for x, dim in ((q, 2), (k, 2), (lse, 1)))
        kl, rows = support.indexer_loss(LossInputs(projections, q, k, lse, starts, options))
        if fraction == 1 and tp.size() == 1:
            return kl, rows
        total = kl.detach().clone()
        if tp.size() > 1 and self.runtime.measuring:
            dist.all_reduce(total, group=tp)
        return kl * tp.size(), total / rows.numel()

    @torch.no_grad()
    def _measure_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor | None,
        selected: Selected | None,
        starts: torch.Tensor | None,
        sample: QuerySample,
    ) -> None:
        """Of the sparse queries of the sample: recall from the masses of selected and of visible keys, first-token
        attention from one dot product.

        Args:
            lse: of all queries over what they attended to; None where another kernel attended to all visible keys.
            selected: if there is a selection; what was attended to in a sparse phase.
        """
        stats, layer, sparse = self.runtime.stats, self.layer, self.runtime.sparse
        rows = sample.sparse
        q = q.index_select(1, rows)
        if starts is None:
            visible = sample.visible_words.expand(len(q), -1, -1)
        else:
            starts = starts.index_select(1, rows)
            visible = visible_words(sample.start + rows, k.shape[1], starts)
        chosen = None if selected is None else selected.words_of(rows)
        attended, other = (chosen, visible) if sparse else (visible, chosen)
        assert attended is not None
        # By our kernel: what is logged must not change what the pass calculates.
        mass = sampled_lse(q, k, v, attended, starts) if lse is None else lse.index_select(2, rows)
        if other is not None:
            other_mass = sampled_lse(q, k, v, other, starts)
            stats.add("recall", layer, (mass - other_mass if sparse else other_mass - mass).exp())
        first_key = k[:, :1].repeat_interleave(self.attention.heads_per_group, dim=2)
        logits = (q.float() * first_key.float()).sum(-1) * q.shape[-1] ** -0.5  # [B, S, n_h]
        sees_first = attended[..., :1] & 1 == 1
        probability = (logits - mass.transpose(1, 2)).exp()
        stats.add("first_token_attention", layer, torch.where(sees_first, probability, 0))

    @torch.no_grad()
    def _measure(
        self,
        selection: LayerSelection,
        variance_ema: torch.Tensor,
        starts: torch.Tensor | None,
        query_start: int,
        sample: QuerySample,
    ) -> None:
        stats, layer = self.runtime.stats, self.layer
        stats.add("k_mean", layer, selection.budget)
        stats.maximum("k_max", layer, selection.budget.max())
        stats.maximum("k_min", layer, -selection.budget.min())
        stats.add("variance", layer, selection.variance)
        stats.add("variance_ema", layer, variance_ema)
        if selection.density is not None:
            stats.add("union_density", layer, torch.full((1,), selection.density, device=stats.device))
        if len(sample) == 0:
            return
        words = selection.selected.words_of(sample.rows)
        found = statistics_of_words(words, sample.neighbours, sample.grouped, sample.group)
        stats.add("adjacent_overlap", layer, found.overlaps)
        stats.add("union_ratio_32", layer, found.union_ratios)
        stats.add("selected_keys", layer, found.sizes)
        if len(sample.sparse) == 0:
            return
        visible = query_start + 1 + sample.sparse
        if starts is not None:
            visible = visible - starts.index_select(1, sample.sparse)
        stats.add("random_recall", layer, found.sizes.index_select(1, sample.sparse_rows) / visible)

    def _say_kernel(self, selection: LayerSelection, query_start: int) -> None:
        """Log which attention kernel the selection of these queries goes to, when that changes."""
        kernel = "gathered" if isinstance(selection.selected, SelectedLists) else "masked"
        if kernel == self._kernels.get(query_start):
            return
        self._kernels[query_start] = kernel
        reason = f"gsa.attention_kernel = {self.gsa.attention_kernel}"
        if selection.density is not None:
            reason += f", union density {selection.density:.2f}, break-even {GATHERED_BELOW_DENSITY:.2f}"
        queries = f", queries from {query_start}" if query_start > 0 else ""
        logger.info("layer %d%s: %s attention (%s)", self.layer, queries, kernel, reason)
