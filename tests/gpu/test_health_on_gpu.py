"""Tests that the check before a run names a faulty CUDA device by UUID. The watchdog must notice
compilation."""

import pytest
import torch
import triton
import triton.language as tl

from gsa_train.reliability.hang_limit import watch_compilation
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


@triton.jit
def fill(out, value: tl.constexpr):
    tl.store(out + tl.program_id(0), value)


def test_triton_tells_when_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    told: list[bool] = []
    watch_compilation(told.append)
    out = torch.zeros(4, device="cuda")
    fill[(4,)](out, 7)
    fill[(4,)](out, 7)
    assert told == [True, False]  # the second launch compiles nothing
    fill[(4,)](out, 9)
    assert told == [True, False, True, False]
    assert out.tolist() == [9.0] * 4
