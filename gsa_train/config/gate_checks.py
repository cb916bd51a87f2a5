"""Fields of the gates that must fit each other."""

from __future__ import annotations

from gsa_train.config.gate_shapes import FORM, POSITIONS
from gsa_train.config.gsa import GSAConfig
from gsa_train.config.load import problem_line


def check_gates(gsa: GSAConfig) -> list[str]:
    """A line for each mistake."""
    return [*_check_unread(gsa), *_check_projection_gate(gsa), *_check_output_transform(gsa)]


def _check_unread(gsa: GSAConfig) -> list[str]:
    if any(getattr(gsa, f"{position}_gate") for position in POSITIONS):
        return []
    wrong = "without effect, for no gate is on"
    return [
        problem_line(f"gsa.{name}", value, wrong, f"leave it at {default}, or set gsa.output_gate=true")
        for name, default in FORM.items()
        if (value := getattr(gsa, name)) != default
    ]


def _check_projection_gate(gsa: GSAConfig) -> list[str]:
    if not gsa.projection_gate:
        return []
    wrong = "W_O leaves no heads behind, and gsa.projection_gate = true"
    return [
        problem_line(f"gsa.{name}", value, wrong, f"set it to {FORM[name]}, or gsa.projection_gate to false")
        for name in ("gate_granularity", "gate_sharing")
        if (value := getattr(gsa, name)) != FORM[name]
    ]


def _check_output_transform(gsa: GSAConfig) -> list[str]:
    if gsa.output_transform == "none" or not gsa.output_gate:
        return []
    wrong, remedy = (
        "stands in the place of G1, and gsa.output_gate = true",
        "set one of them to none or false",
    )
    return [problem_line("gsa.output_transform", gsa.output_transform, wrong, remedy)]
