"""Defines SwiGLU, the activation of the feed-forward layer."""

import torch

from gsa_kernels.checks import compute_dtype


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of the last dimension, in fp32 (fp64); [..., 2F] -> [..., F]."""
    gate, value = x.to(compute_dtype(x=x)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype)


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `swiglu` of each row times its weight, in fp32 (fp64); [N, 2F], [N] -> [N, F]."""
    gate, value = x.to(compute_dtype(x=x)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * value * weights[:, None]).to(x.dtype)
