"""Compares the squared norm of AdamW's update, which one pass computes, with the reference."""

import pytest
import torch

from gsa_kernels.fused.adamw.reference import squared_update

pytest.importorskip("triton")

from gsa_kernels.devices import interpreted
from gsa_kernels.fused.adamw import op

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_one_pass_gives_the_sum(decay, weight_dtype, monkeypatch):
    """Parameters are smaller than one program's block, or larger than all programs' blocks."""
    monkeypatch.setattr(op, "ELEMENTS", 64)
    monkeypatch.setattr(op, "MAX_PROGRAMS", 3)
    torch.manual_seed(0)
    shapes = [(), (1,), (0,), (5, 13), (64, 9)]
    weights = [torch.randn(shape, device=DEVICE).to(weight_dtype) for shape in shapes]
    averages = [1e-3 * torch.randn(shape, device=DEVICE) for shape in shapes]
    squares = [1e-6 * torch.rand(shape, device=DEVICE) for shape in shapes]
    rate, eps = torch.tensor(1.25, device=DEVICE), torch.tensor(2e-5, device=DEVICE)
    found = op.squared_updates(weights, averages, squares, rate, eps, decay)
    parts = zip(weights, averages, squares, strict=True)
    expected = sum(squared_update(*part, rate, eps, decay) for part in parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found.dtype == torch.float64


def test_other_shapes_are_refused() -> None:
    weight, rate = torch.zeros(4, 4, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    with pytest.raises(ValueError, match="exp_avgs has"):
        op.squared_updates([weight], [weight[:2]], [weight], rate, rate, 0.0)
    with pytest.raises(ValueError, match="gaps"):
        op.squared_updates([weight.t()[:, :2]], [weight[:, :2]], [weight[:, :2]], rate, rate, 0.0)
