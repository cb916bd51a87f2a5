"""Compute one layer's selection, attention and indexer loss with `gsa_kernels.api` (fused kernels, or plain torch).

A rank's queries form one chunk, or several chunks under context parallelism. Each chunk comes with the sequence's L_k
keys up to the chunk's last query. Tensors are batch-first and hold this tensor-parallel rank's heads:
q [B, L, n_h, d_k], k and v [B, L_k, n_kv, d_k].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from gsa_data.pack import document_starts
from gsa_kernels import api
from gsa_kernels.types import BudgetRule, Geometry, Implementation, RowSample, Selection
from gsa_kernels.types import Indexer as AppliedIndexer
from gsa_train.config import GSAConfig
from gsa_train.distributed.context_sharding import ContextSharding, QueryChunk, query_chunks
from gsa_train.distributed.loss_injection import differentiate_indexer_loss
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.context_parallel import gather_tokens
from gsa_train.model.dense_attention import build_dense_attention
from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.probes.attention_statistics import measure_attention, measure_selection
from gsa_train.model.probes.measured_queries import MeasuredQueries
from gsa_train.model.probes.query_sample import QuerySample
from gsa_train.model.probes.saturation import saturation_statistics
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.profiling.trace_spans import trace_span


class Projected(NamedTuple):
    """Holds a layer's projections. Activation checkpointing allows only tensors here."""

    q: torch.Tensor
    """[B, L, n_h, d_k], rotated, for this rank's tokens."""
    k: torch.Tensor
    v: torch.Tensor
    """[B, L, n_kv, d_k], K rotated and V gated by G2."""
    output_gate: torch.Tensor | None
    """Logits of G1 [B, L, n_kv, n_h / n_kv, d_k]; None without this gate."""
    document_ids: torch.Tensor | None
    """int32, the document of each token in the whole sequence; None for one document per sequence."""
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    head_weight_logits: torch.Tensor | None = None
    """Fields of `IndexerProjections`; None if the indexer does not run."""

    @property
    def indexed(self) -> IndexerProjections | None:
        if self.queries is None:
            return None
        assert self.keys is not None
        assert self.head_weight_logits is not None
        return IndexerProjections(self.queries, self.keys, self.head_weight_logits)


@dataclass(frozen=True)
class ChunkInputs:
    """Holds a chunk's queries, and all keys up to the end of the chunk."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output_gate: torch.Tensor | None
    """Logits of G1; None without this gate."""
    geometry: Geometry


@dataclass(frozen=True)
class LossInputs:
    indexer: AppliedIndexer
    rows: RowSample


class AttentionOverChunks:
    """Computes one layer's selection and attention for all chunks of this rank, and records statistics."""

    def __init__(
        self,
        gsa: GSAConfig,
        implementation: Implementation,
        dense_attention: str,
        captured: bool,
        cut: ContextSharding,
        tp_group: dist.ProcessGroup,
        cp_group: dist.ProcessGroup,
        runtime: AttentionRuntime,
        layer: int,
    ) -> None:
        self.gsa, self.runtime, self.layer = gsa, runtime, layer
        self.implementation = implementation
        self.captured = captured
        self.dense = build_dense_attention(dense_attention) if implementation == "triton" else None
        self.cut, self.tp_group, self.cp_group = cut, tp_group, cp_group
        self.rule = BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k, gsa.dense_below)
        self.largest_log_sums: torch.Tensor | None = None
        """fp32 [n_h]: each head's largest log-sum-exp in this step; None if the optimizer does not read it
        (`train.qk_clip`)."""

    @torch.no_grad()
    def select(
        self,
        indexer: Indexer,
        indexed: IndexerProjections,
        variance: VarianceTracker,
        document_ids: torch.Tensor | None,
        attention_pass: AttentionPass,
        overlap_with: Callable[[], object],
    ) -> list[Selection]:
        """Compute each query's key budget k_t and selected keys S_t, chunk by chunk.

        Do not call this inside activation recomputation: a second selection could differ from the first.

        Args:
            indexed: indexer queries of this rank's tokens, and indexer keys of all tokens.
            variance: holds V̄ (average variance of the scores) for the budgets, and records new variances.
            document_ids: all tokens of the sequence.
            overlap_with: launches device work that does not need the selection, in the caller's grad mode. If the host
                must wait for the length of the last chunk's key lists, this work runs meanwhile.
        """
        with_temperature = attention_pass.sparse and attention_pass.trains_indexer
        chunks, selections = self.chunks(indexed.queries.shape[1]), []
        for chunk in chunks:
            applied = indexer.applied(indexed.of(chunk), with_temperature)
            geometry = self._geometry(document_ids, chunk)
            fused = self.implementation == "triton"
            avoid_lists = self.captured or not attention_pass.sparse  # dense attention reads no selection
            selection = api.select(
                applied,
                self.rule,
                variance.ema,
                geometry,
                implementation=self.implementation,
                kernel=self.gsa.kernel_for(chunk.end, avoid_lists) if fused else "masked",
                with_log_sum=fused and with_temperature,
                overlap_with=overlap_with if chunk is chunks[-1] else lambda: None,
            )
            if attention_pass.moves_averages:
                variance.record(selection.variance)
            measured = self._measured(indexed.queries, chunk, document_ids, geometry, attention_pass)
            if measured is not None:
                statistics = measure_selection(selection, variance.ema, measured, self.implementation)
                self.runtime.stats.record(self.layer, statistics)
            selections.append(selection)
        return selections

    def attend(
        self,
        projected: Projected,
        indexer: Indexer | None,
        selections: list[Selection] | None,
        attention_pass: AttentionPass,
    ) -> torch.Tensor:
        """Compute attention over the selected keys, times the output gate G1: [B, L, n_h, d_k]. The backward pass
        includes the indexer loss.

        Recomputation repeats the all-gathers of this method instead of keeping their results."""
        k, v = (gather_tokens(each, self.cut, self.cp_group) for each in (projected.k, projected.v))
        q, output_gate, indexed = projected.q, projected.output_gate, projected.indexed
        outputs, losses = [], []
        for number, chunk in enumerate(self.chunks(q.shape[1])):
            geometry = self._geometry(projected.document_ids, chunk)
            gate = None if output_gate is None else output_gate[:, chunk.local]
            inputs = ChunkInputs(q[:, chunk.local], k[:, : chunk.end], v[:, : chunk.end], gate, geometry)
            measured = self._measured(q, chunk, projected.document_ids, geometry, attention_pass)
            loss = of_chunk = None
            with attention_pass.indexer_graph():
                if indexer is not None and indexed is not None:
                    of_chunk = indexed.of(chunk)
                    if attention_pass.needs_indexer_loss:
                        rows = self.runtime.draw_rows(attention_pass, self.layer)
                        loss = LossInputs(indexer.applied(of_chunk), rows)
            selection = None if selections is None else selections[number]
            if measured is not None and len(measured.sample.sparse) > 0:
                applied = None
                if indexer is not None and of_chunk is not None:
                    applied = indexer.applied(of_chunk, with_temperature=False)
                statistics = saturation_statistics(inputs.q, inputs.k, applied, measured)
                self.runtime.stats.record(self.layer, statistics)
                statistics = measure_attention(
                    inputs.q,
                    inputs.k,
                    selection,
                    attention_pass.sparse,
                    measured,
                    self.implementation,
                    self.tp_group,
                    self.gsa.most_selected_keys,
                )
                self.runtime.stats.record(self.layer, statistics)
            attended = selection if attention_pass.sparse else None  # None: all causal keys
            assert attended is not None or not attention_pass.sparse
            out, lse = self._attend_chunk(inputs, attended, loss, attention_pass)
            outputs.append(out)
            if loss is None or lse is None:
                continue
            with attention_pass.indexer_graph(), trace_span("kl"):
                kl, for_log = self._indexer_loss(inputs, attended, lse, loss, attention_pass)
            if measured is not None:
                # A query with one causal key has KL 0, except for rounding.
                self.runtime.stats.add("indexer_kl", self.layer, for_log, measured.number_with_choice)
            if attention_pass.trains_indexer:
                losses.append(kl)
        out = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        if not losses:
            return out
        with attention_pass.indexer_graph(), trace_span("kl"):
            loss_sum = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            return differentiate_indexer_loss(
                out, loss_sum, attention_pass.kl_grad_scale, attention_pass.base_has_graph
            )

    def _attend_chunk(
        self,
        inputs: ChunkInputs,
        attended: Selection | None,
        loss: LossInputs | None,
        attention_pass: AttentionPass,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one chunk's attention and output gate G1, from arguments and parameters only, so that recomputation
        works.

        Args:
            attended: the selected keys, possibly an earlier layer's; None: all causal keys.
            loss: None if the indexer loss is not needed.

        Returns:
            The output [B, L, n_h, d_k], and the log-sum-exp for the indexer loss (None if another library ran dense
            attention).
        """
        q, k, v, output_gate, geometry = inputs.q, inputs.k, inputs.v, inputs.output_gate, inputs.geometry
        if self.dense is not None and loss is None and not attention_pass.sparse:
            from gsa_kernels.fused.gates.op import fused_sigmoid_gate  # imports Triton

            out = self.dense(q, k, v)
            return out if output_gate is None else fused_sigmoid_gate(out, output_gate.flatten(2, 3)), None
        out, lse = api.sparse_attention(
            q, k, v, attended, geometry, output_gate, implementation=self.implementation
        )
        self._keep_largest(lse)
        return out, lse

    @torch.no_grad()
    def _keep_largest(self, lse: torch.Tensor) -> None:
        if self.largest_log_sums is not None:
            self.largest_log_sums.copy_(torch.maximum(self.largest_log_sums, lse.amax((0, 2))))

    def _indexer_loss(
        self,
        inputs: ChunkInputs,
        attended: Selection | None,
        lse: torch.Tensor,
        loss: LossInputs,
        attention_pass: AttentionPass,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over queries t of KL(p_t || softmax(beta * I_t)), and the value to log.

        I_t are the indexer scores of the attended keys, and beta is the inverse temperature. The value to log is each
        query's KL, [B, L], or the (estimated) sum of the KLs if queries are sampled or sharded.

        The target p_t is the mean attention probability over the heads of all tensor-parallel ranks. To compute p_t,
        the ranks all-gather queries, keys and log-sum-exps instead of the probabilities, which have L^2 elements.
        Each rank then sums the KL over its share of the queries. This sum is multiplied by the number of ranks, because
        the indexer's gradients are averaged over the ranks (indexer.py).
        """
        tp = self.tp_group
        q, k, lse = (gather_heads(x, dim, tp) for x, dim in ((inputs.q, 2), (inputs.k, 2), (lse, 1)))
        share = replace(loss.rows, share=(tp.rank(), tp.size()))
        kl, rows = api.indexer_loss(
            loss.indexer, q, k, lse, attended, inputs.geometry, share, implementation=self.implementation
        )
        if share == RowSample():
            return kl, rows
        total = kl.detach()
        if tp.size() == 1:
            return kl, total
        if attention_pass.measures:
            total = total.clone()
            dist.all_reduce(total, group=tp)
        return kl * tp.size(), total

    def chunks(self, length: int) -> list[QueryChunk]:
        """Return the query chunks of this rank, which has `length` tokens."""
        return query_chunks(length, self.cut)

    def sampled_tokens(
        self, length: int, document_ids: torch.Tensor | None, attention_pass: AttentionPass
    ) -> torch.Tensor:
        """Return which of this rank's `length` tokens (int64 indices) enter statistics with many values per token."""

        def tokens() -> torch.Tensor:
            pieces = [(chunk, self._sample(length, chunk, attention_pass)) for chunk in self.chunks(length)]
            return torch.cat(
                [chunk.local.start + sample.sparse for chunk, sample in pieces if sample is not None]
            )

        return self.runtime.once(document_ids, ("sampled tokens", length), tokens)

    def _sample(self, length: int, chunk: QueryChunk, attention_pass: AttentionPass) -> QuerySample | None:
        """Return the chunk's queries to measure; this rank has `length` tokens."""
        whole = length * self.cp_group.size()
        return self.runtime.query_sample(attention_pass, whole, chunk.start, chunk.end)

    def _measured(
        self,
        tokens: torch.Tensor,
        chunk: QueryChunk,
        document_ids: torch.Tensor | None,
        geometry: Geometry,
        attention_pass: AttentionPass,
    ) -> MeasuredQueries | None:
        """Return the chunk's queries to measure; None if the pass does not measure.

        Args:
            tokens: [B, L, ...], this rank's tokens.
        """
        batch, length = tokens.shape[:2]
        sample = self._sample(length, chunk, attention_pass)
        if sample is None:
            return None
        make = partial(MeasuredQueries, sample, geometry, batch, chunk.end)
        return self.runtime.once(document_ids, (length, batch, chunk.start, chunk.end), make)

    def _geometry(self, document_ids: torch.Tensor | None, chunk: QueryChunk) -> Geometry:
        starts = None if document_ids is None else document_starts(document_ids[:, : chunk.end], chunk.start)
        return Geometry(starts, chunk.start, self.gsa.local_window)


def gather_heads(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the heads of the tensor-parallel ranks in rank order, without gradient. Collective."""
    local = local.detach()
    if group.size() == 1:
        return local
    local = local.contiguous()
    every = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(every, local, group=group)
    return torch.cat(every.chunk(group.size()), dim=dim)
