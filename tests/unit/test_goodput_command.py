"""Tests launch/goodput.py: the lost time of a run, and errors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gsa_train.commands import goodput
from gsa_train.process.exit_codes import REFUSED

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
    (folder / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
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


def test_folders_without_an_account_are_refused(tmp_path: Path, called: Called) -> None:
    code, said = called("--run", tmp_path)
    assert (code, f"{tmp_path}: no goodput.jsonl with steps in it" in said) == (REFUSED, True)
