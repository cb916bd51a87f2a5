"""Define and check the configuration of Gated Sparse Attention models in transformers."""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_INDEXED_NAMES = ("indexed_attention", "deepseek_sparse_attention")
INDEXED_LAYER = next(name for name in _INDEXED_NAMES if name in DYNAMIC_LAYER_TYPE_MAPPING)
"""transformers' type of a layer whose cache also holds the indexer's keys: `indexed_attention` in newer versions. A
configuration may have either name."""
DENSE_LAYER = "full_attention"
LEAST = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"), 1),
    **dict.fromkeys(("moe_intermediate_size", "index_n_heads", "index_head_dim", "index_topk"), 1),
    **dict.fromkeys(("k_min", "k_max", "index_topk_freq"), 1),
    **dict.fromkeys(("local_window", "dense_below", "indexer_loss_coef"), 0),
    **dict.fromkeys(("num_experts", "shared_expert_intermediate_size"), 0),
}
"""Maps fields to their smallest values."""
RENAMED = {
    "index_topk_min": "k_min",
    "index_topk_max": "k_max",
    "index_dense_below": "dense_below",
    "index_adaptive": "adaptive_k",
    "index_activation": "indexer_activation",
    "index_norm": "indexer_norm",
    "index_rope": "indexer_rope",
    "index_temperature": "indexer_temperature",
    "index_local_window": "local_window",
}
"""Maps the earlier names of fields to their present names, which training also uses."""
REMOVED = {
    "selection_query": "first",
    "index_block_query": "first",
    "selection_block": 1,
    "index_block_size": 1,
    "indexer_pool": 1,
    "index_pool": 1,
    "key_group_size": 1,
}
"""Maps each removed field to its old default, the only value with which a configuration still loads."""


@strict
class GSAConfig(PreTrainedConfig):
    r"""
    Holds the sizes and options of a [`GSAModel`]. The defaults give the paper's 1.7B model (arXiv 2601.15305).
    A small network, the indexer, scores the keys. A query attends to the best keys. Their number is the query's budget.

    Args:
        qkv_bias (`bool`, *optional*, defaults to `False`):
            Whether the query, key and value projections have biases.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether RMSNorm is applied to each head's query and key, before the rotary embedding.
        value_gate (`bool`, *optional*, defaults to `True`):
            Whether the gate G2 multiplies the values by sigmoid(h W + b), before attention.
        output_gate (`bool`, *optional*, defaults to `True`):
            Whether the gate G1 multiplies the attention output by sigmoid(h W + b).
        key_gate, query_gate, projection_gate (`bool`, *optional*, defaults to `False`):
            Whether G3 gates the keys, G4 gates the queries (both before the rotary embedding), and G5 gates the
            result of the output projection.
        gate_granularity (`str`, *optional*, defaults to `"elementwise"`):
            `"elementwise"` gates have one value per channel, `"headwise"` gates have one value per head. This option
            and the next four apply to all gates.
        gate_sharing (`str`, *optional*, defaults to `"head_specific"`):
            `"head_specific"` gates differ between heads, `"head_shared"` gates are equal for all heads.
        gate_form (`str`, *optional*, defaults to `"multiplicative"`):
            `"multiplicative"` gates multiply their input, `"additive"` gates are added to it.
        gate_activation (`str`, *optional*, defaults to `"sigmoid"`):
            Function of the logits h W + b: `"sigmoid"`, `"silu"`, `"ns_sigmoid"` (0.5 + 0.5 sigmoid) or `"identity"`.
        gate_input (`str`, *optional*, defaults to `"query_dependent"`):
            `"query_dependent"` gates have the logits h W + b, `"input_independent"` gates have the logits b.
        output_transform (`str`, *optional*, defaults to `"none"`):
            A replacement of G1: `"rms_norm"` or `"silu"` of each head's attention output.
        sandwich_norm (`bool`, *optional*, defaults to `False`):
            Whether to also apply RMSNorm after attention and after the feed-forward layer.
        num_experts (`int`, *optional*, defaults to 0):
            Number of routed SwiGLU experts of a feed-forward layer. With 0 the layers are dense.
        num_experts_per_tok (`int`, *optional*, defaults to 2):
            Number of routed experts that process a token.
        moe_intermediate_size (`int`, *optional*, defaults to 256):
            Inner width of a routed expert.
        shared_expert_intermediate_size (`int`, *optional*, defaults to 0):
            Inner width of the shared expert, which processes every token. With 0 there is no shared expert.
        mlp_only_layers (`list[int]`, *optional*):
            Layers that keep a dense feed-forward layer.
        scoring_func (`str`, *optional*, defaults to `"softmax"`):
            The function of the router's logits that gives scores: `"softmax"` or `"sigmoid"`.
        norm_topk_prob (`bool`, *optional*, defaults to `True`):
            Whether the scores of a token's experts are divided by their sum. Only `True` is supported.
        routed_scaling_factor (`float`, *optional*, defaults to 1.0):
            Factor that multiplies the expert weights.
        router_bias (`bool`, *optional*, defaults to `False`):
            Whether each expert has a bias, which is added to the expert's score to choose experts, not to weight them.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` (dense) or `"indexed_attention"` (sparse) for each layer. All layers are sparse if unset.
        index_n_heads (`int`, *optional*, defaults to 4):
            Number of indexer heads.
        index_head_dim (`int`, *optional*, defaults to 64):
            Size of an indexer head.
        index_topk (`int`, *optional*, defaults to 2048):
            Number of selected keys per query, before the budget adapts.
        k_min (`int`, *optional*, defaults to 256):
            Smallest budget of a query, in keys.
        k_max (`int`, *optional*, defaults to 4096):
            Largest budget of a query, in keys.
        dense_below (`int`, *optional*, defaults to 0):
            Queries with fewer causal keys than this number attend to all of them.
        adaptive_k (`str`, *optional*, defaults to `"inverse"`):
            The budget of a query. v is the variance of its scores, and a is the moving average of v from training:
            `"inverse"` gives index_topk * a / v, `"direct"` gives index_topk * v / a, `"off"` gives index_topk.
        indexer_activation (`str`, *optional*, defaults to `"sigmoid"`):
            Activation of the indexer's scores: `"sigmoid"` (GSA) or `"relu"` (DeepSeek's indexer). `"plain"` is
            `"sigmoid"` without head weights, and `"qsa"` is `"relu"` without head weights.
        indexer_norm (`bool`, *optional*, defaults to `False`):
            Whether RMSNorm is applied to the indexer's queries and keys, before the rotary embedding.
        indexer_rope (`bool`, *optional*, defaults to `False`):
            Whether the rotary embedding is applied to the indexer's queries and keys.
        indexer_temperature (`float` or `str`, *optional*, defaults to 1.0):
            beta in softmax(beta * scores) of the indexer loss: a number, or `"learned"`.
        local_window (`int`, *optional*, defaults to 0):
            Number of latest keys that every query attends to, in addition to its budget.
        index_topk_freq (`int`, *optional*, defaults to 1):
            Number of consecutive layers that share a selection. The first of these layers makes it.
        indexer_loss_coef (`float`, *optional*, defaults to 0.0):
            Weight of the indexer loss in training. With 0 the indexer is frozen.

    ```python
    >>> from gsa_hf import GSAConfig, GSAForCausalLM

    >>> configuration = GSAConfig()
    >>> model = GSAForCausalLM(configuration)
    ```"""

    model_type = "gsa"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - strict wants a plain list

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 5504
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    value_gate: bool = True
    output_gate: bool = True
    key_gate: bool = False
    query_gate: bool = False
    projection_gate: bool = False
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    gate_sharing: Literal["head_specific", "head_shared"] = "head_specific"
    gate_form: Literal["multiplicative", "additive"] = "multiplicative"
    gate_activation: Literal["sigmoid", "silu", "ns_sigmoid", "identity"] = "sigmoid"
    gate_input: Literal["query_dependent", "input_independent"] = "query_dependent"
    output_transform: Literal["none", "rms_norm", "silu"] = "none"
    sandwich_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 256
    shared_expert_intermediate_size: int = 0
    mlp_only_layers: list[int] | None = None
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.0
    router_bias: bool = False
    layer_types: list[str] | None = None
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 2048
    k_min: int = 256
    k_max: int = 4096
    dense_below: int = 0
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    indexer_activation: Literal["sigmoid", "relu", "plain", "qsa"] = "sigmoid"
    indexer_norm: bool = False
    indexer_rope: bool = False
    indexer_temperature: float | int | str = 1.0
    local_window: int = 0
    index_topk_freq: int = 1
    indexer_loss_coef: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if renamed := [f"{old} is now {new}" for old, new in RENAMED.items() if old in kwargs]:
            raise ValueError(f"{'; '.join(renamed)}: rename it in config.json or in the call")
        for name in REMOVED.keys() & kwargs.keys():
            if (value := kwargs.pop(name)) != REMOVED[name]:
                raise ValueError(
                    f"{name} is {value!r}: removed; pass {REMOVED[name]!r}, "
                    "or use release studies-0.1 or commit 56919bd1"
                )
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}; pass one of torch, such as 'bfloat16' or 'float32'")
        if self.layer_types is None:
            self.layer_types = [INDEXED_LAYER] * self.num_hidden_layers
        self.layer_types = [INDEXED_LAYER if name in _INDEXED_NAMES else name for name in self.layer_types]
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and copy the code files that `auto_map` names.

        transformers copies code only for classes that it loaded itself. This method also copies code for a model that
        this package loaded."""
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        here = Path(__file__).parent
        for place in (getattr(self, "auto_map", None) or {}).values():
            source = here / f"{place.split('.')[0]}.py"  # "owner/name--module.Class" is code elsewhere
            if "--" in place or not source.is_file():
                continue
            for file in (source, *map(Path, get_relative_import_files(source))):
                if not (Path(save_directory) / file.name).exists():
                    shutil.copyfile(file, Path(save_directory) / file.name)

    def indexer_layer(self, layer_idx: int) -> int | None:
        """Return the layer whose indexer selects keys for layer `layer_idx`, or None for a dense layer."""
        assert self.layer_types is not None
        if self.layer_types[layer_idx] != INDEXED_LAYER:
            return None
        return layer_idx - layer_idx % self.index_topk_freq

    def validate_architecture(self) -> None:
        """Check the sizes and the combinations of fields. `@strict` calls this method."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; pass at least {least}")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_parameters.rope_type is {rope_type!r}; pass 'default' or one of {', '.join(ROPE_INIT_FUNCTIONS)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; pass a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}; pass 'silu', which SwiGLU is made of")
        if self.projection_gate and (self.gate_granularity, self.gate_sharing) != (
            "elementwise",
            "head_specific",
        ):
            raise ValueError(
                f"projection_gate is True with gate_granularity {self.gate_granularity!r} and gate_sharing "
                f"{self.gate_sharing!r}; pass False: after the output projection there are no heads"
            )
        if self.output_transform != "none" and self.output_gate:
            raise ValueError(
                f"output_transform is {self.output_transform!r} with output_gate; pass 'none', or output_gate=False"
            )
        if not self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob is False; pass True: the weights of a token's experts have a fixed sum"
            )
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; pass 1 to num_experts {self.num_experts}"
            )
        if self.k_min > self.k_max:
            raise ValueError(f"k_min is {self.k_min}; pass at most k_max {self.k_max}")
        if self.indexer_rope and self.index_head_dim % 2:
            raise ValueError(
                f"index_head_dim is {self.index_head_dim} with indexer_rope; pass an even number"
            )
        temperature = self.indexer_temperature
        if temperature != "learned" and (isinstance(temperature, str) or not temperature > 0):
            raise ValueError(f"indexer_temperature is {temperature!r}; pass a positive number or 'learned'")
        for layer_idx, name in enumerate(self.layer_types or ()):
            if name not in (INDEXED_LAYER, DENSE_LAYER):
                raise ValueError(
                    f"layer_types[{layer_idx}] is {name!r}; pass {DENSE_LAYER!r} or {INDEXED_LAYER!r}"
                )
            leader = self.indexer_layer(layer_idx)
            if leader is not None and self.indexer_layer(leader) is None:
                raise ValueError(
                    f"layer_types[{layer_idx}] is {name!r} and takes the selection of layer {leader}, which is dense; "
                    "pass one kind for each group of index_topk_freq layers"
                )


__all__ = ["GSAConfig"]
