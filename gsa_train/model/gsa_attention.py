"""Gated Sparse Attention as a megatron-core attention module, in the order of the paper's equations.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

Shapes: L tokens of the sequence, B sequences, n heads of this tensor-parallel rank, d_k head size. megatron-core
hands activations over as [L, B, ...]; from the indexer to G1 tensors are batch first, as gsa_kernels wants them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

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
from gsa_train.losses import inject_loss
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.gates import build_gate_projection, split_gate_logits
from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.mcore_config import GSATransformerConfig
from gsa_train.model.norm import RMSNorm
from gsa_train.model.runtime import AttentionRuntime


@dataclass(frozen=True)
class AttentionContext:
    """What a layer needs beside its inputs; goes through the layer spec's params."""

    runtime: AttentionRuntime
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
        self.runtime = context.runtime
        self.recompute_core = context.recompute_core
        self.layer = layer_number - 1
        """Index in the whole model, from 0."""
        self.leads_group = self.layer % self.gsa.selection_reuse == 0
        """False: this layer takes the selection of an earlier one."""
        self.heads_per_group = config.num_attention_heads // config.num_query_groups

        d, d_k = config.hidden_size, config.kv_channels
        self.linear_qkv = ColumnParallelLinear(
            d,
            (config.num_attention_heads + 2 * config.num_query_groups) * d_k,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=pg_collection.tp,
        )
        self.linear_gate = build_gate_projection(config, pg_collection)
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
            attention_mask: document ids [B, L] of packed sequences, or None for one document each.
            rotary_pos_emb: angles of the rotary embedding on Q and K.
            unused: what megatron-core passes to every attention (inference, packing formats we do not use).
        """
        q, k, v, output_gate = self._project(hidden_states, rotary_pos_emb)
        projections = self._index(hidden_states) if self.runtime.uses_indexer else None
        selected = (
            self._select(projections, attention_mask, q.shape[1]) if self.runtime.uses_indexer else None
        )

        queries, keys, weight_logits = projections or (None, None, None)
        core_inputs = (q, k, v, queries, keys, weight_logits, selected, attention_mask)
        if self.recompute_core and torch.is_grad_enabled():
            out = tensor_parallel.checkpoint(self._attend, False, *core_inputs)
        else:
            out = self._attend(*core_inputs)

        if output_gate is not None:
            out = sigmoid_gate(out, output_gate.transpose(0, 1))  # eq. 10
        return self.linear_proj(out.flatten(2).transpose(0, 1).contiguous())

    def _project(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Q [B, L, n_h, d_k], K and gated V [B, L, n_kv, d_k], logits of G1 [L, B, n_h, d_k] or None."""
        d_k = self.config.kv_channels
        qkv, _ = self.linear_qkv(hidden_states)
        per_group = qkv.unflatten(-1, (-1, (self.heads_per_group + 2) * d_k))
        q, k, v = per_group.split([self.heads_per_group * d_k, d_k, d_k], -1)
        q = q.unflatten(-1, (self.heads_per_group, d_k)).flatten(2, 3)
        value_gate = output_gate = None
        if self.linear_gate is not None:
            logits, _ = self.linear_gate(hidden_states)
            value_gate, output_gate = split_gate_logits(logits, self.config)
            self._measure_gates(value_gate, output_gate)
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
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), output_gate

    def _index(self, hidden_states: torch.Tensor) -> IndexerProjections | None:
        """The indexer's projections of all tokens, cut off from the graph of the language model."""
        if self.indexer is None:
            return None
        hidden = hidden_states.detach()
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        with self._indexer_graph():
            return self.indexer(hidden)

    def _indexer_graph(self) -> torch.enable_grad | nullcontext[None]:
        """In the warm-up the base runs under `no_grad`, and only the indexer gets a graph."""
        return torch.enable_grad() if self.runtime.local_backward else nullcontext()

    def _select(
        self, projections: IndexerProjections | None, document_ids: torch.Tensor | None, length: int
    ) -> torch.Tensor | None:
        """S_t of every query, bool [B, L, L]; None where a dense pass measures nothing.

        Outside of what is recomputed: a backward pass that selected anew could differ from its forward pass.
        """
        runtime = self.runtime
        if self.indexer is None:
            return runtime.shared_selection
        assert projections is not None
        assert self.variance is not None
        counted = runtime.counts_this_pass()
        with torch.no_grad():
            device, block = projections.keys.device, self.gsa.selection_block
            rows = torch.arange(0, length, block, device=device)
            visible = visible_mask(length, query_positions=rows, document_ids=document_ids, device=device)
            scores = self.indexer.scores(projections, query_stride=block)
            _, variance = score_moments(scores, visible)
            if counted and not runtime.evaluating:
                self.variance.record(variance)
            if not (runtime.sparse or runtime.measuring):
                runtime.shared_selection = None
                return None
            budget = adaptive_budget(
                variance,
                self.variance.ema,
                visible.sum(-1),
                k_base=self.gsa.k_base,
                k_min=self.gsa.k_min,
                k_max=self.gsa.k_max,
                mode=self.gsa.adaptive_k,
            )
            selected = self._complete(select_top_k(scores, visible, budget), document_ids, length)
            if counted and runtime.measuring:
                self._measure_selection(selected, budget, variance, document_ids)
            runtime.shared_selection = selected
            return selected

    def _complete(self, chosen: torch.Tensor, document_ids: torch.Tensor | None, length: int) -> torch.Tensor:
        """Top-k of the selecting queries [B, R, L] -> S_t of all queries [B, L, L] (section 9)."""
        block, window = self.gsa.selection_block, self.gsa.local_window
        if block > 1:
            chosen = expand_block_selection(chosen, block, length)
        if window > 0:
            chosen = chosen | local_window_mask(length, window, device=chosen.device)
        if block > 1 or window > 0:
            chosen = chosen & visible_mask(length, document_ids=document_ids, device=chosen.device)
        return chosen

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        weight_logits: torch.Tensor | None,
        selected: torch.Tensor | None,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention [B, L, n_h, d_k] and, injected into its gradient, the indexer loss.

        A pure function of its arguments and the parameters, so that it can be recomputed.
        """
        runtime = self.runtime
        counted = runtime.counts_this_pass()
        measured = counted and runtime.measuring
        visible = visible_mask(q.shape[1], document_ids=document_ids, device=q.device)
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
        out = attention.out
        probs = attention.head_sum_probs
        if probs is not None:
            dist.all_reduce(probs, group=self.groups.tp)  # the target averages all heads of all ranks
        if measured:
            if dense_recall:
                assert probs is not None
                assert selected is not None
                recall = torch.where(selected, probs, 0).sum(-1) / self.config.num_attention_heads
                runtime.stats.add("recall", self.layer, recall)
            elif attention.recall is not None:
                runtime.stats.add("recall", self.layer, attention.recall)
            assert attention.sink is not None
            runtime.stats.add("first_token_attention", self.layer, attention.sink)
        if distils:
            assert queries is not None
            assert keys is not None
            assert weight_logits is not None
            assert probs is not None
            projections = IndexerProjections(queries, keys, weight_logits)
            with self._indexer_graph():
                kl = self._indexer_loss(projections, probs, mask)
                if runtime.local_backward:
                    (kl.sum() * runtime.kl_grad_scale).backward()
            if measured:
                runtime.stats.add("indexer_kl", self.layer, kl)
            if runtime.train_indexer and kl.requires_grad and not runtime.local_backward:
                out = inject_loss(out, kl.sum(), runtime.kl_grad_scale)
        return out

    def _indexer_loss(
        self, projections: IndexerProjections, probs: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """KL(p_t || softmax over the support of beta * I[t, :]) of each scored query, [B, R] (eqs. 14, 15).

        The support is what the query attended to: all visible keys in a dense phase, S_t in a sparse one.
        """
        assert self.indexer is not None
        block = self.gsa.selection_block
        support = mask[:, ::block]
        target = renormalise_target(sum_over_blocks(probs, block), support)
        scores = self.indexer.scores(projections, query_stride=block)
        return indexer_kl(scores, target, support, self.indexer.inverse_temperature())

    def _measure_gates(self, value_gate: torch.Tensor | None, output_gate: torch.Tensor | None) -> None:
        if not (self.runtime.measuring and self.runtime.counts_this_pass()):
            return
        for name, logits in (("value_gate", value_gate), ("output_gate", output_gate)):
            if logits is not None:
                opening = logits.detach().float().sigmoid()
                self.runtime.stats.add(f"{name}_mean", self.layer, opening)
                self.runtime.stats.add(f"{name}_low", self.layer, opening < 0.1)

    def _measure_selection(
        self,
        selected: torch.Tensor,
        budget: torch.Tensor,
        variance: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> None:
        stats, layer = self.runtime.stats, self.layer
        stats.add("k_mean", layer, budget)
        stats.maximum("k_max", layer, budget.max())
        stats.maximum("k_min", layer, -budget.min())
        stats.add("variance", layer, variance)
        assert self.variance is not None
        stats.add("variance_ema", layer, self.variance.ema)
        stats.add("adjacent_overlap", layer, adjacent_overlap(selected))
        stats.add("union_ratio_32", layer, union_ratio(selected, 32))
        # The exact expectation for as many keys drawn at random: each visible key is as likely as any other,
        # so the expected share of the probability is the share of the keys.
        visible = visible_mask(selected.shape[-1], document_ids=document_ids, device=selected.device)
        stats.add("random_recall", layer, selected.sum(-1) / visible.sum(-1))
        stats.add("selected_keys", layer, selected.sum(-1))
