"""Define Gated Sparse Attention models by the conventions of transformers.

A layer computes these steps, for a query t with budget k_t and selected keys S_t:

    h -> Q, K, V -> value gate G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t
      -> softmax over S_t -> output gate G1 -> W_O

With `attn_implementation` "eager" or "sdpa", the model needs only torch and transformers, but it makes tensors of the
shape [queries, keys]. With "gsa", it runs the kernels of the package gsa_kernels on a CUDA device.
"""

import copy
from collections.abc import Sequence
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
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_gsa import GSAAttention, GSARMSNorm, GSARotaryEmbedding
from .configuration_gsa import GSAConfig
from .experts_gsa import GSAExperts, GSARouter, GSASparseMLP
from .gates_gsa import GSAGateBias
from .indexer_gsa import GSAIndexer, check_that_it_learns, with_indexer_loss
from .kernel_pass_gsa import KernelMemory, make_kernel_pass
from .token_order_gsa import token_numbers

CACHE_ARGUMENT = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""The name of the cache in arguments and outputs, which depends on the version of transformers."""


@dataclass
class GSAModelOutputWithPast(BaseModelOutputWithPast):
    indexer_loss: torch.Tensor | None = None
    """fp32, 0-d: the KL divergence, averaged over queries and layers with an indexer; None if not requested."""


@dataclass
class GSACausalLMOutputWithPast(CausalLMOutputWithPast):
    indexer_loss: torch.Tensor | None = None
    """The indexer loss of `GSAModelOutputWithPast`. `loss` includes `indexer_loss_coef` times the indexer loss."""


class GSAMLP(nn.Module):
    def __init__(self, config: GSAConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GSADecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GSAConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = GSAAttention(config, layer_idx)
        self.mlp = _feed_forward(config, layer_idx)
        self.input_layernorm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)
        sizes = (config.hidden_size, config.rms_norm_eps)
        self.attention_output_norm = GSARMSNorm(*sizes) if config.sandwich_norm else nn.Identity()
        self.mlp_output_norm = GSARMSNorm(*sizes) if config.sandwich_norm else nn.Identity()

    def forward(
        self, hidden_states: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns the output [B, L, d], the selection and the indexer loss. Arguments as for `GSAAttention`."""
        out, _, selection, loss = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.attention_output_norm(out)
        out = self.mlp_output_norm(self.mlp(self.post_attention_layernorm(hidden_states)))
        return hidden_states + out, selection, loss


def _feed_forward(config: GSAConfig, layer_idx: int) -> nn.Module:
    if config.num_experts == 0 or layer_idx in (config.mlp_only_layers or ()):
        return GSAMLP(config, config.intermediate_size)
    width = config.shared_expert_intermediate_size
    return GSASparseMLP(config, GSAMLP(config, width) if width else None)


class GSAPreTrainedModel(PreTrainedModel):
    config: GSAConfig
    config_class = GSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GSADecoderLayer"]  # noqa: RUF012 - as transformers declares it
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["variance_ema", "e_score_correction_bias"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": GSADecoderLayer, "attentions": GSAAttention}  # noqa: RUF012

    def __init__(self, config: GSAConfig) -> None:
        config.validate()  # `from_pretrained` sets fields without validation
        super().__init__(config)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True. transformers would look for its decorator in this file, but the experts are in another file."""
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GSAGateBias):
            init.zeros_(module.bias)
        if isinstance(module, GSAExperts):
            init.normal_(module.gate_up_proj, std=self.config.initializer_range)
            init.normal_(module.down_proj, std=self.config.initializer_range)
        if isinstance(module, GSARouter):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.e_score_correction_bias is not None:
                init.zeros_(module.e_score_correction_bias)
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
        self.indexer_rotary_emb = (
            GSARotaryEmbedding(rotary_config_of_indexer(config)) if config.indexer_rope else None
        )
        self.kernel_memory = KernelMemory()
        self.gradient_checkpointing = False
        # DistributedDataParallel would wait for gradients, which indexers without a loss never get.
        if not config.indexer_loss_coef:
            for module in self.modules():
                if isinstance(module, GSAIndexer):
                    module.requires_grad_(False)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        output_indexer_loss: bool | None = None,
        selections: Sequence[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> GSAModelOutputWithPast:
        r"""
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Positions of the tokens. If unset and `attention_mask` is 2-d, positions count from the first real token
            of each sequence.
        past_key_values, cache (`Cache`, *optional*):
            Two names for one argument.
        output_indexer_loss (`bool`, *optional*):
            If True, return the indexer loss with its graph, for the caller to add. By default, in training, backward
            through `last_hidden_state` adds the gradient of `config.indexer_loss_coef` times the indexer loss.
        selections (`list[torch.BoolTensor]` of shape `(batch_size, sequence_length, keys)`, *optional*):
            For each layer with an indexer, the keys that each query attends to, in place of the indexer's choice. Keys
            that are not causal are ignored. If none of a query's keys is causal, the query keeps the indexer's choice.
        """
        coefficient = self.config.indexer_loss_coef
        joins = output_indexer_loss is None and self.training and coefficient > 0 and torch.is_grad_enabled()
        output_indexer_loss = joins or bool(output_indexer_loss)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass one of input_ids and inputs_embeds")
        cache = cache if cache is not None else past_key_values
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if isinstance(attention_mask, dict):  # `generate` prepares equal masks for all kinds of layers
            attention_mask = next(iter(attention_mask.values()))
        visible = kernel_pass = None
        if self.config._attn_implementation == "gsa":
            arguments = (inputs_embeds, attention_mask, position_ids, cache)
            kernel_pass = make_kernel_pass(self.config, *arguments, self.kernel_memory)
            if selections is not None and kernel_pass.decodes:
                raise ValueError(
                    "selections are passed with one token, a cache and attn_implementation 'gsa'; pass use_cache=False"
                )
        if position_ids is None:
            position_ids = token_numbers(inputs_embeds, attention_mask, cache)
        if kernel_pass is None:
            visible = self._visible_keys(inputs_embeds, attention_mask, position_ids, cache)
        position_ids = position_ids.expand(inputs_embeds.shape[0], -1)
        hidden_states = inputs_embeds
        shared: dict[str, Any] = {
            "attention_mask": visible,
            "position_embeddings": self.rotary_emb(hidden_states, position_ids=position_ids),
            "indexer_embeddings": None,
            "kernel_pass": kernel_pass,
            "cache": cache,
            "output_indexer_loss": output_indexer_loss,
        }
        if self.indexer_rotary_emb is not None:
            shared["indexer_embeddings"] = self.indexer_rotary_emb(hidden_states, position_ids=position_ids)
        selection, losses = None, []
        leaders = [n for n in range(len(self.layers)) if self.config.indexer_layer(n) == n]
        if selections is not None and len(selections) != len(leaders):
            raise ValueError(
                f"selections has {len(selections)} tensors; pass {len(leaders)}, one for each indexer"
            )
        given = {} if selections is None else dict(zip(leaders, selections, strict=True))
        for number, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            if number in leaders:
                selection = given.get(number)
            hidden_states, selection, loss = layer(hidden_states, selection=selection, **shared, **kwargs)
            if loss is not None:
                losses.append(loss)
        held: dict[str, Any] = {CACHE_ARGUMENT: cache}
        hidden_states, indexer_loss = self.norm(hidden_states), torch.stack(losses).mean() if losses else None
        if output_indexer_loss and self.training and coefficient > 0 and torch.is_grad_enabled():
            check_that_it_learns(indexer_loss, coefficient)
        if joins:
            assert indexer_loss is not None
            hidden_states = with_indexer_loss(hidden_states, indexer_loss, float(coefficient))
            indexer_loss = indexer_loss.detach()  # for display; a caller that adds it must not count it twice
        return GSAModelOutputWithPast(
            last_hidden_state=hidden_states,
            indexer_loss=indexer_loss,
            **held,
        )

    def _visible_keys(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Return the causal keys of each query, without padding and other documents: bool [B, 1, L, Lk]."""
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            allow_is_causal_skip=False,  # the indexer needs the mask
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

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Let `generate` compile steps with static caches, except with the kernels, which are already compiled."""
        if self.config._attn_implementation == "gsa":
            return False
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[misc]

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
        output_indexer_loss: bool | None = None,
        **kwargs: Any,
    ) -> GSACausalLMOutputWithPast:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Token ids, which the model shifts by one. The loss ignores labels of -100. In training, `loss` is the
            language model's loss plus `config.indexer_loss_coef` times the indexer loss. Without labels, backward
            through the logits adds the gradient of the weighted indexer loss.
        output_indexer_loss (`bool`, *optional*):
            If True, return the indexer loss with its graph, for the caller to add. Not allowed with labels.
        """
        coefficient = self.config.indexer_loss_coef
        if labels is not None and output_indexer_loss is not None:
            raise ValueError(
                f"output_indexer_loss is {output_indexer_loss} with labels, whose loss has it in by indexer_loss_coef; "
                "leave one of the two out"
            )
        learns = labels is not None and self.training and coefficient > 0 and torch.is_grad_enabled()
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_indexer_loss=True if learns else output_indexer_loss,
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


def rotary_config_of_indexer(config: GSAConfig) -> GSAConfig:
    """Return the configuration of the indexer's rotary embedding, which rotates all channels of an indexer head.

    The attention factor is 1, because it is meant for softmax logits."""
    config = copy.deepcopy(config)
    config.head_dim = config.index_head_dim
    own = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    config.rope_parameters = {**(config.rope_parameters or {}), **own}
    return config


def _share_of_batch(
    labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None
) -> float | torch.Tensor:
    """Return this forward pass's share of the optimizer step's labels, or 1 if `num_items_in_batch` is None. A step may
    have several passes. Trainer divides the language-model loss of each pass by `num_items_in_batch`, the number of
    labels in the step. The returned share scales the indexer loss to match."""
    if num_items_in_batch is None:
        return 1.0
    return (labels[:, 1:] != -100).sum() / num_items_in_batch


# Trainer's label smoothing shifts labels only for classes in this list. `AutoModelForCausalLM.register` does not extend
# the list. Without the shift the model would learn to repeat each token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("gsa", GSAForCausalLM.__name__)

__all__ = ["GSAForCausalLM", "GSAModel", "GSAPreTrainedModel"]
