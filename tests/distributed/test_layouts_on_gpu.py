"""Tests the layout comparison of `make layouts-gpu`: its verdict, and two of its layouts on CPU ranks."""

import json
import math
import re
from pathlib import Path

import pytest

from helpers.layouts_on_gpu import (
    BASELINE,
    FACTOR,
    FLOOR,
    LAYOUTS,
    METRICS,
    ONE_RANK,
    Series,
    Subject,
    allowed,
    deviations,
    judge,
    layouts_that_fit,
    main,
)
from helpers.runs import run_script

STEPS = 2


def series(*losses: float) -> Series:
    return [dict.fromkeys(METRICS, loss) for loss in losses]


def test_what_is_allowed_never_shrinks_in_a_phase_nor_below_any_phases_rounding() -> None:
    spread = [[0.0, 0.3, 0.1, 0.2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.1, 0.4, 0.0, *[0.0] * 5]]
    expected = [0.3, 0.3, 0.3, 0.4, 0.5]
    assert allowed(spread, steps=5) == pytest.approx([FACTOR * bound for bound in [*expected, *[0.3] * 5]])
    assert allowed([[0.0] * 4], steps=2) == [FLOOR] * 4


@pytest.mark.parametrize(("loss", "passes"), [(1.02, True), (1.1, False), (math.nan, False)])
def test_a_layout_fails_when_a_step_is_off(loss: float, passes: bool) -> None:
    one_rank = {BASELINE: series(1.0, 1.0, 1.0, 1.0), "other": series(1.0, 1.01, 1.0, 1.01)}
    row = judge(series(1.0, loss, 1.0, 1.0), one_rank, STEPS)
    assert row["passed"] is passes
    assert row["loss 2"]["deviation"] == 0


@pytest.mark.parametrize(("world_size", "tensor", "pipeline"), [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 4, 4)])
def test_the_layouts_that_fit(world_size: int, tensor: int, pipeline: int) -> None:
    for tiny in (True, False):
        configs = layouts_that_fit(world_size, Subject(tiny, "bf16"))
        assert max(config.parallel.tensor for config in configs.values()) == tensor
        assert max(config.parallel.pipeline for config in configs.values()) == pipeline
        left_out = {
            name for name in set(LAYOUTS) - set(configs) if "deepspeed" not in name
        }  # may not be installed
        # The tiny model has too few layers for four stages of two chunks.
        assert world_size < 8 or left_out == ({"pp 4, interleaved"} if tiny else set())


def test_layouts_need_no_package_that_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("gsa_train.config.checks.is_installed", lambda package: package != "wandb")
    assert set(layouts_that_fit(1, Subject(True, "bf16"))) >= {"dp", "dp, recompute full"}


def test_where_no_layout_fits_the_reason_of_each_is_told(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr("sys.argv", ["layouts_on_gpu.py", "--tiny"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "on 3 ranks no layout fits:" in said
    reasons = dict(re.findall(r"^  (.+?): (.+)$", said, re.MULTILINE))
    assert set(reasons) >= set(LAYOUTS)
    assert "train.global_batch_size = 8" in reasons["dp"]
    assert "parallel.tensor" in reasons["tp 2"]


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
