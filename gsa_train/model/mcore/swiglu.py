"""Wrap SwiGLU as the activation module of megatron-core's feed-forward layer."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from gsa_kernels.fused.swiglu.op import fused_swiglu


class FusedSwiGLU(MegatronModule):
    """Runs one kernel per direction, in the slot for Transformer Engine's activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[L, B, 2 F] -> [L, B, F]"""
        return fused_swiglu(x, self.config.linears.in_fp8)
