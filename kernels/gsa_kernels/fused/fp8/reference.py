"""Defines products of FP8 matrices with one scale per matrix (tensorwise)."""

from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients."""
SMALLEST = 1e-30
"""The largest magnitude counts as at least this, so that a matrix of zeros has a finite scale."""


class Quantized(NamedTuple):
    """Holds an FP8 matrix [M, K]. It approximates `rows * unit`. A layout that was not requested is None."""

    rows: torch.Tensor | None
    """[M, K], contiguous"""
    columns: torch.Tensor | None
    """The transpose [K, M], contiguous"""
    unit: torch.Tensor
    """Scale, fp32, 0-d"""


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, fp32, 0-d; NaN if x contains one."""
    return torch.linalg.vector_norm(x, torch.inf).float()


def quantize(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, layouts: str) -> Quantized:
    """Round x [M, K] to FP8, scaled so that `amax` becomes the format's largest number. NaN stays NaN.

    Args:
        layouts: "rows", "columns" or "both"
    """
    limit, amax = torch.finfo(dtype).max, amax.clamp(min=SMALLEST)
    values = (x.float() * (limit / amax)).clamp(-limit, limit).to(dtype)
    return Quantized(
        values.contiguous() if layouts != "columns" else None,
        values.t().contiguous() if layouts != "rows" else None,
        amax / limit,
    )


def product(
    a: torch.Tensor, b: torch.Tensor, a_unit: torch.Tensor, b_unit: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute a [M, K] @ b [N, K]^T * a_unit * b_unit in fp32 (fp64 if `dtype` is) and round it."""
    accumulator = torch.promote_types(torch.float32, dtype)
    return ((a.to(accumulator) @ b.to(accumulator).t()) * (a_unit * b_unit)).to(dtype)
