"""Compares the kernel that quantizes to FP8 with its definition. Products: tests/gpu/test_fp8_on_gpu.py."""

import pytest
import torch

pytest.importorskip("triton")

from gsa_kernels.devices import interpreted
from gsa_kernels.fused.fp8.op import fused_quantize
from gsa_kernels.fused.fp8.reference import E4M3, E5M2, largest, quantize

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("share", [1.0, 1 / 3])
def test_every_bf16_number_is_rounded_once(share: float, dtype: torch.dtype) -> None:
    """With share 1 numbers keep their value before rounding, so that ties occur. Triton's own cast rounds twice."""
    amax = torch.tensor(share * torch.finfo(dtype).max, device=DEVICE)
    x = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    x = x.where(x.abs() <= amax, 0)
    found, expected = (each(x, amax, dtype, "rows").rows for each in (fused_quantize, quantize))
    assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("layouts", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("content", ["130 x 80", "one row", "zeros", "tiny", "NaN", "infinity"])
def test_values_in_both_layouts(content: str, dtype: torch.dtype, layouts: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1 if content == "one row" else 130, 80) * torch.randn(80).exp()
    x[0, 5] = {"NaN": float("nan"), "infinity": float("inf")}.get(content, 1.0)
    x = (x * {"zeros": 0.0, "tiny": 1e-25}.get(content, 1.0)).to(DEVICE, torch.bfloat16)
    expected = quantize(x, largest(x), dtype, layouts)
    found = fused_quantize(x, largest(x), dtype, layouts)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
    if content in ("NaN", "infinity") and expected.rows is not None:
        assert expected.rows.float().isnan().any()
    if layouts == "both" and content == "130 x 80":
        assert expected.rows.float().abs().max() == torch.finfo(dtype).max
        assert torch.equal(found.rows.float(), found.columns.float().t())
