"""Describe dense models of other architectures as GSA models: sizes, gates and unused weights.

Features that a GSA model cannot represent are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from gsa_eval.convert.hf_config import other_rope, rope_scaling
from gsa_train.config import Config, ModelConfig, TrainConfig
from gsa_train.config import GSAConfig as GSASection

Gates = Literal["none", "open"]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

OPEN_BIAS = 20.0
"""sigmoid(20) rounds to 1 in fp32, in which gates are calculated, and bf16 represents 20 exactly."""

HAS_NOT = {
    "attention_bias": "biases on all projections of attention; a GSA model has them on Q, K and V alone (qwen2)",
    "mlp_bias": "biases in the feed-forward layer",
    "attn_logit_softcapping": "a softcap on attention's logits",
    "final_logit_softcapping": "a softcap on the output's logits",
    "quantization_config": "quantised weights",
}
"""Fields that must be off -> their meaning."""


def config_of(found: Any, gates: Gates, seq_len_tokens: int | None) -> Config:
    """Returns the config of training (`model`, `gsa`, `train.seq_len_tokens`) for a dense model of transformers.

    Raises:
        ValueError: a GSA model cannot represent the dense model. The error lists fields, values and reasons.
    """
    problems = _problems(found, seq_len_tokens or found.max_position_embeddings)
    if problems:
        raise ValueError("; ".join(problems))
    kind, rope = found.model_type, found.rope_parameters
    return Config(
        model=ModelConfig(
            num_layers=found.num_hidden_layers,
            hidden_size=found.hidden_size,
            num_heads=found.num_attention_heads,
            num_kv_heads=found.num_key_value_heads,
            head_dim=getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads,
            ffn_hidden_size=found.intermediate_size,
            vocab_size=found.vocab_size,
            rope_base=float(rope["rope_theta"]),
            rope_scaling=rope_scaling(rope),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            norm_epsilon=found.rms_norm_eps,
            init_std=found.initializer_range,
            tie_embeddings=found.tie_word_embeddings,
        ),
        gsa=GSASection(
            attention="dense",
            value_gate=gates == "open",
            output_gate=gates == "open",
            gate_bias_init=OPEN_BIAS if gates == "open" else 0.0,
        ),
        train=dataclasses.replace(
            TrainConfig(), seq_len_tokens=seq_len_tokens or found.max_position_embeddings
        ),
    )


def _problems(found: Any, length: int) -> list[str]:
    kind = found.model_type
    if kind not in ARCHITECTURES:
        return [f"model_type = {kind}: unknown; give a model of {', '.join(ARCHITECTURES)}, or gsa"]
    lines = [
        f"{field} = {str(value)[:60]}: {what}, which a GSA model has not"
        for field, what in HAS_NOT.items()
        if (value := getattr(found, field, None))
    ]
    if found.hidden_act != "silu":
        lines.append(f"hidden_act = {found.hidden_act}: a GSA model has silu")
    if problem := other_rope(found.rope_parameters or {}):
        lines.append(problem)
    part = (found.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    if part != 1:
        lines.append(
            f"rope_parameters.partial_rotary_factor = {part}: {kind} of transformers turns all channels all the same; "
            "give a model without"
        )
    kinds = set(getattr(found, "layer_types", None) or ["full_attention"])
    window = getattr(found, "sliding_window", None)
    windowed = "sliding_attention" in kinds or kind == "mistral"
    if windowed and window is not None and window < length:
        lines.append(
            f"sliding_window = {window}: shorter than the {length} tokens of a sequence, and a dense GSA layer sees "
            f"all keys; pass --seq-len-tokens {window} or less for shorter sequences"
        )
    for other in sorted(kinds - {"full_attention", "sliding_attention"}):
        lines.append(f"layer_types has {other}: a GSA model has full attention in each layer")
    return lines


def open_gate(name: str) -> float | None:
    """Returns the number that fills this tensor of an open gate, or None if the tensor is of no gate."""
    if name.endswith("_gate_proj.weight"):
        return 0.0
    return OPEN_BIAS if name.endswith("_gate_proj.bias") else None


def unused(names: set[str], config: Config) -> set[str]:
    """Returns the tensors that the import ignores: a tied output layer, and tables of the rotary embedding."""
    return {
        name
        for name in names
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.model.tie_embeddings)
    }
