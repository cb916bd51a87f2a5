"""Convert our config to `gsa_hf.GSAConfig`, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from gsa_hf import DENSE_LAYER, INDEXED_LAYER, GSAConfig
from gsa_train.config import Config, ModelConfig, MoEConfig, RopeScalingConfig, TrainConfig
from gsa_train.config import GSAConfig as GSASection
from gsa_train.config.gates import FORM, POSITIONS
from gsa_train.config.load import problem_line
from gsa_train.config.moe import layers_with_experts

MODEL_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "sandwich_norm": "sandwich_norm",
    "norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
"""Field of `model` -> field of the same meaning. The rotary embedding's fields are in `rope_parameters`."""
GSA_FIELDS = {
    **{f"{position}_gate": f"{position}_gate" for position in POSITIONS},
    **{name: name for name in (*FORM, "output_transform", "adaptive_k", "k_min", "k_max", "dense_below")},
    "local_window": "local_window",
    **{f"indexer_{name}": f"indexer_{name}" for name in ("activation", "norm", "rope", "temperature")},
    "indexer_heads": "index_n_heads",
    "indexer_dim": "index_head_dim",
    "k_base": "index_topk",
    "selection_reuse": "index_topk_freq",
}
"""Field of `gsa` -> field of transformers. Names with `index_` are transformers' names for
other sparse models. Missing: `gsa.attention`, which is in `layer_types`, and fields that only training needs."""
MOE_FIELDS = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "shared_expert_ffn_hidden_size": "shared_expert_intermediate_size",
    "router_score": "scoring_func",
    "routed_scale": "routed_scaling_factor",
}
"""Field of `moe` -> field of transformers. Missing: the layers without experts, which are in `mlp_only_layers`, and
fields for balancing the routers in training."""


def to_hf_config(config: Config) -> GSAConfig:
    """Returns the transformers configuration, without token ids and dtype.

    Raises:
        ValueError: the model has features that `gsa_hf` lacks.
    """
    model, gsa = config.model, config.gsa
    if dropping := config.moe.capacity_factor:
        wrong = "the model of transformers (gsa_hf) does not have it"
        raise ValueError(problem_line("moe.capacity_factor", dropping, wrong, "train with 0"))
    kind = INDEXED_LAYER if gsa.attention == "sparse" else DENSE_LAYER
    try:
        return GSAConfig(
            **{theirs: getattr(model, ours) for ours, theirs in MODEL_FIELDS.items()},
            **{theirs: getattr(gsa, ours) for ours, theirs in GSA_FIELDS.items()},
            **_experts(config),
            max_position_embeddings=config.train.seq_len_tokens,
            rope_parameters=_rope_parameters(model),
            layer_types=[kind] * model.num_layers,
        )
    except StrictDataclassError as error:  # has several lines; its cause names field and value
        raise ValueError(f"the model of transformers (gsa_hf) does not have it: {error.__cause__}") from error


def _experts(config: Config) -> dict[str, Any]:
    moe, layers = config.moe, config.model.num_layers
    if moe.experts == 0:
        return {}
    dense = sorted(set(range(layers)) - set(layers_with_experts(moe, layers)))
    return {
        **{theirs: getattr(moe, ours) for ours, theirs in MOE_FIELDS.items()},
        "router_bias": moe.balancing == "aux_free",
        "mlp_only_layers": dense,
    }


def from_hf_config(found: GSAConfig) -> Config:
    """
    Raises:
        ValueError: training does not support the model, because it has both dense and sparse layers, experts at
            irregular layers, or another rotary embedding.
    """
    rope = found.rope_parameters or {}
    if problem := other_rope(rope):
        raise ValueError(problem)
    kinds = set(found.layer_types or ())
    if len(kinds) > 1:
        raise ValueError(
            f"layer_types = {', '.join(sorted(kinds))}: in training all layers are of one kind; give such a model"
        )
    return Config(
        model=ModelConfig(
            **{ours: getattr(found, theirs) for ours, theirs in MODEL_FIELDS.items()},
            rope_base=float(rope.get("rope_theta", ModelConfig.rope_base)),
            rope_scaling=rope_scaling(rope),
            rotary_percent=float(rope.get("partial_rotary_factor", 1.0)),
        ),
        gsa=GSASection(
            attention="sparse" if INDEXED_LAYER in kinds else "dense",
            **{ours: getattr(found, theirs) for ours, theirs in GSA_FIELDS.items()},
        ),
        moe=_moe_section(found),
        train=dataclasses.replace(TrainConfig(), seq_len_tokens=found.max_position_embeddings),
    )


def _moe_section(found: GSAConfig) -> MoEConfig:
    """Returns the config section `moe`. `config.json` does not say how training balanced the experts. If the routers
    have no biases, we assume our default, a balance loss over the global batch."""
    if found.num_experts == 0:
        return MoEConfig()
    layers = found.num_hidden_layers
    mixtures = sorted(set(range(layers)) - set(found.mlp_only_layers or ()))
    interval = mixtures[1] - mixtures[0] if mixtures[1:] else layers
    moe = MoEConfig(
        **{ours: getattr(found, theirs) for ours, theirs in MOE_FIELDS.items()},
        balancing="aux_free" if found.router_bias else "global_batch",
        first_dense_layers=mixtures[0] if mixtures else layers,
        layer_interval=interval,
    )
    if list(layers_with_experts(moe, layers)) != mixtures:
        raise ValueError(
            f"mlp_only_layers = {found.mlp_only_layers}: in training the layers with experts have a fixed "
            "interval; give such a model"
        )
    return moe


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    own = {"rope_theta": model.rope_base, "partial_rotary_factor": model.rotary_percent}
    scaling = dataclasses.asdict(model.rope_scaling)
    if model.rope_scaling.rope_type == "default":
        return {"rope_type": "default", **own}
    return {**{name: value for name, value in scaling.items() if name != "attention_factor" or value}, **own}


def other_rope(rope: dict[str, Any]) -> str | None:
    """Returns an error if training does not support these `rope_parameters` of transformers, else None."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        return f"rope_parameters.rope_type = {kind}: a GSA model has the default and yarn; give such a model"
    if kind == "yarn" and not rope.get("factor"):
        return "rope_parameters.factor is missing with rope_type = yarn; give the new length over the original one"
    if kind == "yarn" and not rope.get("truncate", True):
        return (
            "rope_parameters.truncate = false: YaRN of a GSA model has whole channels; give a model without"
        )
    return None


def rope_scaling(rope: dict[str, Any]) -> RopeScalingConfig:
    """Returns `model.rope_scaling` for transformers' `rope_parameters` that `other_rope` accepts."""
    if rope.get("rope_type", "default") == "default":
        return RopeScalingConfig()
    factor = float(rope["factor"])
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):  # the form of DeepSeek
        attention_factor = _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return RopeScalingConfig(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or RopeScalingConfig.beta_fast),
        beta_slow=float(rope.get("beta_slow") or RopeScalingConfig.beta_slow),
        attention_factor=float(attention_factor or 0.0),
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
