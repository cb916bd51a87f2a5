"""Defines the sigmoid gates: G2 on the values (GSA, equation 9) and G1 on the attention output (equation 10)."""

import torch

from gsa_kernels.checks import compute_dtype


def sigmoid_gate(x: torch.Tensor, gate_logits: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate_logits), computed in fp32 (fp64 if an input is fp64).

    Args:
        x: any shape, for example [B, L, H, D]
        gate_logits: the shape of x, or broadcastable to it ([B, L, H, 1] gates head by head)

    Returns:
        the shape and dtype of x
    """
    dtype = compute_dtype(x=x, gate_logits=gate_logits)
    sizes = zip(gate_logits.shape, x.shape, strict=False)
    if gate_logits.ndim != x.ndim or any(gate not in (1, size) for gate, size in sizes):
        raise ValueError(
            f"gate_logits has shape {tuple(gate_logits.shape)}; pass the shape of x, {tuple(x.shape)}, "
            "or 1 where one gate serves a whole dimension"
        )
    return (x.to(dtype) * torch.sigmoid(gate_logits.to(dtype))).to(x.dtype)
