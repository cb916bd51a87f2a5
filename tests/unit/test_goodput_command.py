"""Tests launch/goodput.py: the lost time of a run, the simulation of a run, and errors."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gsa_train.commands import goodput
from gsa_train.config import config_to_yaml
from gsa_train.planning.goodput import measure
from gsa_train.planning.goodput.measure import NoAccount, again_in_fast_motion, measure_run
from gsa_train.planning.goodput.simulate import Parts
from gsa_train.process.exit_codes import REFUSED
from helpers.single_rank import SPARSE, tiny_config

EVERY = 50
Called = Callable[..., tuple[int, str]]


def line(kind: str, at: float, step: int, more: Any = None, **seconds: float) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": at, "phase": "sparse", "seconds": seconds, **(more or {})}


def write_run(folder: Path) -> Path:
    """Write the files of a run with one fault. The start-up takes 10 s, the first step 6 s and other steps 1 s.

    Each save stalls the run for 2 s and is durable after 4 s. The fault comes after the second save and is detected 6 s
    later. The next start begins after 3 s. At its end the run waits until the last save is durable.
    """
    folder.mkdir(parents=True)
    up = {"import": 10.0}
    lines = [
        line("start", 1010, 0, {"began": 1000}, **up),
        line("steps", 1016, 1, **up, first_step=6.0),
        line("steps", 1065, 50, **up, first_step=6.0, training=49.0),
        line("steps", 1117, 100, **up, first_step=6.0, training=99.0, save=2.0),
        line("lost", 1139, 118, {"progress": 1133}, **up, first_step=6.0, training=113.0, save=4.0),
        line("start", 1152, 100, {"began": 1142}, **up),
        line("steps", 1158, 101, **up, first_step=6.0),
        line("end", 1211, 150, {"reason": "complete"}, **up, first_step=6.0, training=49.0, save=4.0),
    ]
    records: list[dict[str, Any]] = [{"step": 50, "phase": "sparse", "loss": 2.5, "ettr": 0.5}]
    records += [
        {"event": "checkpoint", "step": step, "phase": "sparse", "checkpoint_save_seconds": 4.0}
        for step in (50, 100)
    ]
    for name, content in (("goodput.jsonl", lines), ("metrics.jsonl", records)):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in content))
    config = tiny_config([SPARSE], checkpoint={"every_steps": EVERY})
    (folder / "config.yaml").write_text(config_to_yaml(config))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("measured") / "run")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """Run the command; return its exit code, and its output with single spaces."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["goodput.py", *map(str, arguments)])
        try:
            code = goodput.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, re.sub(" +", " ", "".join(capsys.readouterr()))

    return call


def test_the_parts_of_a_run_match_its_account(run: Path) -> None:
    measured = measure_run(run)
    assert measured.interval_steps == EVERY
    assert measured.parts == {
        "step_seconds": 1.0,
        "stall_seconds": (2 + 2 + 4) / 3,
        "durable_seconds": 4.0,
        "start_up_seconds": 15.0,
        "detection_seconds": 6.0,
        "down_seconds": 3.0,
        "extra_share": 0.0,
    }


def test_a_stall_is_also_what_updates_wait_for_copies(run: Path) -> None:
    account = measure_run(run).account
    held = dataclasses.replace(account, lost_seconds={**account.lost_seconds, "copies": 3.0})
    assert measure._parts(held, run / "metrics.jsonl")["stall_seconds"] == (2 + 2 + 4 + 3) / 3


def test_the_same_faults_in_fast_motion_give_the_runs_ettr(run: Path) -> None:
    measured = measure_run(run)
    assert measured.account.wall_seconds == 211
    assert measured.account.productive_seconds == 150
    found = again_in_fast_motion(measured, Parts(**measured.parts))
    assert found.ettr == pytest.approx(measured.account.ettr, abs=0.02)
    assert (found.wall, found.faults, found.start_up) == (211, 1, 30)
    assert (found.detection, found.down) == (6, 3)
    assert found.repeated == pytest.approx(14, abs=2)  # the first two saves took less than the mean


def test_the_account_of_a_run(run: Path, called: Called) -> None:
    code, said = called("--run", run)
    assert code == 0
    for row in (
        f"{run}: ETTR 71.09% over 3m31s and 2 starts",
        "productive 2m30s 71.09%",
        "steps done again 14s 6.64%",
        "1 0 0.0s 10s lost 118 6.0s 18",
    ):
        assert row in said
    simulated = re.search(r"simulated with the mean of everything else: ETTR ([\d.]+)%\n$", said)
    assert abs(float(simulated[1]) - 71.09) < 2


def test_a_plan_says_where_its_parts_come_from(run: Path, called: Called) -> None:
    quick = ("--days", "3", "--trials", "4", "--gpus", "16", "--mtbf-hours", "40")
    code, measured = called(*quick, "--run", run, "--down-seconds", "30")
    assert code == 0
    for row in (
        "16 GPUs, a fault of each every 40 h: of the run every 2h30m\n4 runs of 3 days simulated, with",
        "step 1 s measured",
        "down 30 s given",
        f"with one every {EVERY} steps (50s): ETTR 9",
        "Young, sqrt(2 C M): 3m39s of work; Daly: 3m37s",
    ):
        assert row in measured
    code, alone = called(*quick, "--checkpoint-seconds", "40", "--interval-steps", "77")
    assert code == 0
    rows = ("durable 40 s as long as the stall", "down 60 s default", "every 77 steps (1m17s)")
    assert [row for row in rows if row not in alone] == []
    again = called(*quick, "--checkpoint-seconds", "40", "--interval-steps", "77")
    assert again == (0, alone)  # the seed's result


ONE = "--gpus 1 --mtbf-hours 1"
REFUSED_WORDS = [
    ("", "give --run DIR, or --gpus N with --mtbf-hours H"),
    ("--gpus 8", "--gpus and --mtbf-hours go together"),
    ("--run some --interval-steps 5", "--interval-steps needs --gpus"),
    ("--gpus 0 --mtbf-hours 1", "--gpus 0: not above 0; give a number above 0"),
    ("--gpus 1 --mtbf-hours nan", "--mtbf-hours nan: not above 0"),
    (f"{ONE} --down-seconds -1", "--down-seconds -1.0: negative"),
    (f"{ONE} --trials 1", "--trials 1: too few"),
    (
        f"{ONE} --checkpoint-seconds 9 --durable-seconds 8",
        "--durable-seconds 8.0: below --checkpoint-seconds 9.0",
    ),
    # The hours of a whole cluster, mistaken for one GPU's, would take minutes to simulate.
    ("--gpus 4096 --mtbf-hours 5", "of 4096 GPUs one then has a fault every 4.39 s"),
    # 7 faults a month, and its end
    (f"--gpus 9 --mtbf-hours 925.714285714 --trials {10**12}", "fewer trials, at most 62499, or fewer days"),
    ("--gpus 9 --mtbf-hours 925.714285714 --days 1e300", "faults to simulate, more than 500000"),
    ("--run none", "none: no goodput.jsonl with steps in it; give the folder of a run"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED_WORDS)
def test_what_is_refused(words: str, expected: str, called: Called) -> None:
    code, said = called(*words.split())
    assert code == REFUSED
    assert expected in said


def test_folders_without_an_account_are_refused(run: Path, tmp_path: Path, called: Called) -> None:
    (tmp_path / "goodput.jsonl").write_text((run / "goodput.jsonl").read_text())
    with pytest.raises(NoAccount, match=r"config\.yaml cannot be read \(.*\); copy it from a checkpoint"):
        measure_run(tmp_path)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    for make in (lambda: None, (tmp_path / "metrics.jsonl").touch):
        make()
        with pytest.raises(NoAccount, match=r"metrics\.jsonl: missing or empty, though the run has saved"):
            measure_run(tmp_path)
    (tmp_path / "goodput.jsonl").unlink()
    (tmp_path / "goodput.jsonl").mkdir()
    code, said = called("--run", tmp_path)
    assert (code, f"{tmp_path}: no goodput.jsonl with steps in it" in said) == (REFUSED, True)
