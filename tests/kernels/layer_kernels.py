"""Provides what tests of elementwise kernels share: buffers of NaN, outputs and gradients, and errors."""

import pytest
import torch
from poison import poisoned

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill new buffers with NaN, which reveals elements that are never written."""
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def relative_error(found, expected):
    scale = expected.double().norm().clamp(min=1e-30)
    return float((found.double() - expected.double()).norm() / scale)


def assert_as_good(found, plain, exact, dtype):
    """Check that the error of `found` is at most twice the error of `plain`, or at most a few units in the last place
    of `dtype`. Errors are relative to `exact`."""
    floor = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, truth) <= max(2 * relative_error(other, truth), floor / 4)


def run(function, leaves, grads):
    """Return outputs and gradients of a function of some leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]
    gradients = torch.autograd.grad(
        outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    )
    return [out.detach() for out in outputs] + list(gradients)


def compare(kernel, plain, leaves, grads):
    """Check that two runs of the kernel agree in bits, and match the reference. Return outputs and gradients."""
    found, again = (run(kernel, leaves, grads) for _ in range(2))
    exact = run(plain, [leaf.double() for leaf in leaves], grads)
    assert_as_good(found, run(plain, leaves, grads), exact, leaves[0].dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return found
