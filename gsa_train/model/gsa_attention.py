"""Implement Gated Sparse Attention as a megatron-core attention module, in the order of the paper's equations.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

G1 is the gate on the output, and G2 the gate on the values. k_t is the key budget of query t, and S_t the set of its
selected keys.

In the shapes, L is the number of tokens of this context-parallel rank, B the number of sequences, n the number of heads
of this tensor-parallel rank, and d_k the head size. Activations of megatron-core are [L, B, ...]. From the indexer to
G1, tensors are [B, L, ...] instead, because gsa_kernels needs the batch first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from gsa_kernels.limits import HEAD_SIZES
from gsa_kernels.types import Implementation
from gsa_train.config.gates import fuses_gates, has_paper_form
from gsa_train.model.attention import AttentionOverChunks, Projected
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.context_parallel import gather_tokens
from gsa_train.model.gate_variants import HeadNorm, ReplicatedGate, apply_gate
from gsa_train.model.gates import (
    GateLogits,
    build_gate_projection,
    build_head_gate,
    gate_bins,
    gate_statistics,
    has_gate_projection,
    split_gate_logits,
)
from gsa_train.model.indexer import Indexer
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.norm import RMSNorm
from gsa_train.model.rotary import LocalRotaryEmbedding, context_sharding
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.profiling.trace_spans import trace_span


@dataclass(frozen=True)
class AttentionContext:
    """Holds what all layers share. The layer spec passes this object as a parameter."""

    runtime: AttentionRuntime
    implementation: Implementation
    dense_attention: str
    """Which dense attention runs if the implementation is `triton` (dense_attention.py)."""
    captured: bool
    """Whether CUDA graphs capture passes, which excludes key lists."""
    recompute_core: bool
    """Whether the backward pass recomputes attention from its projections, so that no L x L tensors are kept."""
    indexer_rotary: LocalRotaryEmbedding | None
    """The rotary embedding that all indexers share (rotary.py); None without `gsa.indexer_rope`."""


class GSASelfAttention(MegatronModule):
    """Runs one layer's attention: dense or sparse, with or without gates and indexer, as `config.gsa` says.

    `AttentionOverChunks` applies G1 in the paper's form. This class applies other forms.

    The parameters `linear_qkv` and `linear_proj` have megatron-core's names and layout, so that its checkpoint tools
    apply. `linear_qkv` holds, for each key-value head, its query heads, the key and the value.
    """

    def __init__(
        self,
        config: GSATransformerConfig,
        context: AttentionContext,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
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
        """Whether this layer is the first of a group that shares one selection. Other layers use the first layer's
        selection."""
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.local_kv_heads = config.num_query_groups // pg_collection.tp.size()
        d, d_k = config.hidden_size, config.kv_channels
        self.rotary_magnitude = 1.0 if config.yarn is None else config.yarn.magnitude
        plain_heads = not config.qk_layernorm and config.rotary_percent == 1
        self.heads_op: Callable[..., Any] | None = None
        if config.fused_ops and plain_heads and d_k in HEAD_SIZES and fuses_gates(config.gsa):
            from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate  # imports Triton

            self.heads_op = fused_split_rotate_gate

        self.linear_qkv = config.linears.column(
            d,
            (config.num_attention_heads + 2 * config.num_query_groups) * d_k,
            config=config,
            init_method=config.init_method,
            bias=config.add_qkv_bias,
            gather_output=False,
            disable_grad_reduce=has_gate_projection(config),
            tp_group=pg_collection.tp,
        )
        self.linear_gate = build_gate_projection(config, pg_collection)
        if self.linear_gate is not None:  # the gate projection communicates for both
            self.linear_qkv.sequence_parallel = False
        self.head_gate = build_head_gate(config, pg_collection)
        gates_result = self.gsa.projection_gate
        self.projection_gate = ReplicatedGate(config, pg_collection, d, False) if gates_result else None
        transform = self.gsa.output_transform
        self.output_layernorm = HeadNorm(config, pg_collection) if transform == "rms_norm" else None
        self.linear_proj = config.linears.row(
            config.num_attention_heads * d_k,
            d,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=pg_collection.tp,
        )
        # The names end in layernorm, so that megatron-core sums their gradients over the tensor-parallel ranks.
        self.q_layernorm = RMSNorm(config, d_k, config.layernorm_epsilon) if config.qk_layernorm else None
        self.k_layernorm = RMSNorm(config, d_k, config.layernorm_epsilon) if config.qk_layernorm else None
        has_indexer = self.gsa.attention == "sparse" and self.leads_group
        self.indexer = Indexer(config, pg_collection, context.indexer_rotary) if has_indexer else None
        fused = context.implementation == "triton"
        self.variance = VarianceTracker(self.linear_qkv.weight.device, fused) if has_indexer else None
        self.over_chunks = AttentionOverChunks(
            self.gsa,
            context.implementation,
            context.dense_attention,
            context.captured,
            self.cut,
            pg_collection.tp,
            pg_collection.cp,
            self.runtime,
            self.layer,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, in the shape of `hidden_states`, and no bias.

        Args:
            hidden_states: the layer's normalised input, [L, B, d] ([L / tp, B, d] under sequence parallelism).
            attention_mask: document ids of the whole packed sequences [B, L * cp]; None: one document per sequence.
            unused: megatron-core's other arguments (inference, other packing formats).
        """
        attention_pass = self.runtime.pass_of_this_forward()
        gates = projection_gate = None
        gathered = not self.config.sequence_parallel
        if self.projection_gate is not None:
            projection_gate = self.projection_gate(hidden_states)
        if self.linear_gate is not None:
            gates, hidden_states = self.linear_gate(hidden_states)
            gathered = True
        elif self.head_gate is not None:
            gates = self.head_gate(hidden_states)
        with_grad = torch.is_grad_enabled()

        @cache  # the selection calls this before the host may wait; without a selection it is called below
        def project() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
            with trace_span("attention"), torch.set_grad_enabled(with_grad):
                return self._project(hidden_states, gates, rotary_pos_emb)

        if gates is not None and attention_pass.measures:
            places = self.over_chunks.sampled_tokens(len(gates), attention_mask, attention_pass)
            sampled = gates.detach()[places]
            bins = self.runtime.once(attention_mask, "gate_bins", lambda: gate_bins(sampled.device))
            self.runtime.stats.record(self.layer, gate_statistics(sampled, self.config, bins))
        indexed = selections = None
        if attention_pass.uses_indexer:
            if self.indexer is not None and self.variance is not None:
                self.runtime.shared_selection = None  # free its memory before the next selection
                with trace_span("indexer"):
                    hidden = hidden_states.detach()
                    if not gathered:
                        hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
                    with attention_pass.indexer_graph():
                        indexed = self.indexer(hidden)
                        indexed = indexed._replace(keys=gather_tokens(indexed.keys, self.cut, self.groups.cp))
                with trace_span("selection"):
                    self.runtime.shared_selection = self.over_chunks.select(
                        self.indexer, indexed, self.variance, attention_mask, attention_pass, project
                    )
            selections = self.runtime.shared_selection
        q, k, v, output_gate = project()
        core_gates = has_paper_form(self.gsa)
        projected = Projected(q, k, v, output_gate if core_gates else None, attention_mask)
        if indexed is not None:
            projected = projected._replace(**indexed._asdict())

        attend = partial(self.over_chunks.attend, indexer=self.indexer)
        if self.recompute_core and attention_pass.has_graph:
            twice = _RecomputedAttention(attend, selections, attention_pass)
            out = tensor_parallel.checkpoint(twice, False, *projected)
        else:
            out = attend(projected, selections=selections, attention_pass=attention_pass)
        if output_gate is not None and not core_gates:
            out = apply_gate(out, output_gate.flatten(2, 3), self.gsa)
        elif self.output_layernorm is not None:
            out = self.output_layernorm(out)
        elif self.gsa.output_transform == "silu":
            out = torch.nn.functional.silu(out)
        result, _ = self.linear_proj(out.flatten(2).transpose(0, 1).contiguous())
        if projection_gate is not None:
            result = apply_gate(result, projection_gate, self.gsa)
        return result, None

    def _project(
        self,
        hidden_states: torch.Tensor,
        gates: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return Q, K and V after their gates, and the logits of G1.

        The shape of Q is [B, L, n_h, d_k]. K and V are [B, L, n_kv, d_k]. The logits are [B, L, n_kv, n_h / n_kv, d_k],
        or None if the model has no G1.
        """
        qkv, _ = self.linear_qkv(hidden_states)
        if self.heads_op is not None:
            assert isinstance(rotary_pos_emb, torch.Tensor)
            return self.heads_op(
                qkv,
                gates,
                *self.runtime.rotary_tables(rotary_pos_emb, self.rotary_magnitude),
                kv_heads=self.local_kv_heads,
                value_gate=self.gsa.value_gate,
                output_gate=self.gsa.output_gate,
            )

        logits = GateLogits() if gates is None else split_gate_logits(gates, self.config)
        d_k = self.config.kv_channels
        per_group = qkv.unflatten(-1, (-1, (self.heads_per_group + 2) * d_k))
        q, k, v = per_group.split([self.heads_per_group * d_k, d_k, d_k], -1)
        q = q.unflatten(-1, (self.heads_per_group, d_k)).flatten(2, 3)
        if logits.value is not None:
            v = apply_gate(v, logits.value, self.gsa)  # eq. 9
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        # G3 and G4 follow the norms, which would remove the scale of a gate.
        if logits.key is not None:
            k = apply_gate(k, logits.key, self.gsa)
        if logits.query is not None:
            q = apply_gate(q, logits.query.flatten(2, 3), self.gsa)
        if rotary_pos_emb is not None:
            of_both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            how = {"config": self.config, "mscale": self.rotary_magnitude, "cp_group": self.groups.cp}
            q, k = (apply_rotary_pos_emb(x, angles, **how) for x, angles in zip((q, k), of_both, strict=True))
        output_gate = None if logits.output is None else logits.output.transpose(0, 1)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), output_gate


class _RecomputedAttention:
    """Calls `attend` for activation checkpointing: in the forward pass without a graph, then in the backward pass.

    The call in the backward pass also drops this object's reference to the selections. Otherwise, the autograd node
    would keep the selections in memory until the schedule drops the loss of the micro-batch.
    """

    def __init__(
        self, attend: Callable[..., torch.Tensor], selections: list[Any] | None, attention_pass: AttentionPass
    ) -> None:
        first = replace(attention_pass, will_recompute=True)
        self._attend, self._calls = attend, [(selections, first), (selections, attention_pass)]

    def __call__(self, *projected: torch.Tensor) -> torch.Tensor:
        selections, attention_pass = self._calls.pop(0)
        return self._attend(Projected(*projected), selections=selections, attention_pass=attention_pass)
