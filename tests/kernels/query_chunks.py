"""Compares results of a chunk of queries with the same rows of a whole sequence."""

import torch
from kernel_devices import CUDA


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check equal bits where sums run in the same order; compiled code may fuse products with sums differently."""
    assert got.dtype == want.dtype
    if CUDA and got.is_floating_point():
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)
    else:
        assert torch.equal(got, want)
