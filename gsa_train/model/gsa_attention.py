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

from gsa_kernels import sigmoid_gate, visible_mask
from gsa_train.config.kernel_checks import KERNEL_HEAD_SIZES
from gsa_train.model.attention_core import build_core, indexer_graph, train_indexer
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.context_parallel import gather_tokens
from gsa_train.model.gates import build_gate_projection, has_gates, split_gate_logits
from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.mcore_config import GSATransformerConfig
from gsa_train.model.norm import RMSNorm
from gsa_train.model.query_sample import QuerySample
from gsa_train.model.rotary import sequence_cut
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.model.saturation import largest_logit, saturated_share
from gsa_train.profiling.spans import span
from gsa_train.sequence_cut import QueryRun, query_runs


@dataclass(frozen=True)
class AttentionContext:
    """What a layer needs beside its inputs; goes through the layer spec's params."""

    runtime: AttentionRuntime
    implementation: str
    """Name of the attention core (attention_core.py)."""
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
        self.cut = sequence_cut(config, pg_collection)
        self.runtime = context.runtime
        self.recompute_core = context.recompute_core
        self.layer = layer_number - 1
        """Index in the whole model, from 0."""
        self.leads_group = self.layer % self.gsa.selection_reuse == 0
        """False: this layer takes the selection of an earlier one."""
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.local_kv_heads = config.num_query_groups // pg_collection.tp.size()
        d, d_k = config.hidden_size, config.kv_channels
        fuses_heads = config.fused_ops and not config.qk_layernorm and d_k in KERNEL_HEAD_SIZES
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
        self.variance = VarianceTracker(self.linear_qkv.weight.device) if has_indexer else None
        self.core = build_core(self, context.implementation, context.dense_attention)

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
        gates = None
        gathered = not self.config.sequence_parallel
        if self.linear_gate is not None:
            gates, hidden_states = self.linear_gate(hidden_states)
            gathered = True
        q, k, v, output_gate = self._project(hidden_states, gates, rotary_pos_emb)
        projections = selected = None
        if self.runtime.uses_indexer:
            if self.indexer is not None:
                self.runtime.shared_selection = None  # not beside the next one
                with span("indexer"):
                    projections = self._index(hidden_states, gathered)
                with span("selection"):
                    self.runtime.shared_selection = self._select(projections, attention_mask)
            selected = self.runtime.shared_selection

        queries, keys, weight_logits = projections or (None, None, None)
        core_inputs = (q, k, v, output_gate, queries, keys, weight_logits, attention_mask)
        if self.recompute_core and torch.is_grad_enabled():
            attend = partial(self._attend_twice, [selected])  # checkpoints take tensors only
            out = tensor_parallel.checkpoint(attend, False, *core_inputs)
        else:
            out = self._attend(selected, *core_inputs)
        return self.linear_proj(out.flatten(2).transpose(0, 1).contiguous())

    def _select(self, projections: IndexerProjections, document_ids: torch.Tensor | None) -> list[Any]:
        """The core's selection for each run of this rank's queries."""
        queries, keys, weight_logits = projections
        return [
            self.core.select(
                IndexerProjections(queries[:, run.local], keys[:, : run.end], weight_logits[:, run.local]),
                _up_to(document_ids, run.end),
                run.start,
                self._sample(queries.shape[1], run),
            )
            for run in self._runs(queries.shape[1])
        ]

    def _attend_twice(self, held: list[list[Any] | None], *core_inputs: Any) -> torch.Tensor:
        """Forward without a graph, and again in the backward pass, which lets go of the selection: the node of the
        checkpoint lives as long as the micro-batch's loss, which the schedule holds."""
        selected = held[0]
        if torch.is_grad_enabled():
            held.clear()
        return self._attend(selected, *core_inputs)

    def _attend(
        self,
        selected: list[Any] | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output_gate: torch.Tensor | None,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        weight_logits: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """The core over all keys of the sequence for each run of this rank's queries: [B, L, n_h, d_k], with the
        indexer loss joined to its gradient. What is gathered here is gathered again when it is recomputed, not kept."""
        k, v = (gather_tokens(each, self.cut, self.groups.cp) for each in (k, v))
        outputs, losses = [], []
        for index, run in enumerate(self._runs(q.shape[1])):
            sample = self._sample(q.shape[1], run)
            if sample is not None and len(sample.sparse) > 0:
                self._measure_saturation(q, k, queries, keys, document_ids, run, sample.sparse)
            with indexer_graph(self.runtime):
                projections = _part(queries, run), _up_to(keys, run.end), _part(weight_logits, run)
            out, kl = self.core.attend(
                q[:, run.local],
                k[:, : run.end],
                v[:, : run.end],
                _part(output_gate, run),
                *projections,
                _up_to(document_ids, run.end),
                None if selected is None else selected[index],
                run.start,
                sample,
            )
            outputs.append(out)
            if kl is not None:
                losses.append(kl)
        out = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        if not losses:
            return out
        with indexer_graph(self.runtime), span("kl"):
            loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            return train_indexer(self.runtime, out, loss)

    def _runs(self, length: int) -> list[QueryRun]:
        return query_runs(length, self.cut)

    def _sample(self, length: int, run: QueryRun) -> QuerySample | None:
        """Which queries of a run to measure; this rank has `length` tokens."""
        return self.runtime.sample(length * self.groups.cp.size(), run.start, run.end)

    def _project(
        self,
        hidden_states: torch.Tensor,
        gates: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Q [B, L, n_h, d_k], K and gated V [B, L, n_kv, d_k], logits of G1 [B, L, n_kv, n_h / n_kv, d_k] or
        None."""
        qkv, _ = self.linear_qkv(hidden_states)
        value_gate = output_gate = None
        if gates is not None:
            self._measure_gates(gates)
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

    def _index(self, hidden_states: torch.Tensor, gathered: bool) -> IndexerProjections:
        """The indexer's queries of this rank's tokens and keys of all tokens, cut off from the graph of the language
        model."""
        assert self.indexer is not None
        hidden = hidden_states.detach()
        if not gathered:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        with indexer_graph(self.runtime):
            queries, keys, weight_logits = self.indexer(hidden)
            return IndexerProjections(queries, gather_tokens(keys, self.cut, self.groups.cp), weight_logits)

    def _measure_gates(self, gates: torch.Tensor) -> None:
        """Of few tokens: each has thousands of gates.

        Args:
            gates: logits of both, [L, B, local rows].
        """
        length = gates.shape[0]
        pieces = [(run, self._sample(length, run)) for run in self._runs(length)]
        rows = [run.local.start + sample.sparse for run, sample in pieces if sample is not None]
        if not rows:
            return
        logits = split_gate_logits(gates.detach()[torch.cat(rows)], self.config)
        for name, gate in zip(("value_gate", "output_gate"), logits, strict=True):
            if gate is not None:
                opening = gate.float().sigmoid()
                self.runtime.stats.add(f"{name}_mean", self.layer, opening)
                self.runtime.stats.add(f"{name}_low", self.layer, opening < 0.1)
                self.runtime.stats.add(f"{name}_high", self.layer, opening > 0.9)

    @torch.no_grad()
    def _measure_saturation(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        run: QueryRun,
        rows: torch.Tensor,
    ) -> None:
        """Of `rows` among the run's queries, against all keys up to the run's end."""
        visible = visible_mask(
            run.end, query_positions=run.start + rows, document_ids=_up_to(document_ids, run.end)
        )
        logit = largest_logit(q[:, run.local][:, rows], k[:, : run.end], visible)
        self.runtime.stats.maximum("max_attention_logit", self.layer, logit)
        if queries is not None and keys is not None and self.indexer is not None:
            share = saturated_share(
                queries[:, run.local][:, rows],
                keys[:, : run.end],
                self.indexer.score_bias,
                self.gsa.indexer_activation,
                visible,
            )
            self.runtime.stats.add("indexer_saturated", self.layer, share)


def _part(tensor: torch.Tensor | None, run: QueryRun) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, run.local]


def _up_to(tensor: torch.Tensor | None, end: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, :end]


def _fused_heads_op() -> Callable[..., Any]:
    from gsa_kernels.prologue.op import fused_split_rotate_gate  # imports Triton

    return fused_split_rotate_gate
