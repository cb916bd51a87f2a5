"""Define the config fields that an evaluation may change in a trained model, all of them about attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from gsa_eval.convert.hf_config import GSA_FIELDS
from gsa_hf import DENSE_LAYER, GSAConfig
from gsa_kernels.rotary import YarnScaling

SCALING = "model.rope_scaling."
FIELDS: dict[str, tuple[str, ...] | int | type] = {
    "gsa.attention": ("dense", "sparse"),
    "gsa.adaptive_k": ("inverse", "direct", "off"),
    **dict.fromkeys(("gsa.k_base", "gsa.k_min", "gsa.k_max"), 1),
    **dict.fromkeys(("gsa.dense_below", "gsa.local_window"), 0),
    "model.rope_base": float,
    "model.rope_scaling.rope_type": ("default", "yarn"),
    "model.rope_scaling.original_max_position_embeddings": int,
    **{f"{SCALING}{name}": float for name in ("factor", "beta_fast", "beta_slow", "attention_factor")},
}
"""Config fields that `key=value` may set -> the allowed values, the least integer, or the type."""
MOST_KEYS = 2**31 - 1
"""Largest number of keys, because positions of keys are int32."""


def apply_settings(config: GSAConfig, settings: Sequence[str]) -> GSAConfig:
    """Returns a copy of `config` with settings such as `gsa.k_base=512`.

    Raises:
        ValueError: an unknown field or value.
    """
    content = config.to_dict()
    scaling: dict[str, Any] = {}
    for key, value in parse_settings(settings).items():
        if key == "model.rope_base":
            content["rope_parameters"] = {**content["rope_parameters"], "rope_theta": value}
        elif key.startswith(SCALING):
            scaling[key.removeprefix(SCALING)] = value
        elif key == "gsa.attention":
            if value == "dense":
                content["layer_types"] = [DENSE_LAYER] * config.num_hidden_layers
            elif set(content["layer_types"]) == {DENSE_LAYER}:
                raise ValueError("gsa.attention=sparse: the model has no indexer; leave it out")
        else:
            content[GSA_FIELDS[key.partition(".")[2]]] = value
    content["rope_parameters"] = _scaled(content, scaling)
    if not content["k_min"] <= content["index_topk"] <= content["k_max"]:
        raise ValueError(
            f"gsa.k_base = {content['index_topk']}: outside of gsa.k_min = {content['k_min']} and gsa.k_max = "
            f"{content['k_max']}, which bound every budget; set these, too"
        )
    try:
        changed: GSAConfig = GSAConfig.from_dict(content)
    except StrictDataclassError as error:  # The error has several lines. Its cause names field and value.
        raise ValueError(f"{' '.join(settings)}: {error.__cause__ or error}") from error
    return changed


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse settings to field -> value.

    Raises:
        ValueError: an unknown field, or an invalid value.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in FIELDS:
            raise ValueError(
                f"{setting}: an evaluation cannot set it; give one of {', '.join(FIELDS)} as key=value"
            )
        allowed = FIELDS[key]
        if isinstance(allowed, tuple):
            if text not in allowed:
                raise ValueError(f"{setting}: give {' or '.join(allowed)}")
            found[key] = text
            continue
        try:
            value = found[key] = (int if isinstance(allowed, int) else allowed)(text)
        except ValueError:
            raise ValueError(f"{setting}: not a number; give one, as in gsa.k_base=512") from None
        if key == "model.rope_base" and not 0 < value < math.inf:
            raise ValueError(f"{setting}: give a positive number")
        if isinstance(allowed, int) and not allowed <= value <= MOST_KEYS:
            raise ValueError(f"{setting}: give {allowed} to {MOST_KEYS}")
    return found


def _scaled(content: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` with the settings of `model.rope_scaling`. If neither the model nor a setting gives
    YaRN's original length, it is the model's length."""
    rope: dict[str, Any] = {**content["rope_parameters"], **scaling}
    if not scaling:
        return rope
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind == "default":
        if rest := scaling.keys() - {"rope_type"}:
            name = min(rest)
            raise ValueError(f"{SCALING}{name}={scaling[name]}: does nothing without {SCALING}rope_type=yarn")
        kept = ("rope_type", "rope_theta", "partial_rotary_factor")
        return {name: rope[name] for name in kept if name in rope}
    rope.setdefault("original_max_position_embeddings", content["max_position_embeddings"])
    if rope.get("attention_factor") == 0:  # as in training: follows from the factor
        del rope["attention_factor"]
    if "factor" not in rope:
        raise ValueError(
            f"{SCALING}rope_type=yarn: add {SCALING}factor=, the new length over the original one"
        )
    try:
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
        YarnScaling(**{name: rope[name] for name in names if rope.get(name) is not None})
    except ValueError as error:
        raise ValueError(f"{SCALING}{error}") from None
    if base <= 1:
        raise ValueError(f"model.rope_base={base}: give more than 1 with YaRN")
    return rope
