"""Replace the attention of a loaded transformers model by Gated Sparse Attention, with new gates and indexers."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import PreTrainedModel

from .attention_gsa import GSAAttention, GSARotaryEmbedding
from .configuration_gsa import DENSE_LAYER, INDEXED_LAYER, GSAConfig
from .indexer_gsa import check_that_it_learns, with_indexer_loss
from .kernel_pass_gsa import KernelMemory, make_kernel_pass
from .modeling_gsa import CACHE_ARGUMENT, rotary_config_of_indexer

_WITH_MASKS_BY_TYPE = ("qwen2", "qwen3")
HOSTS = ("llama", "mistral", *_WITH_MASKS_BY_TYPE)
"""`model_type` of models whose attention can be replaced."""


def replace_attention_with_gsa(
    model: PreTrainedModel, config: GSAConfig, layers: Literal["all"] | Sequence[int] = "all"
) -> None:
    """Replace the attention of some layers in place. Projections and norms stay, gates and indexers are new.

    The model's caches then also hold the indexers' keys, and `generate` keeps working. Layers without gates and with
    `"full_attention"` in `config.layer_types` keep their outputs.

    Args:
        model: Llama, Mistral, Qwen2 or Qwen3, without sliding windows
        config: gates, indexer and selection; the model decides the sizes. `layer_types` with an entry for each of the
            model's layers chooses the sparse layers. By default all replaced layers are sparse.
        layers: numbers of the layers

    Raises:
        ValueError: a replacement is not possible; the error names field, value and remedy
    """
    host: Any = model.config
    base: Any = model.base_model
    if host.model_type not in HOSTS:
        raise ValueError(f"model_type is {host.model_type!r}; pass a model of {', '.join(HOSTS)}")
    count = host.num_hidden_layers
    chosen = list(range(count)) if layers == "all" else sorted(set(layers))
    if not all(isinstance(layer, int) and 0 <= layer < count for layer in chosen):
        raise ValueError(f"layers is {layers!r}; pass 'all' or numbers from 0 to {count - 1}")
    types = list(getattr(host, "layer_types", None) or [DENSE_LAYER] * count)
    merged = _merged(config, host, count)
    assert merged.layer_types is not None
    for layer in chosen:
        if types[layer] != DENSE_LAYER or getattr(host, "sliding_window", None) is not None:
            raise ValueError(
                f"layer {layer} is {types[layer]!r} with sliding_window {getattr(host, 'sliding_window', None)}; leave "
                "it out of layers, or load the model with sliding_window=None"
            )
        old = base.layers[layer].self_attn
        if isinstance(old, GSAAttention):
            raise ValueError(f"layer {layer} has Gated Sparse Attention already; leave it out of layers")
        attention = base.layers[layer].self_attn = ReplacedAttention(merged, host, layer, old)
        attention.loss_share = 1 / max(1, sum(merged.layer_types[each] == INDEXED_LAYER for each in chosen))
        types[layer] = merged.layer_types[layer]
    host.layer_types = types
    base.register_forward_pre_hook(_prepare_masks, with_kwargs=True)


def collected_indexer_loss(model: nn.Module) -> torch.Tensor:
    """Return the mean indexer loss of the replaced layers in the last forward pass, fp32, 0-d, for display.

    The loss exists in training with `indexer_loss_coef` above 0. The returned value has no gradient, because the
    model's backward pass already adds the gradient of the indexer loss.
    """
    losses = [
        module.indexer_loss
        for module in model.modules()
        if isinstance(module, ReplacedAttention) and module.indexer_loss is not None
    ]
    if not losses:
        raise ValueError(
            "no layer has an indexer loss; pass a configuration with indexer_loss_coef above 0 to "
            "replace_attention_with_gsa, and call the model in training with gradients"
        )
    return torch.stack(losses).mean()


class ReplacedAttention(GSAAttention):
    """Computes the attention for a decoder layer of another model."""

    def __init__(self, config: GSAConfig, host_config: Any, layer_idx: int, old: nn.Module) -> None:
        super().__init__(config, layer_idx)
        self.host_config = host_config
        rotary = config.indexer_rope and self.indexer is not None
        self.indexer_rotary_emb = GSARotaryEmbedding(rotary_config_of_indexer(config)) if rotary else None
        self.kernel_memory = KernelMemory()
        self.indexer_loss: torch.Tensor | None = None
        self.loss_share = 1.0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        weight = old.get_parameter("q_proj.weight")
        self.to(device=weight.device, dtype=weight.dtype)
        if self.indexer is not None and not config.indexer_loss_coef:
            self.indexer.requires_grad_(False)  # gets no gradient
        for name, module in old.named_children():
            setattr(self, name, module)
        self.train(old.training)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and probabilities. The decoder layer of transformers passes either cache argument."""
        cache = cache if cache is not None else past_key_values
        self.config._attn_implementation = self.host_config._attn_implementation
        visible = kernel_pass = None
        if self.config._attn_implementation == "gsa":
            kernel_pass = make_kernel_pass(
                self.config, hidden_states, attention_mask, None, cache, self.kernel_memory, self.layer_idx
            )
        else:
            visible = _visible(attention_mask, hidden_states, cache, self.layer_idx)
        position_ids = position_ids.expand(len(hidden_states), -1)
        embeddings = None
        if self.indexer_rotary_emb is not None:
            embeddings = self.indexer_rotary_emb(hidden_states, position_ids=position_ids)
        learns = self.training and self.config.indexer_loss_coef > 0 and torch.is_grad_enabled()
        out, weights, _, loss = super().forward(
            hidden_states,
            position_embeddings,
            visible,
            cache,
            indexer_embeddings=embeddings,
            kernel_pass=kernel_pass,
            output_indexer_loss=learns,
            **kwargs,
        )
        self.indexer_loss = None if loss is None else loss.detach()
        if learns and self.indexer is not None:
            check_that_it_learns(loss, self.config.indexer_loss_coef)
            assert loss is not None
            out = with_indexer_loss(out, loss, self.config.indexer_loss_coef * self.loss_share)
        return out, weights


def _merged(config: GSAConfig, host: Any, count: int) -> GSAConfig:
    """Return `config` with the sizes of the model whose attention is replaced."""
    if config.index_topk_freq != 1:
        raise ValueError(
            f"index_topk_freq is {config.index_topk_freq}; pass 1: the layers of another model hand on no selection"
        )
    if config.sandwich_norm:
        raise ValueError(
            "sandwich_norm is True; pass False: the norms of another model's layers stay as they are"
        )
    if getattr(host, "attention_dropout", 0):
        raise ValueError(f"attention_dropout is {host.attention_dropout}; load the model with 0")
    assert config.layer_types is not None
    types = config.layer_types
    if len(types) != count:
        if set(types) != {INDEXED_LAYER}:
            raise ValueError(f"layer_types has {len(types)} entries; pass {count}, as the model has layers")
        types = [INDEXED_LAYER] * count
    merged = copy.deepcopy(config)
    merged.num_hidden_layers, merged.layer_types = count, types
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    for name in (*names, "initializer_range", "max_position_embeddings", "rope_parameters"):
        setattr(merged, name, getattr(host, name))
    merged.head_dim = getattr(host, "head_dim", None) or host.hidden_size // host.num_attention_heads
    merged.qkv_bias = merged.qk_norm = False  # the host's modules stay
    merged.validate()
    return merged


def _prepare_masks(module: PreTrainedModel, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
    """Prepare masks before the model's forward pass. transformers' code of this model does not know the new layer
    types."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    mask = given.get("attention_mask")
    if module.config.model_type not in _WITH_MASKS_BY_TYPE:
        if isinstance(mask, dict):  # `generate` makes a mask for each kind of layer
            given["attention_mask"] = mask.get(INDEXED_LAYER, next(iter(mask.values())))
        return (), given
    if not isinstance(mask, dict):
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        assert tokens is not None
        given["attention_mask"] = create_masks_for_generate(
            config=module.config,
            inputs_embeds=torch.empty((*tokens.shape[:2], 0), dtype=module.dtype, device=tokens.device),
            attention_mask=mask,
            position_ids=given.get("position_ids"),
            **{CACHE_ARGUMENT: given.get("cache", given.get("past_key_values"))},
        )
    return (), given


def _visible(
    mask: torch.Tensor | None, hidden_states: torch.Tensor, cache: Cache | None, layer_idx: int
) -> torch.Tensor:
    """Return each query's causal keys, bool [B, 1, L, Lk]. The mask is bool or additive; None hides only later keys."""
    batch, length = hidden_states.shape[:2]
    if mask is None:
        past: int | torch.Tensor = 0
        keys = length
        if cache is not None:
            past, keys = cache.get_seq_length(layer_idx), cache.get_mask_sizes(length, layer_idx)[0]
        slots = torch.arange(length, device=hidden_states.device) + past
        mask = (torch.arange(keys, device=hidden_states.device) <= slots[:, None])[None, None]
    if mask.dtype != torch.bool:
        mask = mask >= 0
    return mask.expand(batch, -1, -1, -1)
