"""Tests what a test reports about ranks that fail: which ended first, how, and where it was."""

import os
import re
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from helpers.forked import ForkedRanks
from helpers.runs import ENVIRONMENT, SHOWN, inherited, run_script, shown

CODE = """
import atexit, os, time

def waits_for_others():
    open(__file__ + os.environ["RANK"], "w").close()
    time.sleep(1000)

def fails():
    {fault}

if os.environ["RANK"] == "1":
    fails()
waits_for_others()
"""


def said_of(fault: str, folder: Path) -> str:
    script = folder / "code.py"
    script.write_text(CODE.format(fault=fault))
    with pytest.raises(AssertionError) as raised:
        run_script([str(script)], folder / "log", ranks=3)
    return str(raised.value)


def test_a_rank_that_raises_says_so_before_it_waits_for_others(tmp_path: Path) -> None:
    """During its exit another rank's error may end it, which would then be reported as the first."""
    said = said_of("atexit.register(os._exit, 3); raise ValueError('a reason')", tmp_path)
    assert said.startswith("rank 1 ended with exit code 3, expected 0:\n")
    assert "in fails" in said
    assert "ValueError: a reason" in said


def test_a_rank_that_aborts_says_where(tmp_path: Path) -> None:
    """A rank aborts if C++ throws in a thread or a library has a bug."""
    said = said_of("os.abort()", tmp_path)
    assert said.startswith("rank 1 ended by SIGABRT, expected 0:\n")
    assert re.search("Fatal Python error: Aborted\n.* in fails", said, re.DOTALL)


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    """The system kills a rank without output if memory runs out."""
    assert said_of("os.kill(os.getpid(), 9)", tmp_path).startswith("rank 1 ended by SIGKILL, expected 0:\n")


def test_ranks_that_hang_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(ranks: ForkedRanks, seconds: float) -> int:
        while len(list(tmp_path.glob("code.py?"))) < 3:
            assert ranks.poll() is None
            time.sleep(0.01)
        raise TimeoutError

    monkeypatch.setattr(ForkedRanks, "wait", wait)
    said = said_of("waits_for_others()", tmp_path)
    assert said.startswith("not over after 1500 s:\n")
    assert said.count("in waits_for_others") == 3
    assert said.count("in fails") == 1


def test_no_signal_goes_to_ranks_that_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code.py").touch()
    environment = {**inherited(), **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    command, log = [str(tmp_path / "code.py")], tmp_path / "log"
    ranks = ForkedRanks(command, tmp_path, environment, {}, log, ranks=2, rendezvous=True)
    # The server writes how each rank ended some time after its end. Nothing has read it yet.
    for process in ranks._processes:
        assert connection.wait([process.sentinel], 100)
    sent: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    ranks._end()
    assert sent == []


def test_the_first_error_is_shown_however_much_follows() -> None:
    error = "[rank2]: Traceback (most recent call last):\n[rank2]: ValueError: a reason\n"
    before, after = "warning\n" * SHOWN, "Traceback (most recent call last):\nlost a peer\n" * SHOWN
    assert shown(before + error + after).startswith(error)
    assert shown(before + error + after).endswith(after[-SHOWN:])
    assert shown(before + error + "the end") == (before + error + "the end")[-SHOWN:]
    assert shown(error + before[-SHOWN:]) == error + before[-SHOWN:]
    assert shown(error) == error
    assert shown("") == ""
