"""Tests the benchmarks' harness: its output, and, on a GPU, its measurements."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import harness
import pytest
import torch


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", [str(harness.ROOT / "benchmarks/bench_some.py"), "--out", str(tmp_path)])
    return harness.parser(None).parse_args()


def read(folder: Path) -> dict:
    return json.loads((folder / "some.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_report_is_complete_after_every_row(arguments: argparse.Namespace, tmp_path: Path) -> None:
    report = harness.Report("some", arguments)
    report.row(shape="7B", length=4096, ms=1.5)
    content = read(tmp_path)
    assert content["rows"] == [{"shape": "7B", "length": 4096, "ms": 1.5}]
    assert content["command"].startswith("python benchmarks/bench_some.py --out")
    assert set(content["environment"]) >= {"commit", "gpu", "torch", "triton", "cudnn"}
    report.row(part="scores", ms=float("nan"))  # other columns are allowed
    assert read(tmp_path)["rows"][1] == {"part": "scores", "ms": None}
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


def test_bars_and_failures(arguments: argparse.Namespace, tmp_path: Path) -> None:
    report = harness.Report("some", arguments)
    report.bar("fast", 2.5, at_least=2)
    report.bar("small", 2.5, at_most=2)
    report.bar("not a number", float("nan"), at_most=2)
    assert [bar["met"] for bar in read(tmp_path)["bars"]] == [True, False, False]
    assert report.finish() == 0, "a missed bar is not a failure"
    with pytest.raises(ValueError, match="at_least and at_most"):
        report.bar("both", 1.0, at_least=1, at_most=2)
    report.fail("wrong gradients")
    assert report.finish() == 1
    assert read(tmp_path)["failures"] == ["wrong gradients"]


@pytest.mark.parametrize(("estimate", "runs"), [(1000.0, 3), (50.0, 4), (0.01, 200), (0.0, 200)])
def test_runs_fit_the_budget(estimate: float, runs: int) -> None:
    assert harness.count_runs(estimate, 200, 3) == runs
    shares = harness.share_rounds(runs, 5)
    assert sum(shares) == runs
    assert max(shares) - min(shares) <= 1


def test_the_median_and_how_sure_it_is() -> None:
    """The error agrees with theory for normal values, and one outlier changes little."""
    generator = torch.Generator().manual_seed(0)
    samples = (3 + 0.1 * torch.randn(400, 25, generator=generator, dtype=torch.float64)).tolist()
    found = [harness.median_and_error(values) for values in samples]
    scatter = torch.tensor([middle for middle, _ in found]).std().item()
    claimed = torch.tensor([error for _, error in found]).mean().item()
    assert claimed == pytest.approx(scatter, rel=0.15)
    values = samples[0]
    middle, error = harness.median_and_error([*values[1:], 100.0])
    assert middle == pytest.approx(found[0][0], abs=0.05)
    assert error < 2 * found[0][1]


def test_finite() -> None:
    harness.require_finite("good", [torch.ones(2)])
    with pytest.raises(ArithmeticError, match="bad: result 1"):
        harness.require_finite("bad", [torch.ones(2), torch.tensor([1.0, float("nan")])])


def test_what_is_called_before_a_run_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, **_: bool) -> None: ...

        def record(self) -> None:
            calls.append("event")

        def elapsed_time(self, _: "Event") -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = {name: partial(calls.append, name) for name in ("with", "without")}
    before = {"with": partial(calls.append, "before")}
    times = harness.measure(runs, budget_ms=7, flush_l2=False, compiled=True, before=before)
    assert times == {"with": 1.0, "without": 1.0}
    runs_of_each = 7 + 1 + 3  # plus the runs that estimate its time
    text = " ".join(calls)
    for run in ("before event with event", "event without event"):
        assert text.count(run) == runs_of_each
        text = text.replace(run, "")
    assert not text.strip()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measures() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = harness.measure({"one": lambda: a @ a, "three": lambda: a @ a @ a @ a}, budget_ms=50)
    assert 2 < times["three"] / times["one"] < 4

    x = torch.randn(4096, device="cuda", requires_grad=True)
    grad = torch.empty_like(x)

    def run() -> None:
        grad.copy_(torch.autograd.grad((x * x).sum(), x)[0])

    replay = harness.capture(run)
    with torch.no_grad():
        x.fill_(3)
    replay()
    assert torch.equal(grad, torch.full_like(x, 6))

    peak, result = harness.peak_bytes(lambda: torch.ones(2**20, device="cuda"))
    assert peak == result.nbytes
