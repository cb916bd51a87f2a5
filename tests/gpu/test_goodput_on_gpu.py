"""Tests that compilation within a step is noticed on a CUDA device."""

import pytest
import torch
import triton
import triton.language as tl

from gsa_train.reliability.hang_limit import watch_compilation


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
