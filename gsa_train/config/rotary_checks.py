"""Fields of the rotary embedding that must fit each other."""

from __future__ import annotations

import dataclasses
import math

from gsa_train.config.load import problem_line
from gsa_train.config.model import ModelConfig


def check_rotary(model: ModelConfig) -> list[str]:
    """`model.rotary_percent` and `model.rope_scaling`; a line for each mistake."""
    return [*_check_percent(model), *_check_scaling(model)]


def _check_percent(model: ModelConfig) -> list[str]:
    field, share, size = "model.rotary_percent", model.rotary_percent, model.head_dim
    if share > 1:
        return [problem_line(field, share, "above 1", "give a share of the channels of a head, 1 for all")]
    channels = model.rotary_channels
    if 0 < share < 1 < size and (channels == 0 or channels % 2 != 0):
        wrong = f"turns {channels} of model.head_dim = {size} channels, and RoPE turns pairs"
        even = max(2, 2 * round(share * size / 2))
        return [
            problem_line(field, share, wrong, f"give {_share_of(even, size)}, which turns {even} channels")
        ]
    return []


def _share_of(channels: int, size: int) -> float:
    """The shortest number of which `ModelConfig.rotary_channels` makes so many."""
    quotient = channels / size
    shortest = float(f"{quotient:.6g}")
    if int(size * shortest) == channels:
        return shortest
    return quotient if int(size * quotient) == channels else math.nextafter(quotient, 1.0)


def _check_scaling(model: ModelConfig) -> list[str]:
    section, scaling = "model.rope_scaling", model.rope_scaling
    if scaling.rope_type == "default":
        wrong = f"without effect with {section}.rope_type = default"
        remedy = f"set {section}.rope_type=yarn, or leave it out"
        return [
            problem_line(f"{section}.{field.name}", value, wrong, remedy)
            for field in dataclasses.fields(scaling)
            if (value := getattr(scaling, field.name)) != field.default
        ]
    lines = []
    if scaling.original_max_position_embeddings == 0:
        field, wrong = f"{section}.original_max_position_embeddings", "not the length that YaRN extends"
        lines.append(problem_line(field, 0, wrong, "give the tokens of a sequence before it"))
    if 0 < scaling.factor < 1:
        remedy = "give the new length over the original one"
        lines.append(problem_line(f"{section}.factor", scaling.factor, "below 1", remedy))
    if 0 < scaling.beta_fast <= scaling.beta_slow:
        wrong, remedy = f"not above {section}.beta_slow = {scaling.beta_slow:g}", "32 and 1 are usual"
        lines.append(problem_line(f"{section}.beta_fast", scaling.beta_fast, wrong, remedy))
    if 0 < model.rope_base <= 1:
        wrong = "not above 1 with YaRN"
        lines.append(problem_line("model.rope_base", model.rope_base, wrong, "10000 is usual"))
    return lines
