"""Tests that real runs complete although their console fails, and that runs that get a signal save. The signals include
a hang-up of the terminal, with and without nohup, and Ctrl-C while a reader runs."""

import contextlib
import json
import os
import pty
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gsa_train.reliability.stop_signals import STOP_SIGNALS
from helpers.runs import CONFIG, ENVIRONMENT, MARK, REPOSITORY, Run, inherited, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
LONG = ("phases.0.steps=5000", "checkpoint.every_steps=100000")
CONSOLES = {"full disk": "{run} >/dev/full 2>&1", "no reader reads": "{run} 2>&1 | sleep 1000"}
"""tests/unit/test_console.py has more."""


class Terminal:
    """Holds a separate shell in a separate terminal, with a run in the foreground."""

    def __init__(self, folder: Path, ranks: int, console: str, overrides: tuple[str, ...]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = [sys.executable, *(torchrun if ranks else [])]
        words += ["launch/pretrain.py", "--config", CONFIG, f"run.dir={folder}", "run.name=run", *overrides]
        self.folder, self.leader = folder, -1
        pid, self.leader = pty.fork()
        if pid == 0:
            os.chdir(REPOSITORY)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            mark = {MARK: str(folder)}
            line = console.format(run=shlex.join(words))
            os.execvpe("bash", ["bash", "-c", f"{line}; exit $?"], {**inherited(), **ENVIRONMENT, **mark})
        os.set_blocking(self.leader, False)
        self.shell = psutil.Process(pid)
        self.run = Run(folder / "run", None, folder / "nothing", str(folder))  # type: ignore[arg-type]
        self.said = b""
        self.wait_for("begun")

    def read(self) -> None:
        with contextlib.suppress(OSError):  # there is no output
            self.said += os.read(self.leader, 1 << 16)

    def wait_for(self, what: str, seconds: float = 200) -> None:
        """Wait for `begun`, `steps` or `over`."""
        deadline = time.monotonic() + seconds
        reached = {
            "begun": lambda: self.living(),
            "steps": lambda: len(self.run.steps()) >= 3,
            "over": lambda: not self.living(),
        }
        while not reached[what]():
            assert time.monotonic() < deadline, (what, self.said.decode(errors="replace")[-3000:])
            if self.leader >= 0:
                self.read()
            time.sleep(0.2)

    def living(self) -> list[psutil.Process]:
        found = []
        for each in processes_of(self.run):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                is_alive = each.status() != psutil.STATUS_ZOMBIE and each.name() != "bash"
                if is_alive and "launch/pretrain.py" in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def rank(self, number: int) -> psutil.Process:
        found = [each for each in self.living() if each.environ().get("RANK") == str(number)]
        return min(found, key=lambda each: each.create_time())  # the launcher is older than its readers

    def launcher(self) -> psutil.Process:
        return min(self.living(), key=lambda each: each.create_time())

    def close(self) -> None:
        os.close(self.leader)
        self.leader = -1

    def end(self) -> None:
        for each in processes_of(self.run):
            each.kill()
        if self.leader >= 0:
            self.close()
        os.waitpid(self.shell.pid, 0)

    def is_saved_by(self, reason: str) -> None:
        stopped = json.loads((self.run.folder / "stopped.json").read_text())
        assert stopped["reason"] == reason
        assert self.run.latest == f"step_{stopped['step']:08d}"


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.end()


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("console", CONSOLES)
def test_no_console_ends_or_blocks_a_run(tmp_path, terminals, console, ranks):
    terminal = Terminal(tmp_path, ranks, CONSOLES[console], ())
    terminals.append(terminal)
    terminal.wait_for("over")
    assert json.loads((terminal.run.folder / "summary.json").read_text())["steps"] == 20


def in_foreground(nohup: str, folder: Path) -> str:
    """Run in the folder, because nohup would write into the checkout."""
    return f"nohup {{run}} >'{folder}/nohup.out' 2>&1" if nohup else "{run}"


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("nohup", ["", "nohup "])
def test_a_terminal_that_closes(tmp_path: Path, terminals: list[Terminal], nohup: str, ranks: int) -> None:
    """torchrun handles SIGHUP also under nohup, and forwards it; a single rank does not."""
    is_ignored = bool(nohup) and ranks == 0
    terminal = Terminal(tmp_path, ranks, in_foreground(nohup, tmp_path), () if is_ignored else LONG)
    terminals.append(terminal)
    terminal.wait_for("steps")
    terminal.close()
    terminal.wait_for("over")
    if is_ignored:
        assert (terminal.run.folder / "summary.json").exists()
    else:
        terminal.is_saved_by("SIGHUP")


@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_that_ends_the_reader_too(tmp_path: Path, terminals: list[Terminal], ranks: int) -> None:
    terminal = Terminal(tmp_path, ranks, "{run} | tee '" + str(tmp_path / "log") + "'", LONG)
    terminals.append(terminal)
    terminal.wait_for("steps")
    os.write(terminal.leader, b"\x03")
    terminal.wait_for("over")
    terminal.is_saved_by("Ctrl-C")


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("target", ["rank 0", "rank 1", "torchrun"])
def test_each_signal_saves(tmp_path, terminals, number, target):
    terminal = Terminal(tmp_path, 2, "{run}", LONG)
    terminals.append(terminal)
    terminal.wait_for("steps")
    (terminal.launcher() if target == "torchrun" else terminal.rank(int(target[-1]))).send_signal(number)
    terminal.wait_for("over")
    if target == "torchrun" and number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        terminal.is_saved_by("the end of torchrun")  # it dies of the signal unless told to handle it
    else:
        terminal.is_saved_by("Ctrl-C" if number == signal.SIGINT else number.name)
