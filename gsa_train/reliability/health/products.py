"""Compute matrix products whose result is known bit for bit, for any order of the sums.

The factors are A = [X, X, a s^T] and B = [Y; -Y; s b^T]. X and Y are random matrices of integers, a and b are random
vectors of integers, and s is a vector of random signs.

In the product A B, the terms X Y and -X Y cancel, so A B = (s^T s) a b^T. The factor s^T s is the number of elements
of s, a power of two. Every partial sum is an integer below 2^24, so fp32 holds it exactly, whatever the order.
bf16 holds the elements of the result exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

LARGEST = 7
"""Largest random integer. Sums of 4096 products stay below 2^18."""
FACTORS = (1.0, 2.0, 3.0, -1.0, -2.0, -3.0)
"""Values of a and b. Their products times a power of two have at most four significant bits."""
CHECKED_ROWS = 64
"""Rows of a result that the host compares, because a bad device may also compare wrongly."""


@dataclass(frozen=True)
class Problem:
    a: torch.Tensor
    """[size, 2 x inner + signs]"""
    b: torch.Tensor
    """[2 x inner + signs, size]"""
    expected: torch.Tensor
    """[size, size], the product a b, in the type and on the device of a."""
    expected_rows: torch.Tensor
    """The first CHECKED_ROWS rows of `expected`, computed on the host."""


def make_problem(size: int, inner: int, signs: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """
    Args:
        signs: length of s; a power of two.
    """
    assert signs & (signs - 1) == 0, signs
    generator = torch.Generator().manual_seed(size)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator).float()

    def factors() -> torch.Tensor:
        return torch.tensor(FACTORS)[torch.randint(len(FACTORS), (size,), generator=generator)]

    x, y, s = integers(size, inner), integers(inner, size), 2 * (integers(signs) > 0).float() - 1
    a, b = factors(), factors()
    left = torch.cat([x, x, a[:, None] * s], dim=1)
    right = torch.cat([y, -y, s[:, None] * b], dim=0)
    expected = signs * a[:, None] * b
    rows = expected[:CHECKED_ROWS].to(dtype).clone()
    return Problem(left.to(device, dtype), right.to(device, dtype), expected.to(device, dtype), rows)


def multiply(problem: Problem) -> torch.Tensor:
    return problem.a @ problem.b


def wrong_products(problem: Problem, seconds: float, least: int) -> tuple[int, int]:
    """Multiply repeatedly for `seconds`, and at least `least` times.

    Returns:
        Numbers of wrong elements and of products.
    """
    device, count = problem.a.device, 0
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False  # cuBLAS might add up parts of a sum in bf16
    try:
        wrong, result = torch.zeros((), dtype=torch.int64, device=device), problem.expected
        deadline = time.monotonic() + seconds
        while count < least or time.monotonic() < deadline:
            result = multiply(problem)
            wrong += (result != problem.expected).sum()  # NaN counts as wrong
            count += 1
            if count % 32 == 0 and device.type == "cuda":
                torch.cuda.synchronize(device)  # the loop then measures the device's time
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    on_host = int((result[:CHECKED_ROWS].cpu() != problem.expected_rows).sum())
    return int(wrong) + on_host, count
