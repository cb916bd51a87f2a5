"""Tests the check of a CUDA device before a run: a healthy device has no fault, and a faulty one is named by UUID."""

import pytest
import torch

from gsa_train.reliability.health import products
from gsa_train.reliability.health.check import check_device, check_presence

DEVICE = torch.device("cuda", 0)


def test_a_healthy_device_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_presence()
    found = check_device(DEVICE, 0, seconds=2.0)
    assert found.faults == []
    assert found.uuid.startswith("GPU-")
    assert torch.cuda.memory_reserved(DEVICE) < 4 << 30  # the written memory is freed


def test_a_wrong_product_and_an_error_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = products.multiply

    def wrong(problem: products.Problem) -> torch.Tensor:
        result = multiply(problem)
        result[-1, -1] += 1
        return result

    with monkeypatch.context() as patched:
        patched.setattr(products, "multiply", wrong)
        words = check_device(DEVICE, 0, seconds=0.1).in_words()
    assert "wrong elements in" in words
    assert words.startswith("GPU 0 (GPU-")

    def fails(problem: products.Problem) -> torch.Tensor:
        return problem.a @ problem.a  # shapes that do not fit, for an error from cuBLAS

    monkeypatch.setattr(products, "multiply", fails)
    (fault,) = check_device(DEVICE, 0, seconds=0.1).faults
    assert fault.startswith("its check failed: ")


def test_more_local_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    monkeypatch.delenv("GSA_SUBMISSION", raising=False)
    with pytest.raises(ValueError, match="has no GPU of its own"):
        check_presence()
