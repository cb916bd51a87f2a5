"""Tests the layout comparison of `make layouts-gpu`: its verdict, and two of its layouts on CPU ranks."""

import json
import math
from pathlib import Path

import pytest

from helpers.layouts_on_gpu import BASELINE, METRICS, ONE_RANK, deviations, judge
from helpers.runs import run_script


@pytest.mark.parametrize(("loss", "passes"), [(1.02, True), (1.1, False), (math.nan, False)])
def test_a_layout_fails_when_a_step_is_off(loss: float, passes: bool) -> None:
    def series(*losses: float) -> list[dict[str, float]]:
        return [dict.fromkeys(METRICS, each) for each in losses]

    one_rank = {BASELINE: series(1.0, 1.0, 1.0, 1.0), "other": series(1.0, 1.01, 1.0, 1.01)}
    row = judge(series(1.0, loss, 1.0, 1.0), one_rank, 2)
    assert row["passed"] is passes
    assert row["loss 2"]["deviation"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ([], ["tp 2, sp", "pp 2"]),
        (["--experts"], ["ep 2", "tp 2, sp, ep 2", "tp 2, sp, etp 2", "cp 2, ep 2"]),
    ],
)
def test_layouts_in_bf16_on_two_ranks(options: list[str], layouts: list[str], tmp_path: Path) -> None:
    report = tmp_path / "layouts.json"
    command = ["tests/helpers/layouts_on_gpu.py", "--tiny", *options, "--steps", "1"]
    command += ["--sequences", "4", "--json", str(report)]  # two for each of two replicas
    output = run_script([*command, "--only", *layouts], tmp_path / "log", ranks=2)
    found = json.loads(report.read_text())
    assert set(found["one_rank"]) == set(ONE_RANK)
    assert list(found["layouts"]) == layouts
    for row in found["layouts"].values():
        assert row["passed"]
        assert len(row["series"]) == 2  # one step of each phase; many_layouts.py tests further steps
    # bf16 rounds, which the runs of one rank show: the bounds exceed the floor.
    off = deviations(found["one_rank"]["products in 2 parts"], found["one_rank"][BASELINE], "grad_norm")
    assert 1e-5 < max(off) < 1e-1
    assert output.count(" ok\n") == len(layouts)
