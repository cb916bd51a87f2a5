"""Defines RMSNorm."""

import torch

from gsa_kernels.checks import compute_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (fp64); [..., D], [D] -> [..., D]."""
    wide = x.to(compute_dtype(x=x))
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(wide.dtype)).to(x.dtype)
