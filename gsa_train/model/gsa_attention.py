"""Gated Sparse Attention as a megatron-core attention module, in the order of the paper's equations.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

Shapes: L tokens of this context-parallel rank, B sequences, n heads of this tensor-parallel rank, d_k head size.
megatron-core hands activations over as [L, B, ...]; from the indexer to G1 tensors are batch first, as gsa_kernels
wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from gsa_kernels import sigmoid_gate
from gsa_kernels.limits import HEAD_SIZES
from gsa_kernels.types import BudgetRule
from gsa_train.context_sharding import QueryChunk, query_chunks
from gsa_train.loss_injection import differentiate_indexer_loss
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.context_parallel import gather_tokens
from gsa_train.model.cores.build import build_core
from gsa_train.model.cores.interface import AttentionInputs, CoreSettings, IndexerLossInputs
from gsa_train.model.gates import build_gate_projection, gate_statistics, has_gates, split_gate_logits
from gsa_train.model.indexer import Indexer
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.norm import RMSNorm
from gsa_train.model.projected import IndexerProjections, Projected, chunk_geometry
from gsa_train.model.query_sample import QuerySample
from gsa_train.model.recompute import CalledTwice
from gsa_train.model.rotary import context_sharding
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.model.saturation import saturation_statistics
from gsa_train.profiling.trace_spans import trace_span


@dataclass(frozen=True)
class AttentionContext:
    """What a layer needs beside its inputs; goes through the layer spec's params."""

    runtime: AttentionRuntime
    implementation: str
    """Name of the attention core (cores/build.py)."""
    dense_attention: str
    """Name of what runs dense passes beside the fused kernels (dense_attention.py)."""
    recompute_core: bool
    """Compute the attention core again in the backward pass instead of keeping its L x L tensors."""


class GSASelfAttention(MegatronModule):
    """One layer's attention: dense or sparse, with or without gates and indexer, as `config.gsa` says.

    The parameters `linear_qkv` and `linear_proj` have megatron-core's names and layout (per key-value head:
    its query heads, the key, the value), so that its checkpoint tools apply.
    """

    def __init__(
        self,
        config: GSATransformerConfig,
        context: AttentionContext,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        assert attn_mask_type == AttnMaskType.causal
        self.gsa = config.gsa
        self.groups = pg_collection
        self.cut = context_sharding(config, pg_collection)
        self.runtime = context.runtime
        self.recompute_core = context.recompute_core
        self.layer = layer_number - 1
        """Index in the whole model, from 0."""
        self.leads_group = self.layer % self.gsa.selection_reuse == 0
        """False: this layer takes the selection of an earlier one."""
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.local_kv_heads = config.num_query_groups // pg_collection.tp.size()
        d, d_k = config.hidden_size, config.kv_channels
        fuses_heads = config.fused_ops and not config.qk_layernorm and d_k in HEAD_SIZES
        self.heads_op = _fused_heads_op() if fuses_heads else None

        self.linear_qkv = ColumnParallelLinear(
            d,
            (config.num_attention_heads + 2 * config.num_query_groups) * d_k,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            disable_grad_reduce=has_gates(config),
            tp_group=pg_collection.tp,
        )
        self.linear_gate = build_gate_projection(config, pg_collection)
        if self.linear_gate is not None:  # it communicates for both
            self.linear_qkv.sequence_parallel = False
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * d_k,
            d,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )
        # The names end in layernorm: megatron-core sums their gradients over the tensor-parallel ranks.
        self.q_layernorm = RMSNorm(config, d_k, config.layernorm_epsilon) if config.qk_layernorm else None
        self.k_layernorm = RMSNorm(config, d_k, config.layernorm_epsilon) if config.qk_layernorm else None
        has_indexer = self.gsa.attention == "sparse" and self.leads_group
        self.indexer = Indexer(config, pg_collection) if has_indexer else None
        fused = context.implementation == "triton"
        self.variance = VarianceTracker(self.linear_qkv.weight.device, fused) if has_indexer else None
        gsa = self.gsa
        rule = BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k)
        settings = CoreSettings(rule, gsa.attention_kernel, pg_collection.tp, self.layer)
        self.core = build_core(settings, context.implementation, context.dense_attention)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[L, B, d] ([L / tp, B, d] under sequence parallelism) -> the same, and no bias.

        Args:
            hidden_states: the layer's normalised input.
            attention_mask: document ids of the whole packed sequences [B, L * cp], or None for one document each.
            rotary_pos_emb: angles of the rotary embedding on Q and K.
            unused: what megatron-core passes to every attention (inference, packing formats we do not use).
        """
        attention_pass = self.runtime.pass_of_this_forward()
        gates = None
        gathered = not self.config.sequence_parallel
        if self.linear_gate is not None:
            gates, hidden_states = self.linear_gate(hidden_states)
            gathered = True
        q, k, v, output_gate = self._project(hidden_states, gates, rotary_pos_emb)
        if gates is not None and attention_pass.measures:
            self._measure_gates(gates, attention_pass)
        indexed = selections = None
        if attention_pass.uses_indexer:
            if self.indexer is not None:
                self.runtime.shared_selection = None  # not beside the next one
                with trace_span("indexer"):
                    indexed = self._index(hidden_states, gathered, attention_pass)
                with trace_span("selection"):
                    self.runtime.shared_selection = self._select(indexed, attention_mask, attention_pass)
            selections = self.runtime.shared_selection

        projected = Projected(
            q, k, v, output_gate, attention_mask, *(indexed if indexed is not None else (None, None, None))
        )
        if self.recompute_core and attention_pass.has_graph:
            attend = CalledTwice(self._attend, selections, attention_pass)
            out = tensor_parallel.checkpoint(attend, False, *projected)
        else:
            out = self._attend(projected, selections, attention_pass)
        return self.linear_proj(out.flatten(2).transpose(0, 1).contiguous())

    def _project(
        self,
        hidden_states: torch.Tensor,
        gates: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Q [B, L, n_h, d_k], K and gated V [B, L, n_kv, d_k], logits of G1 [B, L, n_kv, n_h / n_kv, d_k] or
        None."""
        qkv, _ = self.linear_qkv(hidden_states)
        if self.heads_op is not None:
            assert isinstance(rotary_pos_emb, torch.Tensor)
            return self.heads_op(
                qkv,
                gates,
                *self.runtime.rotary_tables(rotary_pos_emb),
                kv_heads=self.local_kv_heads,
                value_gate=self.gsa.value_gate,
                output_gate=self.gsa.output_gate,
            )

        value_gate = output_gate = None
        if gates is not None:
            value_gate, output_gate = split_gate_logits(gates, self.config)
        d_k = self.config.kv_channels
        per_group = qkv.unflatten(-1, (-1, (self.heads_per_group + 2) * d_k))
        q, k, v = per_group.split([self.heads_per_group * d_k, d_k, d_k], -1)
        q = q.unflatten(-1, (self.heads_per_group, d_k)).flatten(2, 3)
        if value_gate is not None:
            v = sigmoid_gate(v, value_gate)  # eq. 9
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rotary_pos_emb is not None:
            q_angles, k_angles = (
                rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            )
            q = apply_rotary_pos_emb(q, q_angles, config=self.config, cp_group=self.groups.cp)
            k = apply_rotary_pos_emb(k, k_angles, config=self.config, cp_group=self.groups.cp)
        if output_gate is not None:
            output_gate = output_gate.transpose(0, 1)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), output_gate

    def _index(
        self, hidden_states: torch.Tensor, gathered: bool, attention_pass: AttentionPass
    ) -> IndexerProjections:
        """The indexer's queries of this rank's tokens and keys of all tokens, cut off from the graph of the language
        model."""
        hidden = hidden_states.detach()
        if not gathered:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        with attention_pass.indexer_graph():
            queries, keys, head_weight_logits = self._indexer(hidden)
            keys = gather_tokens(keys, self.cut, self.groups.cp)
        return IndexerProjections(queries, keys, head_weight_logits)

    @torch.no_grad()
    def _select(
        self, indexed: IndexerProjections, document_ids: torch.Tensor | None, attention_pass: AttentionPass
    ) -> list[Any]:
        """k_t and S_t: the core's selection for each chunk of this rank's queries."""
        assert self.variance is not None
        with_temperature = attention_pass.sparse and attention_pass.trains_indexer
        length, selections = indexed.queries.shape[1], []
        for chunk in self._chunks(length):
            result = self.core.select(
                self._indexer.applied(indexed.of(chunk), with_temperature).of_block_leaders(
                    self.gsa.selection_block
                ),
                self.variance.ema,
                chunk_geometry(document_ids, chunk, self.gsa),
                attention_pass,
                self._sample(length, chunk, attention_pass),
            )
            if attention_pass.moves_averages:
                self.variance.record(result.variance)
            self.runtime.stats.record(self.layer, result.statistics)
            selections.append(result.selection)
        return selections

    def _attend(
        self, projected: Projected, selections: list[Any] | None, attention_pass: AttentionPass
    ) -> torch.Tensor:
        """Softmax over S_t and G1, over all keys of the sequence for each chunk of this rank's queries: [B, L, n_h,
        d_k], with the indexer loss joined to its gradient. What is gathered here is gathered again when it is
        recomputed, not kept."""
        k, v = (gather_tokens(each, self.cut, self.groups.cp) for each in (projected.k, projected.v))
        q, output_gate, indexed = projected.q, projected.output_gate, projected.indexed
        outputs, losses = [], []
        for number, chunk in enumerate(self._chunks(q.shape[1])):
            sample = self._sample(q.shape[1], chunk, attention_pass)
            inputs = AttentionInputs(
                q[:, chunk.local],
                k[:, : chunk.end],
                v[:, : chunk.end],
                None if output_gate is None else output_gate[:, chunk.local],
            )
            with attention_pass.indexer_graph():
                part = None if indexed is None else indexed.of(chunk)
                loss = self._loss_inputs(part, attention_pass)
            geometry = chunk_geometry(projected.document_ids, chunk, self.gsa)
            if sample is not None and len(sample.sparse) > 0:
                indexer = None if part is None else self._indexer.applied(part, with_temperature=False)
                statistics = saturation_statistics(inputs, indexer, geometry, sample.sparse)
                self.runtime.stats.record(self.layer, statistics)
            selection = None if selections is None else selections[number]
            result = self.core.attend(inputs, selection, geometry, loss, attention_pass, sample)
            self.runtime.stats.record(self.layer, result.statistics)
            outputs.append(result.out)
            if result.indexer_loss is not None:
                losses.append(result.indexer_loss)
        out = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        if not losses:
            return out
        with attention_pass.indexer_graph(), trace_span("kl"):
            loss_sum = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            return differentiate_indexer_loss(
                out, loss_sum, attention_pass.kl_grad_scale, attention_pass.base_has_graph
            )

    def _loss_inputs(
        self, indexed: IndexerProjections | None, attention_pass: AttentionPass
    ) -> IndexerLossInputs | None:
        """None where this layer has no indexer, or this pass no use for its loss."""
        if indexed is None or not attention_pass.needs_indexer_loss:
            return None
        on_rows = partial(self.runtime.stats.add, "indexer_kl", self.layer)
        return IndexerLossInputs(
            self._indexer.applied(indexed).of_block_leaders(self.gsa.selection_block),
            self.runtime.draw_rows(attention_pass, self.layer),
            on_rows if attention_pass.measures else None,
        )

    @property
    def _indexer(self) -> Indexer:
        assert self.indexer is not None
        return self.indexer

    def _chunks(self, length: int) -> list[QueryChunk]:
        return query_chunks(length, self.cut)

    def _sample(self, length: int, chunk: QueryChunk, attention_pass: AttentionPass) -> QuerySample | None:
        """Which queries of a chunk to measure; this rank has `length` tokens."""
        whole = length * self.groups.cp.size()
        return self.runtime.query_sample(attention_pass, whole, chunk.start, chunk.end)

    def _measure_gates(self, gates: torch.Tensor, attention_pass: AttentionPass) -> None:
        """Of few tokens: each has thousands of gates.

        Args:
            gates: logits of both, [L, B, local rows].
        """
        length = gates.shape[0]
        pieces = [(chunk, self._sample(length, chunk, attention_pass)) for chunk in self._chunks(length)]
        rows = [chunk.local.start + sample.sparse for chunk, sample in pieces if sample is not None]
        self.runtime.stats.record(self.layer, gate_statistics(gates.detach()[torch.cat(rows)], self.config))


def _fused_heads_op() -> Callable[..., Any]:
    from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate  # imports Triton

    return fused_split_rotate_gate
