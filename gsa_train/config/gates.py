"""Compute which gates a layer has and how many, and check which fields of gates fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gsa_train.config.gsa import GSAConfig

if TYPE_CHECKING:
    from gsa_train.config.sections import Config

FORM = {
    "gate_granularity": "elementwise",
    "gate_sharing": "head_specific",
    "gate_form": "multiplicative",
    "gate_activation": "sigmoid",
    "gate_input": "query_dependent",
}
"""Maps fields of `gsa` to their values for the paper's gates."""
ON_HEADS = ("value", "output", "key", "query")
"""Gates on heads, in the order of their rows in the layer's gate projection: G2, G1, G3, G4. `value` is the gate of the
field `value_gate`."""
POSITIONS = (*ON_HEADS, "projection")
"""All gates: ON_HEADS, and G5, which acts on the output projection and has a separate module."""
COMPATIBLE_WITH_FUSED = ("value", "output", "projection")
"""Gates that allow the fused kernel for the split of QKV and the rotary embedding. The kernel applies the value gate
G2, and splits off the logits of the output gate G1. G5 acts after attention."""


def gate_rows(gsa: GSAConfig, heads: int, kv_heads: int, head_dim: int, hidden_size: int) -> dict[str, int]:
    """Return a dict from each position to its number of gates per token, which is 0 if the position has no gate.

    The weight that computes the gates of a position has one row per gate.

    Args:
        heads: query heads n_h
        kv_heads: key-value heads n_kv
        head_dim: d_k
        hidden_size: d
    """
    of_head = 1 if gsa.gate_granularity == "headwise" else head_dim
    if gsa.gate_sharing == "head_shared":
        heads = kv_heads = 1
    return {
        "value": gsa.value_gate * kv_heads * of_head,
        "output": gsa.output_gate * heads * of_head,
        "key": gsa.key_gate * kv_heads * of_head,
        "query": gsa.query_gate * heads * of_head,
        "projection": gsa.projection_gate * hidden_size,
    }


def has_paper_form(gsa: GSAConfig) -> bool:
    """Whether all gates are sigmoids of each head and channel, which the fused operations support."""
    return all(getattr(gsa, name) == value for name, value in FORM.items())


def fuses_gates(gsa: GSAConfig) -> bool:
    """Whether the fused split and rotary embedding has all the gates that act before attention."""
    others = [position for position in POSITIONS if position not in COMPATIBLE_WITH_FUSED]
    return has_paper_form(gsa) and not any(getattr(gsa, f"{position}_gate") for position in others)


def check_gates(config: Config) -> Iterator[str]:
    gsa = config.gsa
    changed = [name for name, default in FORM.items() if getattr(gsa, name) != default]
    if not any(getattr(gsa, f"{position}_gate") for position in POSITIONS):
        for name in changed:
            remedy = f"leave it at {FORM[name]}, or set gsa.output_gate=true"
            yield config.problem(f"gsa.{name}", "without effect, for no gate is on", remedy)
    for name in ("gate_granularity", "gate_sharing"):
        if gsa.projection_gate and name in changed:
            wrong = "the output of W_O has no heads, and gsa.projection_gate = true"
            remedy = f"set it to {FORM[name]}, or gsa.projection_gate to false"
            yield config.problem(f"gsa.{name}", wrong, remedy)
    if gsa.output_transform != "none" and gsa.output_gate:
        wrong = "stands in the place of G1, and gsa.output_gate = true"
        yield config.problem("gsa.output_transform", wrong, "set one of them to none or false")
