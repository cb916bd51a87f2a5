"""Multiplies few rows by a weight in plain torch, with the fused operations around the product."""

from typing import NamedTuple

import torch

from gsa_kernels.checks import check_shape, compute_dtype


class Norm(NamedTuple):
    """Holds the RMSNorm before a product."""

    weight: torch.Tensor
    """[K]"""
    eps: float


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    x_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return norm(x sigmoid(x_gate)) W^T + bias + residual, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: [B, K]
        weight: [N, K]; with `gated` [2 N, K], rows of the gate, then rows of the gated projection
        norm: norm of x
        bias: [N], without `gated`
        residual: [B, N], without `gated`
        gated: the result is SwiGLU, silu(gate) * up
        x_gate: [B, K], before the sigmoid

    Returns:
        [B, N] in the dtype of x

    Raises:
        ValueError: shapes do not fit, or `gated` has a bias or a residual.
    """
    count = check_row_product(x, weight, norm, bias, residual, gated)
    dtype = compute_dtype(x=x, weight=weight)
    value = x.to(dtype)
    if x_gate is not None:
        check_shape("x_gate", x_gate, "[B, K]", tuple(x.shape))
        value = value * torch.sigmoid(x_gate.to(dtype))
    if norm is not None:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(dtype)
    out = value @ weight.to(dtype).T
    if gated:
        gate, up = out.split(count, -1)
        out = gate * torch.sigmoid(gate) * up
    if bias is not None:
        out = out + bias.to(dtype)
    if residual is not None:
        out = out + residual.to(dtype)
    return out.to(x.dtype)


def check_row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> int:
    """Check that the shapes fit, and return N."""
    check_shape("x", x, "[B, K]", (None, None))
    batch, columns = x.shape
    check_shape("weight", weight, "[N, K]", (None, columns))
    count = weight.shape[0]
    if gated:
        if count % 2 != 0:
            raise ValueError(f"weight has {count} rows; pass as many rows of the gate as of what it gates")
        if bias is not None or residual is not None:
            raise ValueError("gated is True with a bias or a residual; pass None for both")
        count //= 2
    if 0 in (batch, columns, count):
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; pass at least one row and column"
        )
    if norm is not None:
        check_shape("norm.weight", norm.weight, "[K]", (columns,))
    if bias is not None:
        check_shape("bias", bias, "[N]", (count,))
    if residual is not None:
        check_shape("residual", residual, "[B, N]", (batch, count))
    return count
