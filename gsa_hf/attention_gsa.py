"""Compute the attention of one layer: projections, gates, rotary embedding, and attention over the selected keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_gsa import GSAConfig
from .gates_gsa import gate, gate_heads, gate_rows, has_paper_form, make_gate
from .indexer_gsa import GSAIndexer, indexer_loss, mean_attention, rotate, select_keys
from .kernel_pass_gsa import KernelPass
from .kernels_gsa import KernelCall


class GSARMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class GSARotaryEmbedding(nn.Module):
    """Computes cosines and sines of positions, for the first `partial_rotary_factor` of a head's channels."""

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        assert config.rope_parameters is not None
        self.rope_type = config.rope_parameters["rope_type"]
        functions = {"default": self.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
        inv_freq, self.attention_scaling = functions[self.rope_type](config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: GSAConfig, device: torch.device | None = None, **_: Any
    ) -> tuple[torch.Tensor, float]:
        assert config.rope_parameters is not None
        channels = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, L, rotated channels] of positions [B, L], in the dtype of x."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, L, H, D] and the probabilities [B, H, L, Lk].

    The query is [B, H, L, D], key and value are [B, Hkv, Lk, D], and the mask is bool [B, 1, L, Lk]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    weights = nn.functional.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class GSAAttention(nn.Module):
    """In a dense layer, attends to all causal keys. In a sparse layer, attends to the keys that an indexer selected, in
    this layer or in an earlier one."""

    def __init__(self, config: GSAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        leader = config.indexer_layer(layer_idx)
        self.is_sparse = leader is not None
        hidden, bias = config.hidden_size, config.qkv_bias
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = GSARMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = GSARMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        of_queries = gate_rows(config, config.num_attention_heads)
        of_keys = gate_rows(config, config.num_key_value_heads)
        self.value_gate_proj = make_gate(config, of_keys) if config.value_gate else None
        self.output_gate_proj = make_gate(config, of_queries) if config.output_gate else None
        self.key_gate_proj = make_gate(config, of_keys) if config.key_gate else None
        self.query_gate_proj = make_gate(config, of_queries) if config.query_gate else None
        self.projection_gate_proj = make_gate(config, hidden) if config.projection_gate else None
        self.o_norm = None
        if config.output_transform == "rms_norm":
            self.o_norm = GSARMSNorm(self.head_dim, config.rms_norm_eps)
        self.indexer = GSAIndexer(config) if leader == layer_idx else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        indexer_embeddings: tuple[torch.Tensor, ...] | None = None,
        selection: Any = None,
        kernel_pass: KernelPass | None = None,
        output_indexer_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any, torch.Tensor | None]:
        """Attend from each token to its causal or selected keys.

        Args:
            hidden_states: [B, L, d], normalised
            position_embeddings: cosines and sines of the rotary embedding, [B, L, channels]
            attention_mask: bool [B, 1, L, Lk], the causal keys of each query; None with kernels
            indexer_embeddings: cosines and sines [B, L, DI], if the indexer has a rotary embedding
            selection: in a layer without an indexer, the keys that an earlier layer selected, bool [B, L, Lk] or a type
                of gsa_kernels. In a layer with an indexer, None, or keys that replace the indexer's choice.
            kernel_pass: the tokens' places in the cache; None without kernels

        Returns:
            the output [B, L, d], the probabilities (only with "eager"), the selection, and the indexer loss
        """
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = self.project(hidden_states, position_embeddings, shape)
        if kernel_pass is not None:
            # The kernels take one dtype. Under autocast the rotary embedding returns fp32.
            q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        tokens = rows = None
        if self.indexer is not None:
            with torch.set_grad_enabled(output_indexer_loss and torch.is_grad_enabled()):
                tokens = self.indexer(hidden_states, indexer_embeddings)
                rows = tokens.keys
                if cache is not None:
                    rows = cache.update_indexer(rows, self.layer_idx)
        logits = None if self.output_gate_proj is None else self.output_gate_proj(hidden_states)
        of_kernels = kernel_pass is not None and has_paper_form(self.config)

        interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if kernel_pass is not None:
            given = None if logits is None or not of_kernels else logits.view(shape)
            call = KernelCall(kernel_pass, tokens, rows, selection, given, output_indexer_loss)
            out, _ = interface(self, q, k, v, None, scaling=self.scaling, call=call)
            result = self.leave(out, None if of_kernels else logits, hidden_states)
            return result, None, call.selection, call.loss

        assert attention_mask is not None
        loss, given = None, selection
        attended = attention_mask
        dense = given is None and not output_indexer_loss and k.shape[2] < self.config.dense_below
        if self.indexer is not None and dense:
            selection = attention_mask[:, 0]
        elif self.indexer is not None:
            assert tokens is not None
            assert rows is not None
            visible = attention_mask[:, 0]
            with torch.set_grad_enabled(output_indexer_loss and torch.is_grad_enabled()):
                scores = self.indexer.scores(tokens._replace(keys=rows))
            selection = select_keys(self.indexer, self.config, scores, visible)
            if given is not None:
                given = given & visible
                selection = torch.where(given.any(-1, keepdim=True), given, selection)
            if output_indexer_loss:
                if shape[1] != k.shape[2]:
                    raise ValueError(
                        f"the cache holds {k.shape[2]} keys for {shape[1]} queries in training; pass use_cache=False"
                    )
                probs = mean_attention(q, k, selection, self.scaling)
                loss = indexer_loss(scores, probs, selection, visible, self.indexer.inverse_temperature())
        if self.is_sparse:
            attended = selection[:, None]
        out, weights = interface(self, q, k, v, attended, scaling=self.scaling, **kwargs)
        return self.leave(out, logits, hidden_states), weights, selection, loss

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        shape: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return Q [B, H, L, D], K and gated V [B, Hkv, L, D]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (projection(hidden_states).view(shape) for projection in projections)
        if self.value_gate_proj is not None:
            v = gate_heads(v, self.value_gate_proj(hidden_states), self.config)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.key_gate_proj is not None:
            k = gate_heads(k, self.key_gate_proj(hidden_states), self.config)
        if self.query_gate_proj is not None:
            q = gate_heads(q, self.query_gate_proj(hidden_states), self.config)
        cos, sin = (x[:, :, None] for x in position_embeddings)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def leave(
        self, out: torch.Tensor, logits: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Apply G1 and the output projection to the attention output [B, L, H, D], and return [B, L, d].

        Args:
            logits: the logits of G1, unless the kernels have applied G1
            hidden_states: the layer's input, for G5
        """
        if logits is not None:
            out = gate_heads(out, logits, self.config)
        if self.o_norm is not None:
            out = self.o_norm(out)
        elif self.config.output_transform == "silu":
            out = nn.functional.silu(out)
        result = self.o_proj(out.reshape(*out.shape[:2], -1))
        if self.projection_gate_proj is not None:
            result = gate(result, self.projection_gate_proj(hidden_states), self.config)
        return result
