"""Gated Sparse Attention models, by the conventions of transformers' own models.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

Runs on torch and transformers alone, with tensors of [queries, keys], as `attn_implementation` "eager" or "sdpa". With
"gsa" the kernels of the package gsa_kernels run, on a CUDA device.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_gsa import GSAConfig
from .indexer_gsa import GSAIndexer, indexer_loss, mean_attention, rotate, select_keys

CACHE_ARGUMENT = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""What this version of transformers calls the cache in arguments and outputs; `cache` since 5.20 or so."""


@dataclass
class GSAModelOutputWithPast(BaseModelOutputWithPast):
    indexer_loss: torch.Tensor | None = None
    """fp32, 0-d: mean KL over the queries and the layers that have an indexer; None where it was not asked for."""


@dataclass
class GSACausalLMOutputWithPast(CausalLMOutputWithPast):
    indexer_loss: torch.Tensor | None = None
    """As in `GSAModelOutputWithPast`; `loss` has it in, times `indexer_loss_coef`."""


class GSARMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class GSARotaryEmbedding(nn.Module):
    """Cosines and sines of positions, for the first `partial_rotary_factor` of a head's channels."""

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
        """Positions [B, L] -> [B, L, rotated channels] twice, in the dtype of x."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


class GSAMLP(nn.Module):
    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sigmoid_gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(logits), calculated in fp32."""
    return (x.float() * torch.sigmoid(logits.float())).to(x.dtype)


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
    """Query [B, H, L, D], key and value [B, Hkv, Lk, D], mask bool [B, 1, L, Lk] -> [B, L, H, D], probabilities."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    weights = nn.functional.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class GSAAttention(nn.Module):
    """Attention of one layer: dense, or sparse over what its own or an earlier layer's indexer selected."""

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
        self.value_gate_proj = nn.Linear(hidden, keys) if config.value_gate else None
        self.output_gate_proj = nn.Linear(hidden, queries) if config.output_gate else None
        self.indexer = GSAIndexer(config) if leader == layer_idx else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
        indexer_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        selection: torch.Tensor | None = None,
        output_indexer_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """
        Args:
            hidden_states: [B, L, d], normalised
            position_embeddings: cosines and sines of the rotary embedding
            attention_mask: bool [B, 1, L, Lk], the keys that each query may see
            position_ids: int64 [B, L]
            indexer_embeddings: cosines and sines for the indexer, where it has a rotary embedding
            selection: bool [B, L, Lk], what an earlier layer selected for this one, too

        Returns:
            output [B, L, d]; probabilities, by "eager" only; the selection, for later layers; the indexer loss.
        """
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        v = self.v_proj(hidden_states)
        if self.value_gate_proj is not None:
            v = sigmoid_gate(v, self.value_gate_proj(hidden_states))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (x[:, None] for x in position_embeddings)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        v = v.view(shape).transpose(1, 2)

        slots = torch.arange(shape[1], device=q.device)
        if cache is not None:
            slots = slots + cache.get_seq_length(
                self.layer_idx
            )  # before the update, which may move it in place
            k, v = cache.update(k, v, self.layer_idx)
        scores = leaders = None
        if self.indexer is not None:
            if self.config.index_block_size > 1:
                leaders = slots - position_ids % self.config.index_block_size
            scores = self._score(hidden_states, indexer_embeddings, cache, leaders, output_indexer_loss)
            selection = select_keys(self.indexer, self.config, scores, attention_mask[:, 0], leaders)
        attended = attention_mask
        if self.is_sparse:
            assert selection is not None
            attended = selection[:, None]

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attention_interface(self, q, k, v, attended, scaling=self.scaling, **kwargs)
        loss = None
        if output_indexer_loss and self.indexer is not None:
            assert scores is not None
            if k.shape[2] != shape[1]:
                raise ValueError(
                    f"the cache holds {k.shape[2]} keys for {shape[1]} queries with the indexer loss; pass "
                    "use_cache=False in training"
                )
            probs = mean_attention(q, k, attended[:, 0], self.scaling)
            beta = self.indexer.inverse_temperature()
            loss = indexer_loss(scores, probs, attended[:, 0], attention_mask[:, 0], leaders, beta)
        out = out.reshape(*shape[:2], -1)
        if self.output_gate_proj is not None:
            out = sigmoid_gate(out, self.output_gate_proj(hidden_states))
        return self.o_proj(out), weights, selection, loss

    def _score(
        self,
        hidden_states: torch.Tensor,
        embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        cache: Cache | None,
        leaders: torch.Tensor | None,
        learns: bool,
    ) -> torch.Tensor:
        """The scores of every query, fp32 [B, L, Lk], in the graph where the indexer learns."""
        assert self.indexer is not None
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            queries, keys, weights = self.indexer(hidden_states, embeddings)
            rows = self.indexer.cache_row(queries, keys, weights)
            if cache is not None:
                rows = cache.update_indexer(rows, self.layer_idx)
            return self.indexer.scores(self.indexer.from_cache(rows, queries, weights, leaders))


class GSADecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GSAConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = GSAAttention(config, layer_idx)
        self.mlp = GSAMLP(config)
        self.input_layernorm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """[B, L, d] -> the same, the selection and the indexer loss. Arguments as for `GSAAttention`."""
        out, _, selection, loss = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + out
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), selection, loss


class GSAPreTrainedModel(PreTrainedModel):
    config: GSAConfig
    config_class = GSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GSADecoderLayer"]  # noqa: RUF012 - as transformers declares it
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["variance_ema"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": GSADecoderLayer, "attentions": GSAAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GSAIndexer):
            init.zeros_(module.variance_ema)
            if module.score_bias is not None:
                init.zeros_(module.score_bias)
            if module.log_inverse_temperature is not None:
                init.zeros_(module.log_inverse_temperature)


class GSAModel(GSAPreTrainedModel):
    def __init__(self, config: GSAConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [GSADecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GSARotaryEmbedding(config)
        self.indexer_rotary_emb = GSARotaryEmbedding(_of_indexer(config)) if config.index_rope else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        output_indexer_loss: bool = False,
        **kwargs: Any,
    ) -> GSAModelOutputWithPast:
        r"""
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Counted from the first real token of each sequence if unset and `attention_mask` is 2-d. Blocks of queries
            that share a selection are aligned to them.
        past_key_values, cache (`Cache`, *optional*):
            Two names of one argument.
        output_indexer_loss (`bool`, *optional*):
            Calculate the indexer loss, with its graph.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass one of input_ids and inputs_embeds")
        cache = cache if cache is not None else past_key_values
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, cache)

        visible = self._visible_keys(inputs_embeds, attention_mask, position_ids, cache)
        position_ids = position_ids.expand(inputs_embeds.shape[0], -1)
        hidden_states = inputs_embeds
        shared: dict[str, Any] = {
            "position_embeddings": self.rotary_emb(hidden_states, position_ids=position_ids),
            "indexer_embeddings": None,
        }
        if self.indexer_rotary_emb is not None:
            shared["indexer_embeddings"] = self.indexer_rotary_emb(hidden_states, position_ids=position_ids)
        selection, losses = None, []
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states, selection, loss = layer(
                hidden_states,
                attention_mask=visible,
                position_ids=position_ids,
                cache=cache,
                selection=selection,
                output_indexer_loss=output_indexer_loss,
                **shared,
                **kwargs,
            )
            if loss is not None:
                losses.append(loss)
        held: dict[str, Any] = {CACHE_ARGUMENT: cache}
        return GSAModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            indexer_loss=torch.stack(losses).mean() if losses else None,
            **held,
        )

    def _visible_keys(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        position_ids: torch.Tensor,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Causal keys of the query's own sequence that are no padding: bool [B, 1, L, Lk]."""
        if isinstance(attention_mask, dict):  # prepared by `generate`, the same for all kinds of layers
            attention_mask = next(iter(attention_mask.values()))
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            allow_is_causal_skip=False,  # the indexer needs it
            **{CACHE_ARGUMENT: cache},
        )
        mask = mask if mask.dtype == torch.bool else mask >= 0
        return mask.expand(inputs_embeds.shape[0], -1, -1, -1)


class GSAForCausalLM(GSAPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GSAConfig) -> None:
        super().__init__(config)
        self.model = GSAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> GSACausalLMOutputWithPast:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Next tokens are taken from here; -100 counts in no loss. In training, where `config.indexer_loss_coef` is
            above 0, the loss is that of the language model plus `indexer_loss_coef` times the indexer's.
        """
        coefficient = self.config.indexer_loss_coef
        learns = labels is not None and self.training and coefficient > 0 and torch.is_grad_enabled()
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_indexer_loss=learns,
            **{CACHE_ARGUMENT: cache if cache is not None else past_key_values},
            **{name: value for name, value in kwargs.items() if name != "num_items_in_batch"},
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
            if outputs.indexer_loss is not None:
                share = _share_of_batch(labels, kwargs.get("num_items_in_batch"))
                loss = loss + coefficient * share * outputs.indexer_loss
        return GSACausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            indexer_loss=outputs.indexer_loss,
            **{CACHE_ARGUMENT: outputs.get(CACHE_ARGUMENT)},
        )


def _positions(inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache | None) -> torch.Tensor:
    """[B or 1, L]: from the first real token of each sequence on, where a 2-d mask says which that is."""
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    past = cache.get_seq_length() if cache is not None else 0
    return (torch.arange(length, device=inputs_embeds.device) + past)[None]


def _of_indexer(config: GSAConfig) -> GSAConfig:
    """The configuration of the indexer's rotary embedding: all channels of its heads."""
    config = copy.deepcopy(config)
    config.head_dim = config.index_head_dim
    config.rope_parameters = {**(config.rope_parameters or {}), "partial_rotary_factor": 1.0}
    return config


def _share_of_batch(
    labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None
) -> float | torch.Tensor:
    """What this forward pass is of an optimizer step's batch. 1 where the caller averages over forward passes itself;
    Trainer passes the number of labels of all of them, by which the language model's loss is divided, too."""
    if num_items_in_batch is None:
        return 1.0
    return (labels[:, 1:] != -100).sum() / num_items_in_batch


__all__ = ["GSAForCausalLM", "GSAModel", "GSAPreTrainedModel"]
