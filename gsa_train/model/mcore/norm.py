"""Implement RMSNorm under sequence parallelism without Transformer Engine or Apex."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight over the last dimension, in the dtype of x.

    This class supports sequence parallelism, which megatron-core's wrapper of torch's norm refuses. Under sequence
    parallelism, each tensor-parallel rank processes a slice of the tokens, so the weight's gradients must be summed
    over these ranks. megatron-core does this if the weight's attribute `sequence_parallel` is True.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
