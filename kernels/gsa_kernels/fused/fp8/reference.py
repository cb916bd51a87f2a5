"""Defines products of FP8 matrices with one scale per matrix (tensorwise)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients."""
SMALLEST = 1e-30
"""The largest magnitude counts as at least this, so that a matrix of zeros has a finite scale."""


class Quantized(NamedTuple):
    """Holds an FP8 matrix [M, K]. It approximates `rows * inverse_scale`."""

    rows: torch.Tensor
    """[M, K], contiguous"""
    columns: torch.Tensor | None
    """The transpose [K, M], contiguous; None if not requested"""
    inverse_scale: torch.Tensor
    """Scale, fp32, 0-d"""


def attached(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a new fp32 tensor [count], stored as an attribute of x. Each of the `count` programs that write x puts its
    largest magnitude there."""
    largest = torch.empty(count, dtype=torch.float32, device=x.device)
    x.fp8_magnitudes = largest, x._version  # type: ignore[attr-defined]  # torch allows attributes of our own
    return largest


def with_same_largest(x: torch.Tensor) -> torch.Tensor:
    """Return what `attached` attached to x. If x has nothing attached or was changed since, return x itself.

    Only changes by torch's own operators are noticed, not changes by kernels, collectives or `.data`.
    """
    found = getattr(x, "fp8_magnitudes", None)
    return found[0] if found is not None and found[1] == x._version else x


def magnitudes(*tensors: torch.Tensor) -> torch.Tensor:
    """Return candidates for the largest magnitude of each tensor, int32 [tensors, any number].

    Candidates are the bits of fp32 numbers >= 0, read as integers. The integers sort like the numbers, with NaN above
    infinity. An integer maximum therefore keeps NaN, even across ranks.
    """
    return torch.stack([(x.float().view(torch.int32) & 0x7FFFFFFF).max()[None] for x in tensors])


def quantize(
    matrices: Sequence[torch.Tensor], bits: torch.Tensor, dtype: torch.dtype, transposes: Sequence[bool]
) -> list[Quantized]:
    """Round each matrix [M, K] to FP8, scaled so that its largest magnitude becomes the format's largest number.

    If a matrix contains NaN or infinity, its product is NaN everywhere.

    Args:
        bits: result of `magnitudes`
        transposes: for each matrix, whether to return the transpose, too
    """
    found = []
    for x, largest, transposed in zip(matrices, bits.amax(1), transposes, strict=True):
        amax = largest.view(torch.float32).clamp(min=SMALLEST)
        # A tensor, because torch multiplies by a rounded inverse instead of dividing by a number.
        limit = torch.full_like(amax, torch.finfo(dtype).max)
        rows = (x.float() * (limit / amax)).to(dtype)
        found.append(
            Quantized(rows.contiguous(), rows.t().contiguous() if transposed else None, amax / limit)
        )
    return found


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inverse_scale: torch.Tensor,
    b_inverse_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute a [M, K] @ b [N, K]^T * a_inverse_scale * b_inverse_scale in fp32 (fp64 if `dtype` is fp64),
    rounded to `dtype`."""
    accumulator = torch.promote_types(torch.float32, dtype)
    return ((a.to(accumulator) @ b.to(accumulator).t()) * (a_inverse_scale * b_inverse_scale)).to(dtype)
