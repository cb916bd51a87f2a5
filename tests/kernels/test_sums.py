"""Compares sums that are added to existing values with torch in fp64."""

import pytest
import torch

pytest.importorskip("triton")

from gsa_kernels.devices import interpreted
from gsa_kernels.fused.sums import op

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]


@pytest.mark.parametrize("shape", [(1,), (0,), (7, 9), (3, 50), (2, 64)])
def test_total(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms have both signs, so that fp32 would lose most digits. Sizes are below, at and above a block."""
    monkeypatch.setattr(op, "BLOCK", 64)
    torch.manual_seed(0)
    values = torch.randn(shape, device=DEVICE) * 1e4
    total = torch.tensor(2.0**-20, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        op.add_total(values, total)
    torch.testing.assert_close(total, 2.0**-20 + 2 * values.double().sum(), rtol=1e-13, atol=1e-11)


def test_total_of_what_is_no_number() -> None:
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    op.add_total(torch.tensor([1.0, float("nan")], device=DEVICE), total)
    assert total.isnan()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (1, 1, torch.float32),
        (0, 3, torch.bfloat16),
        (33, 40, torch.bfloat16),
        (300, 70, torch.float32),
        (300, 70, torch.bfloat16),
        (64, 32, torch.float32),
    ],
)
def test_column_sums(rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take all columns or some, and up to five stretches of rows, the last one short."""
    monkeypatch.setattr(op, "COLUMNS", 32)
    monkeypatch.setattr(op, "PROGRAMS", 12)
    monkeypatch.setattr(op, "MOST_PARTS", 5)
    torch.manual_seed(0)
    values = torch.randn(rows, columns, device=DEVICE).to(dtype)
    before = torch.randn(columns, device=DEVICE)
    sums = before.clone()
    op.add_column_sums(values, sums)
    torch.testing.assert_close(sums.double(), before.double() + values.double().sum(0), rtol=1e-6, atol=1e-5)
    again = before.clone()
    op.add_column_sums(values, again)
    assert torch.equal(again, sums)


def test_gaps_in_the_inputs() -> None:
    wide = torch.randn(6, 8, device=DEVICE)
    sums, total = torch.zeros(6, device=DEVICE), torch.zeros((), dtype=torch.float64, device=DEVICE)
    op.add_column_sums(wide[:, :5].t(), sums)
    torch.testing.assert_close(sums, wide[:, :5].sum(1))
    op.add_total(wide[:, :5], total)
    torch.testing.assert_close(total, wide[:, :5].double().sum())


def test_bad_inputs() -> None:
    rows, sums = torch.zeros(4, 6, device=DEVICE), torch.zeros(6, device=DEVICE)
    with pytest.raises(ValueError, match=r"sums has shape .*pass.*\[C\]"):
        op.add_column_sums(rows, sums[:5])
    with pytest.raises(ValueError, match=r"rows has dtype torch\.float64; pass bfloat16"):
        op.add_column_sums(rows.double(), sums)
    with pytest.raises(ValueError, match=r"sums is torch\.float32 with strides \(2,\)"):
        op.add_column_sums(rows, torch.zeros(12, device=DEVICE)[::2])
    with pytest.raises(ValueError, match=r"sums is torch\.bfloat16"):
        op.add_column_sums(rows, sums.bfloat16())
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"values is torch\.bfloat16"):
        op.add_total(rows.bfloat16(), total)
    with pytest.raises(ValueError, match=r"and total torch\.float32"):
        op.add_total(rows, total.float())
    with pytest.raises(ValueError, match=r"total has shape \(2,\); pass 0-d"):
        op.add_total(rows, torch.zeros(2, dtype=torch.float64, device=DEVICE))
