"""Compute mixtures of experts. Shapes have T tokens, hidden size d, and k experts per token."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from .configuration_gsa import GSAConfig


class GSARouter(nn.Module):
    """Scores all experts in fp32, and chooses the k best experts of each token."""

    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias: torch.Tensor | None
        bias = torch.zeros(config.num_experts) if config.router_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int64 [T, k], and their weights, fp32 [T, k]. `hidden` is [T, d]."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = nn.functional.linear(hidden.float(), self.weight.float())
        scores = logits.softmax(-1) if self.config.scoring_func == "softmax" else logits.sigmoid()
        ranked = scores.detach()
        if self.e_score_correction_bias is not None:
            ranked = ranked + self.e_score_correction_bias
        experts = ranked.topk(self.config.num_experts_per_tok, dim=-1).indices
        chosen = scores.gather(-1, experts)
        return experts, self.config.routed_scaling_factor * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


@use_experts_implementation
class GSAExperts(nn.Module):
    """Computes SwiGLU experts. `forward` implements the `experts_implementation` "eager" of transformers."""

    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        d, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, d))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, d, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of expert outputs [T, d]. `experts` is int64 [T, k], `weights` is [T, k]."""
        out = torch.zeros_like(hidden)
        for expert in experts.unique().tolist():
            token, place = torch.where(experts == expert)
            gate, up = nn.functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            made = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, (made * weights[token, place, None]).to(out.dtype))
        return out


class GSASparseMLP(nn.Module):
    """Computes u_t = shared(h_t) + sum over the chosen experts i of w_{t,i} FFN_i(h_t)."""

    def __init__(self, config: GSAConfig, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.gate = GSARouter(config)
        self.experts = GSAExperts(config)
        self.shared_experts = shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.flatten(0, -2)
        out: torch.Tensor = self.experts(hidden, *self.gate(hidden)).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


__all__ = ["GSAExperts", "GSARouter", "GSASparseMLP"]
