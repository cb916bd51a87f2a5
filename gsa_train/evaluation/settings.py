"""What an evaluation may change of a trained model: how it attends, not what its weights are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gsa_hf import DENSE_LAYER, GSAConfig
from gsa_train.convert.hf_config import GSA_FIELDS

KINDS: dict[str, Callable[[str], Any]] = {
    "gsa.attention": str,
    "gsa.adaptive_k": str,
    "gsa.k_base": int,
    "gsa.k_min": int,
    "gsa.k_max": int,
    "gsa.local_window": int,
    "model.rope_base": float,
}
"""Fields of the run's config, as `key=value`."""


def apply_settings(config: GSAConfig, settings: Sequence[str]) -> GSAConfig:
    """A copy of `config` with `gsa.k_base=512` and the like.

    Raises:
        ValueError: an unknown field or value.
    """
    content = config.to_dict()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in KINDS:
            raise ValueError(
                f"{setting}: an evaluation cannot set it; give one of {', '.join(KINDS)} as key=value"
            )
        try:
            value = KINDS[key](text)
        except ValueError:
            raise ValueError(f"{setting}: not a number; give one, as in gsa.k_base=512") from None
        if key == "model.rope_base":
            if value <= 0:
                raise ValueError(f"{setting}: give a positive number")
            content["rope_parameters"] = {**content["rope_parameters"], "rope_theta": value}
        elif key == "gsa.attention":
            content["layer_types"] = _layer_types(config, value)
        else:
            content[GSA_FIELDS[key.partition(".")[2]]] = value
    if not content["index_topk_min"] <= content["index_topk"] <= content["index_topk_max"]:
        raise ValueError(
            f"gsa.k_base = {content['index_topk']}: outside of gsa.k_min = {content['index_topk_min']} and gsa.k_max = "
            f"{content['index_topk_max']}, which bound every budget; set these, too"
        )
    changed: GSAConfig = GSAConfig.from_dict(content)
    return changed


def _layer_types(config: GSAConfig, value: str) -> list[str]:
    """Of gsa.attention=dense, or of `sparse`, which is as the model was built."""
    types = list(config.layer_types or ())
    if value == "dense":
        return [DENSE_LAYER] * len(types)
    if value != "sparse":
        raise ValueError(f"gsa.attention={value}: give dense or sparse")
    if set(types) == {DENSE_LAYER}:
        raise ValueError("gsa.attention=sparse: the model has no indexer; leave it out")
    return types
