"""Tests the layout comparison of `make layouts-gpu` on CPU ranks."""

import json
from pathlib import Path

import pytest

from helpers.layouts_on_gpu import BASELINE, ONE_RANK, deviations
from helpers.runs import run_script


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
    command += ["--json", str(report), "--only", *layouts]
    output = run_script(command, tmp_path / "log", ranks=2)
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
