"""Tests a run's log of its time: each second counts once, whatever ends the process."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gsa_train.metrics.goodput import run_clock
from gsa_train.metrics.goodput.account import ACTIVITIES, COMPLETE, LOSSES, Account
from gsa_train.metrics.goodput.goodput_log import GoodputLog, GoodputNotes
from gsa_train.metrics.goodput.ledger import ALIVE, ALIVE_BYTES, FILE, lost_line, read_account, read_lines
from gsa_train.metrics.goodput.run_clock import RunClock, process_began
from gsa_train.metrics.goodput.words import NAMES, start_up_in_words
from gsa_train.run.folder import open_run_folder
from gsa_train.run_folder.resume import Start
from helpers.single_rank import SPARSE, single_rank, tiny_config


class Clock(RunClock):
    """Advances only in `wait`."""

    def __init__(self, began: float) -> None:
        super().__init__(began)
        self.at = began

    def now(self) -> float:
        return self.at

    def unix_at(self, monotonic: float) -> float:
        return monotonic

    def wait(self, seconds: float, activity: str) -> None:
        self.begin(activity)
        self.at += seconds


def start(folder: Path, began: float, step: int = 0, is_complete: bool = False) -> tuple[GoodputLog, Clock]:
    """Return a process that took 3 s for imports and 2 s for a checkpoint, and opened the folder."""
    clock = Clock(began)
    clock.at += 3
    clock.wait(2, "checkpoint")
    log = GoodputLog(clock)
    lines = read_lines(folder)
    log.open(folder, step, lines, lost_line(folder, lines), is_complete)
    return log, clock


def train(log: GoodputLog, clock: Clock, first: int, last: int) -> None:
    """Log steps of 1 s; the first one takes 4 s."""
    for step in range(first, last + 1):
        clock.wait(4 if step == first else 1, "first_step" if step == first else "training")
        log.note(step, "sparse")
    clock.begin("training")


def lost(account: Account) -> dict[str, float]:
    return {name: round(value, 3) for name, value in account.lost_seconds.items() if abs(value) > 1e-3}


def test_each_second_belongs_to_one_activity() -> None:
    clock = Clock(100.0)
    clock.at += 3
    clock.wait(2, "model")
    clock.wait(10, "training")
    with clock.during("save"):
        clock.at += 4
        with clock.during("other"):
            clock.at += 1
    clock.at += 5
    now, seconds = clock.read()
    assert seconds == {"import": 3, "model": 2, "training": 15, "save": 4, "other": 1}
    assert sum(seconds.values()) == now - clock.began
    clock.share_out({"text": 3, "stragglers": 100})
    assert clock.read()[1] == {**seconds, "training": 0, "text": 3, "stragglers": 12}
    clock.at += 1
    clock.share_out({"text": 0.25})
    assert clock.read()[1]["training"] == 0.75
    assert clock.read(until=clock.at - 0.5) == clock.read()  # not before the share
    with pytest.raises(AssertionError, match="napping"):
        clock.begin("napping")


def test_a_process_knows_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks stand still, because a busy machine may do other work between two reads."""
    now, since_boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    clocks = {"time": lambda: now, "clock_gettime": lambda _: since_boot, "monotonic": time.monotonic}
    monkeypatch.setattr(run_clock, "time", SimpleNamespace(**clocks, CLOCK_BOOTTIME=time.CLOCK_BOOTTIME))
    first, began = process_began(1), process_began(os.getpid())
    assert now - since_boot <= first <= began < now
    clock = RunClock()
    assert clock.began == began
    clocks["time"] = lambda: now + 3600  # the user sets it
    monkeypatch.setattr(run_clock, "time", SimpleNamespace(**clocks, CLOCK_BOOTTIME=time.CLOCK_BOOTTIME))
    assert clock.now() - now < 3600


def test_a_run_that_ends_by_itself(tmp_path: Path) -> None:
    log, clock = start(tmp_path, 1000)
    train(log, clock, 1, 10)
    assert log.metrics() == {"ettr": 10 / 18, "lost_seconds": {"import": 3, "checkpoint": 2, "first_step": 3}}
    with clock.during("save"):
        clock.at += 2
    log.end(COMPLETE)
    clock.at += 50  # draws pictures
    log.note(10, "sparse")
    log.close()
    account = read_account(tmp_path)
    assert (account.productive_seconds, account.wall_seconds) == (10, 20)
    losses = {**dict.fromkeys(LOSSES, 0), "import": 3, "checkpoint": 2, "first_step": 3, "save": 2}
    expected = {"ettr": 0.5, "wall_seconds": 20, "productive_seconds": 10, "lost_seconds": losses}
    assert log.summary() == expected
    said = "goodput: this run has lost 10s of 20s so far (ETTR 50.0%): import 3.0s, first steps (compilation) 3.0s, "
    assert log.in_words() == f"{said}reading checkpoints 2.0s, stalls of saves 2.0s"

    lines = (tmp_path / FILE).read_text()
    again, later = start(tmp_path, 5000, step=10, is_complete=True)
    later.at += 100
    again.end(COMPLETE)
    again.close()
    assert (tmp_path / FILE).read_text() == lines
    assert again.summary() == log.summary()


def killed(folder: Path) -> None:
    """Write the log of a process that began at second 1000. It blocked in step 12 at second 1021, and was last seen at
    second 1025."""
    log, clock = start(folder, 1000)
    train(log, clock, 1, 10)
    clock.wait(3, "training")
    log.beat(11, clock.at)
    clock.at += 4
    log.beat(11, clock.at - 4)


def test_what_a_killed_process_did_is_told_by_the_next_one(tmp_path: Path) -> None:
    killed(tmp_path)
    log, clock = start(tmp_path, 1040, step=8)
    assert [line["kind"] for line in read_lines(tmp_path)][-2:] == ["lost", "start"]
    train(log, clock, 9, 12)
    account = read_account(tmp_path)
    expected = {"import": 6, "checkpoint": 4, "first_step": 6, "repeated": 3 + 2, "detection": 4, "down": 15}
    assert lost(account) == expected
    assert account.productive_seconds == 12
    assert account.starts[0].repeated_steps == 3


def test_a_start_that_is_killed_at_once_counts_nothing_twice(tmp_path: Path) -> None:
    """The kill comes between `lost` and `start`, or after both."""
    killed(tmp_path)
    lines = read_lines(tmp_path)
    (line,) = lost_line(tmp_path, lines)
    with (tmp_path / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    start(tmp_path, 1040, step=8)
    log, _ = start(tmp_path, 1060, step=8)
    assert [line["kind"] for line in read_lines(tmp_path)][-4:] == ["lost", "start", "lost", "start"]
    account = log.account()
    assert (account.lost_seconds["detection"], account.lost_seconds["down"]) == (4, 15 + 15)
    assert account.wall_seconds == 65


def test_an_error_does_not_turn_the_wait_for_a_dead_peer_into_work(tmp_path: Path) -> None:
    """The error comes 100 s after the main thread began a save, and closes the log."""
    log, clock = start(tmp_path, 1000)
    train(log, clock, 1, 10)
    with contextlib.suppress(ConnectionError), clock.during("save"):
        clock.at += 1
        log.beat(10, clock.at)
        clock.at += 100
        log.beat(10, clock.at - 100)
        raise ConnectionError
    clock.at += 5
    log.close()
    expected = {"import": 3, "checkpoint": 2, "first_step": 3, "save": 1, "detection": 105}
    assert lost(read_account(tmp_path)) == expected


def report_hang(folder: Path) -> None:
    """The main rank may have been the frozen one, so that the report is a sign of life."""
    for name, at in (("early", 900.0), ("late", 1035.0)):
        (folder / "faults" / name).mkdir(parents=True)
        report = folder / "faults" / name / "report.txt"
        report.write_text("rank 1: no progress")
        os.utime(report, (at, at))


DAMAGED = (b"", b"{", b"[1, 2]\n", b'{"began": 1000}')
SIGNS: list[tuple[Callable[[Path], object], int, int]] = [
    (lambda folder: None, 3, 4),
    (report_hang, 3, 1035 - 1021),
    (lambda folder: (folder / ALIVE).unlink(), 0, 0),
    *((lambda folder, content=each: (folder / ALIVE).write_bytes(content), 0, 0) for each in DAMAGED),
]


@pytest.mark.parametrize(("change", "repeated", "detection"), SIGNS)
def test_the_newest_sign_of_life_counts_or_the_newest_line(change, repeated, detection, tmp_path):
    killed(tmp_path)
    change(tmp_path)
    account = read_account(tmp_path)
    assert (account.lost_seconds["repeated"], account.lost_seconds["detection"]) == (repeated, detection)
    assert account.wall_seconds == 18 + repeated + detection


def test_the_sign_of_an_earlier_process_is_not_taken_for_the_newest_ones(tmp_path: Path) -> None:
    killed(tmp_path)
    old = (tmp_path / ALIVE).read_bytes()
    start(tmp_path, 1040, step=8)
    (tmp_path / ALIVE).write_bytes(old)
    (line,) = lost_line(tmp_path, read_lines(tmp_path))
    assert (line["time"], line["progress"]) == (1045, 1045)


def test_a_process_that_lives_on_after_its_last_progress(tmp_path: Path) -> None:
    """The process was killed while it prepared its first step, so its newest line is younger than its progress."""
    log, clock = start(tmp_path, 1000)
    clock.at += 6
    log.beat(0, 1004.5)
    assert lost(read_account(tmp_path)) == {"import": 3, "checkpoint": 2, "detection": 6}


def test_signs_of_life_have_one_size(tmp_path: Path) -> None:
    log, clock = start(tmp_path, 1000)
    for activity in ACTIVITIES:
        clock.wait(123.4567, activity)
        log.beat(10**9, clock.at)
        assert (tmp_path / ALIVE).stat().st_size == ALIVE_BYTES
        json.loads((tmp_path / ALIVE).read_text())
    log.close()
    log.beat(1, clock.at)  # the watchdog's thread may be late


def test_every_loss_has_a_name() -> None:
    assert set(NAMES) == set(LOSSES)
    assert set(ACTIVITIES) - set(LOSSES) == {"training"}


def test_a_start_says_once_what_it_took_by_part() -> None:
    seconds = {"import": 4.25, "checkpoint": 12.0, "model": 2.0, "first_step": 1.5, "training": 99.0}
    said = start_up_in_words(seconds)
    assert said.startswith("start-up 18s: import 4.2s, process groups 0.0s, health of devices 0.0s, reading")
    assert said.endswith("; then the first step 1.5s")
    messages: list[str] = []
    notes = GoodputNotes(GoodputLog(RunClock()), messages.append, float, 1.5)
    for _ in range(2):
        notes.begin_phase(SPARSE, 0)
        notes.after_step(Mock(trains=True, step=1))
    (message,) = messages
    assert message.startswith("start-up ")


def test_a_file_that_is_gone_costs_no_step(tmp_path: Path) -> None:
    log, clock = start(tmp_path, 1000)
    train(log, clock, 1, 3)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).unlink()
    clock.wait(1, "training")
    log.note(4, "sparse")
    assert (tmp_path / FILE).read_text().startswith(whole)


NO_LINES = (
    "no line",
    "[1]",
    '{"step": 1}',
    '{"step": 1, "kind": "steps", "time": "soon", "seconds": {}}',
    '{"step": 1, "kind": "steps", "time": 1.0, "seconds": [1]}',
    '{"step": 1, "kind": "steps", "time": 1.0, "seconds": {"save": "Infinity"}}',
    *(f'{{"step": 1, "kind": "{kind}", "time": 1.0, "seconds": {{}}}}' for kind in ("start", "lost", "none")),
    '{"step": 1, "kind": "end", "time": 1.0, "seconds": {}, "reason": 7}',
    '{"step": 1, "kind": "en',
)


def test_damaged_lines_are_left_out_and_the_next_start_writes_after_them(tmp_path, caplog):
    killed(tmp_path)
    expected = read_account(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write("\n".join(NO_LINES))
    assert read_account(tmp_path) == expected
    assert re.search(rf"{FILE}: record \d+ of \d+ .* \(and 9 more\); left out", caplog.text)
    log, clock = start(tmp_path, 1040, step=8)
    train(log, clock, 9, 12)
    account = read_account(tmp_path)
    assert account.productive_seconds == 12


@pytest.mark.parametrize(
    ("again", "starts"),
    [
        (Start(same_job=True), 2),  # torchrun's or Slurm's, before the first checkpoint
        (Start(), 1),  # a person's, or --no-resume: a new run
    ],
)
def test_which_start_at_step_0_goes_on_with_the_account(again, starts, tmp_path, capsys):
    logging = {"wandb": "disabled", "tensorboard": False}
    config = tiny_config([SPARSE], run={"dir": str(tmp_path), "name": "run"}, logging=logging)
    first, second = GoodputLog(RunClock()), GoodputLog(RunClock())
    log, _, _ = open_run_folder(config, Start(), single_rank(), first)
    first.clock.begin("training")
    first.note(3, "sparse")
    first.close()
    log.close(1)
    log, _, _ = open_run_folder(config, again, single_rank(), second)
    assert len(second.account().starts) == starts
    assert ("goodput: this run has lost " in capsys.readouterr().out) is (starts > 1)
    account = read_account(tmp_path / "run")
    assert [each.step for each in account.starts] == [0] * starts
    assert account.productive_seconds == 0
    second.close()
    log.close(0)
