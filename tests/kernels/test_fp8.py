"""Compares the kernels that quantize to FP8 with their definition. Products: tests/gpu/test_fp8_on_gpu.py."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gsa_kernels.devices import interpreted
from gsa_kernels.fused.fp8 import op
from gsa_kernels.fused.fp8.op import fused_magnitudes, fused_quantize
from gsa_kernels.fused.fp8.reference import E4M3, E5M2, Quantized, magnitudes, quantize, with_same_largest
from gsa_kernels.fused.swiglu.op import fused_swiglu

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]

BOTH = [E4M3, E5M2]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one. Some programs then take several blocks."""
    if interpreted():
        monkeypatch.setattr(op, "PARTS", 4)
        monkeypatch.setattr(op, "BLOCK", 1024)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.float().nan_to_num(nan=1e9).view(torch.int32)


def check(matrices: list[torch.Tensor], dtype: torch.dtype, transposes: tuple[bool, ...]) -> list[Quantized]:
    """Compare the bits, except the sign of NaN, and return what the kernels find."""
    candidates = fused_magnitudes(*matrices)
    largest, defined = (each.amax(1).view(torch.float32) for each in (candidates, magnitudes(*matrices)))
    assert torch.equal(bits(largest), bits(defined))
    found = fused_quantize(matrices, candidates, dtype, transposes)
    for ours, theirs, transposed in zip(
        found, quantize(matrices, candidates, dtype, transposes), transposes, strict=True
    ):
        assert torch.equal(bits(ours.rows), bits(theirs.rows))
        assert torch.equal(bits(ours.inverse_scale), bits(theirs.inverse_scale))
        assert (ours.columns is not None) == transposed
        if ours.columns is not None:
            assert torch.equal(bits(ours.columns), bits(ours.rows).t())
    return found


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("share", [1.0, 1 / 3])
def test_every_bf16_number_is_rounded_once(share: float, dtype: torch.dtype) -> None:
    """With share 1 numbers keep their value before rounding, so that ties occur."""
    amax = share * torch.finfo(dtype).max
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(-1, 256)
    x = x.where(x.abs() <= amax, 0)
    x[0, 0] = amax
    (found,) = check([x], dtype, (True,))
    assert found.rows.float().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("transposes", [(False, True), (True, False)])
def test_two_matrices_at_once(transposes: tuple[bool, bool], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(144, 80) * torch.randn(80).exp(), torch.randn(16, 208)
    check([each.to(DEVICE, torch.bfloat16) for each in (x, w)], dtype, transposes)


@pytest.mark.parametrize("count", [1, 6, 131])
def test_any_number_of_rows_without_a_transpose(count: int) -> None:
    torch.manual_seed(0)
    check([torch.randn(count, 80, device=DEVICE, dtype=torch.bfloat16)], E4M3, (False,))


@pytest.mark.parametrize("content", ["zeros", "tiny", "NaN", "infinity"])
def test_numbers_without_a_scale(content: str) -> None:
    """Zeros stay zeros. One NaN or infinity makes the whole product NaN, so that the loss shows it."""
    x = torch.randn(32, 48) * {"zeros": 0.0, "tiny": 1e-35}.get(content, 1.0)
    x[3, 5] = {"NaN": float("nan"), "infinity": float("inf")}.get(content, 0.0)
    (found,) = check([x.to(DEVICE, torch.bfloat16)], E4M3, (True,))
    values = found.rows.float() * found.inverse_scale
    assert values.isnan().all() if content in ("NaN", "infinity") else values.abs().max() < 1e-34


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(grad)
        return grad, None


@pytest.mark.parametrize("content", ["numbers", "NaN"])
def test_swiglu_finds_the_largest_of_what_it_writes(content: str) -> None:
    """A layer in FP8 gets them with the result, and the layer before with the gradient."""
    torch.manual_seed(0)
    x, grad = (torch.randn(6, 3, width, device=DEVICE, dtype=torch.bfloat16) for width in (1100, 550))
    if content == "NaN":
        x[2, 1, 7] = grad[5, 1, 3] = float("nan")
    seen: list[torch.Tensor] = []
    out = fused_swiglu(_Watched.apply(x.requires_grad_(), seen), for_fp8=True)
    out.backward(grad)
    for tensor in (out.detach_(), *seen):
        largest = with_same_largest(tensor)
        assert largest.numel() < tensor.numel() / 100
        assert torch.equal(*(bits(magnitudes(each).view(torch.float32)) for each in (largest, tensor)))
    out += 1
    assert with_same_largest(out) is out


def test_shapes_that_the_kernels_do_not_take_are_named() -> None:
    x = torch.zeros(24, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"shape .24, 32.*a multiple of 16"):
        fused_quantize([x], fused_magnitudes(x), E4M3, (True,))
    with pytest.raises(ValueError, match=r"strides .1, 32.*contiguous"):
        fused_magnitudes(x.t())
