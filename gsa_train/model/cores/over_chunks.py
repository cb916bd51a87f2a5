"""Selection and attention for each of this rank's query chunks: one, or several under context parallelism."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from gsa_data.pack import document_starts
from gsa_kernels import api
from gsa_kernels.limits import GATHERED_BELOW_DENSITY
from gsa_kernels.types import BudgetRule, Geometry, Selection
from gsa_kernels.types import Indexer as AppliedIndexer
from gsa_train.config import GSAConfig
from gsa_train.distributed.context_sharding import ContextSharding, QueryChunk, query_chunks
from gsa_train.distributed.loss_injection import differentiate_indexer_loss
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.context_parallel import gather_tokens
from gsa_train.model.cores.interface import AttentionCore, AttentionInputs, IndexerLossInputs
from gsa_train.model.group_target import GroupTarget
from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.probes.attention_statistics import measure_attention, measure_selection
from gsa_train.model.probes.measured_queries import MeasuredQueries
from gsa_train.model.probes.query_sample import QuerySample
from gsa_train.model.probes.saturation import saturation_statistics
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.profiling.trace_spans import trace_span

logger = logging.getLogger(__name__)


class Projected(NamedTuple):
    """Projections of a layer's input: only tensors, as activation checkpointing requires."""

    q: torch.Tensor
    """[B, L, n_h, d_k], rotated, for this rank's tokens."""
    k: torch.Tensor
    v: torch.Tensor
    """[B, L, n_kv, d_k], K rotated and V gated by G2."""
    output_gate: torch.Tensor | None
    """Logits of G1 [B, L, n_kv, n_h / n_kv, d_k]; None without this gate."""
    document_ids: torch.Tensor | None
    """int32, all tokens of the sequence; None for one document per sequence."""
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    head_weight_logits: torch.Tensor | None = None
    """See `IndexerProjections`; None if the indexer does not run."""

    @property
    def indexed(self) -> IndexerProjections | None:
        if self.queries is None:
            return None
        assert self.keys is not None
        assert self.head_weight_logits is not None
        return IndexerProjections(self.queries, self.keys, self.head_weight_logits)


class CoreOverChunks:
    """One layer's core: passes it each chunk with all keys up to the chunk's end, and records its statistics."""

    def __init__(
        self,
        core: AttentionCore,
        gsa: GSAConfig,
        cut: ContextSharding,
        cp_group: dist.ProcessGroup,
        runtime: AttentionRuntime,
        layer: int,
    ) -> None:
        self.core, self.gsa, self.runtime, self.layer = core, gsa, runtime, layer
        self.cut, self.cp_group = cut, cp_group
        self.rule = BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k, gsa.dense_below)
        self._formats: dict[int, str] = {}

    @torch.no_grad()
    def select(
        self,
        indexer: Indexer,
        indexed: IndexerProjections,
        variance: VarianceTracker,
        document_ids: torch.Tensor | None,
        attention_pass: AttentionPass,
    ) -> list[Selection]:
        """Select k_t and S_t of each chunk.

        Call it outside recomputation: a second selection could differ from the forward pass's.

        Args:
            indexed: queries of this rank's tokens, keys of all tokens of the sequence.
            variance: holds V̄ for the budgets, and records the variances of these scores.
            document_ids: all tokens of the sequence.
        """
        with_temperature = attention_pass.sparse and attention_pass.trains_indexer
        length, selections = indexed.queries.shape[1], []
        for chunk in self.chunks(length):
            applied = indexer.applied(indexed.of(chunk), with_temperature)
            geometry = self._geometry(document_ids, chunk)
            fused = self.core.implementation == "triton"
            selection = api.select(
                self._of_blocks(applied, geometry),
                self.rule,
                variance.ema,
                geometry,
                implementation=self.core.implementation,
                kernel=self.gsa.attention_kernel if fused else "masked",
                with_log_sum=fused and with_temperature,
            )
            if fused:
                self._log_format(selection, chunk.start)
            if attention_pass.moves_averages:
                variance.record(selection.variance)
            measured = self._measured(indexed.queries, chunk, document_ids, geometry, attention_pass)
            if measured is not None:
                statistics = measure_selection(selection, variance.ema, measured, self.core.implementation)
                self.runtime.stats.record(self.layer, statistics)
            selections.append(selection)
        return selections

    def _log_format(self, selection: Selection, query_start: int) -> None:
        """Log which attention kernel the selection of these queries goes to, when that changes."""
        kernel = "gathered" if selection.format == "key_lists" else "masked"
        if kernel == self._formats.get(query_start):
            return
        self._formats[query_start] = kernel
        reason = f"gsa.attention_kernel = {self.gsa.attention_kernel}"
        if selection.density is not None:
            reason += f", union density {selection.density:.2f}, break-even {GATHERED_BELOW_DENSITY:.2f}"
        queries = f", queries from {query_start}" if query_start > 0 else ""
        logger.info("layer %d%s: %s attention (%s)", self.layer, queries, kernel, reason)

    def attend(
        self,
        projected: Projected,
        indexer: Indexer | None,
        selections: list[Selection] | None,
        attention_pass: AttentionPass,
    ) -> torch.Tensor:
        """Compute softmax over S_t and G1: [B, L, n_h, d_k]. The indexer loss is injected into its gradient.

        Recomputation repeats the all-gathers of this method instead of keeping their results."""
        k, v = (gather_tokens(each, self.cut, self.cp_group) for each in (projected.k, projected.v))
        q, output_gate, indexed = projected.q, projected.output_gate, projected.indexed
        group_target = self._group_target(indexer, indexed, attention_pass)
        ends_group = (self.layer + 1) % self.gsa.selection_reuse == 0
        outputs, losses = [], []
        for number, chunk in enumerate(self.chunks(q.shape[1])):
            inputs = AttentionInputs(
                q[:, chunk.local],
                k[:, : chunk.end],
                v[:, : chunk.end],
                None if output_gate is None else output_gate[:, chunk.local],
            )
            geometry = self._geometry(projected.document_ids, chunk)
            measured = self._measured(q, chunk, projected.document_ids, geometry, attention_pass)
            loss = of_chunk = None
            with attention_pass.indexer_graph():
                if indexer is not None and indexed is not None:
                    of_chunk = indexed.of(chunk)
                    if group_target is None:
                        loss = self._loss_inputs(indexer, of_chunk, geometry, measured, attention_pass)
                if group_target is not None and ends_group:
                    taught = group_target.indexed.of(chunk)
                    loss = self._loss_inputs(group_target.indexer, taught, geometry, measured, attention_pass)
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
                    self.core.implementation,
                    self.core.settings.tp_group,
                    self.gsa.most_selected_keys,
                )
                self.runtime.stats.record(self.layer, statistics)
            target_sum = None if group_target is None else group_target.sum_of(chunk)
            result = self.core.attend(inputs, selection, geometry, loss, attention_pass, target_sum)
            if measured is not None and result.kl is not None:
                # A query with one causal key has KL 0, except for rounding.
                of_layer, counted = (
                    self.layer if group_target is None else group_target.layer,
                    measured.number_with_choice,
                )
                self.runtime.stats.add("indexer_kl", of_layer, result.kl, counted)
            outputs.append(result.out)
            if result.indexer_loss is not None:
                losses.append(result.indexer_loss)
        if ends_group:
            self.runtime.group_target = None
        out = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        if not losses:
            return out
        with attention_pass.indexer_graph(), trace_span("kl"):
            loss_sum = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            return differentiate_indexer_loss(
                out, loss_sum, attention_pass.kl_grad_scale, attention_pass.base_has_graph
            )

    def _group_target(
        self, indexer: Indexer | None, indexed: IndexerProjections | None, attention_pass: AttentionPass
    ) -> GroupTarget | None:
        """Return the target of this layer's group; None if the indexer learns from its own layer, or not at all."""
        if self.gsa.reuse_teacher == "group" and indexer is not None and indexed is not None:
            needed = attention_pass.needs_indexer_loss
            self.runtime.group_target = GroupTarget(indexer, indexed, self.layer) if needed else None
        group_target: GroupTarget | None = self.runtime.group_target
        return group_target

    def local_document_starts(self, length: int, document_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Return where the document of each of this rank's `length` tokens begins, int64 [B, L], by the places that
        tokens have on this rank; None without `gsa.indexer_pool` or with one document."""
        if self.gsa.indexer_pool == 1 or document_ids is None:
            return None

        def starts() -> torch.Tensor:
            of_chunks = [
                document_starts(document_ids[:, : chunk.end], chunk.start) + (chunk.local.start - chunk.start)
                for chunk in self.chunks(length)
            ]
            return torch.cat(of_chunks, dim=1)

        return self.runtime.once(document_ids, ("local document starts", length), starts)

    def chunks(self, length: int) -> list[QueryChunk]:
        """Return the query chunks of this rank, which has `length` tokens."""
        return query_chunks(length, self.cut)

    def sampled_tokens(
        self, length: int, document_ids: torch.Tensor | None, attention_pass: AttentionPass
    ) -> torch.Tensor:
        """Return the tokens (int64) of this rank's `length` to measure in statistics with many values per token."""

        def tokens() -> torch.Tensor:
            pieces = [(chunk, self._sample(length, chunk, attention_pass)) for chunk in self.chunks(length)]
            return torch.cat(
                [chunk.local.start + sample.sparse for chunk, sample in pieces if sample is not None]
            )

        return self.runtime.once(document_ids, ("sampled tokens", length), tokens)

    def _sample(self, length: int, chunk: QueryChunk, attention_pass: AttentionPass) -> QuerySample | None:
        """Return the queries of a chunk to measure; this rank has `length` tokens."""
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
        """Return the positions and documents of a chunk's queries."""
        starts = None if document_ids is None else document_starts(document_ids[:, : chunk.end], chunk.start)
        gsa = self.gsa
        return Geometry(starts, chunk.start, gsa.selection_block, gsa.local_window, gsa.indexer_pool)

    def _of_blocks(self, indexer: AppliedIndexer, geometry: Geometry) -> AppliedIndexer:
        """Reduce the queries to one row per block that shares a selection (`gsa.selection_query`)."""
        if self.gsa.selection_query == "first":
            return indexer.of_block_leaders(self.gsa.selection_block)
        assert geometry.query_start == 0
        return indexer.of_previous_blocks(self.gsa.selection_block, geometry.document_starts)

    def _loss_inputs(
        self,
        indexer: Indexer,
        indexed: IndexerProjections,
        geometry: Geometry,
        measured: MeasuredQueries | None,
        attention_pass: AttentionPass,
    ) -> IndexerLossInputs | None:
        """Return the inputs of the indexer loss; None if this pass does not need it."""
        if not attention_pass.needs_indexer_loss:
            return None
        on_rows = None
        if measured is not None:
            counted = measured.number_with_choice
            on_rows = partial(self.runtime.stats.add, "indexer_kl", self.layer, count=counted)
        return IndexerLossInputs(
            self._of_blocks(indexer.applied(indexed), geometry),
            self.runtime.draw_rows(attention_pass, self.layer),
            on_rows,
        )
