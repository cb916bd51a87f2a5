"""Compute gates in the places and forms of the gated-attention study (arXiv 2505.06708).

The GSA paper has two sigmoid gates, each per head and channel: G2 on the values and G1 on the attention output.
"""

from typing import Any

import torch
from torch import nn

FORM = {
    "gate_granularity": "elementwise",
    "gate_sharing": "head_specific",
    "gate_form": "multiplicative",
    "gate_activation": "sigmoid",
    "gate_input": "query_dependent",
}
"""Maps fields of the configuration to their values for the gates of the GSA paper."""
BESIDE = {"key_gate": False, "query_gate": False, "projection_gate": False, "output_transform": "none"}
"""Maps the field of each feature that the GSA paper lacks to its value without the feature."""


class GSAGateBias(nn.Module):
    """Gives all tokens the same gate logits, the bias."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [B, L, rows] for hidden states [B, L, d]."""
        return self.bias.expand(*hidden_states.shape[:-1], -1)


def make_gate(config: Any, rows: int) -> nn.Module:
    """Return the module that computes logits [B, L, rows] from hidden states [B, L, d]."""
    if config.gate_input == "input_independent":
        return GSAGateBias(rows)
    return nn.Linear(config.hidden_size, rows)


def gate_rows(config: Any, heads: int) -> int:
    """Return the number of gate logits of a token, for a gate on tensors of this number of heads."""
    of_head = 1 if config.gate_granularity == "headwise" else config.head_dim
    return of_head * (1 if config.gate_sharing == "head_shared" else heads)


def has_paper_form(config: Any) -> bool:
    return all(getattr(config, name) == value for name, value in FORM.items())


def gate_heads(x: torch.Tensor, logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Gate x [..., heads, D] by logits [..., rows]. Heads or channels may share a logit (`gate_rows`)."""
    channels = 1 if config.gate_granularity == "headwise" else config.head_dim
    return gate(x, logits.unflatten(-1, (-1, channels)), config)


def gate(x: torch.Tensor, logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return x * g(logits) or x + g(logits), computed in fp32. The logits are broadcast to x."""
    opened = opening(logits, config)
    gated = x.float() * opened if config.gate_form == "multiplicative" else x.float() + opened
    return gated.to(x.dtype)


def opening(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return g(logits) in fp32."""
    logits = logits.float()
    if config.gate_activation == "sigmoid":
        return logits.sigmoid()
    if config.gate_activation == "ns_sigmoid":
        return 0.5 + 0.5 * logits.sigmoid()
    if config.gate_activation == "silu":
        return nn.functional.silu(logits)
    return logits
