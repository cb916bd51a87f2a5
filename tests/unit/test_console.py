"""Tests that stdout and stderr never end or block a process, and that lost lines are counted."""

import errno
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gsa_train.process import console
from gsa_train.process.console import MOST_WAITING_BYTES, ConsoleWriter

SPEAKS = """
import logging, os, sys
from gsa_train.process import console
console.DRAIN_SECONDS = console.CHILD_SECONDS = 0.2
console.open_descriptors()
console.take_console()
logging.basicConfig(level=logging.INFO)
file = open(sys.argv[1], "wb", buffering=0)
assert file.fileno() > 2
for number in range(3000):
    print("\\N{SNOWMAN}", "text" * 20, number, flush=True)
    logging.info("text %d", number)
if not (child := os.fork()):
    print("from a child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
for writer in console._writers:
    writer.drain(0.2)
file.write(b"done")
"""
SHELL = {  # what follows the command in a shell
    "read": "| cat",
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "full disk": ">/dev/full 2>&1",
    "its reader leaves": "2>&1 | head -n 1",
    "no reader reads": "2>&1 | sleep 2",
}


def command(script: str, path: Path) -> list[str]:
    return [sys.executable, "-c", script, str(path)]


@pytest.mark.parametrize(
    ("console_is", "encoding"), [*((each, "utf-8") for each in SHELL), ("read", "ascii"), ("read", "latin-1")]
)
def test_no_console_ends_or_blocks_a_process(tmp_path: Path, console_is: str, encoding: str) -> None:
    path, log = tmp_path / "done", tmp_path / "log"
    end = f"'{sys.executable}' -c \"$SPEAKS\" '{path}' {SHELL[console_is]}"
    subprocess.run(
        ["bash", "-c", end],
        env={**os.environ, "SPEAKS": SPEAKS, "PYTHONIOENCODING": encoding},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        timeout=20,
        check=False,
    )
    assert path.read_text() == "done"
    if console_is == "read":
        said = log.read_text()
        assert ("☃" in said) is (encoding == "utf-8")
        assert ("\\u2603" in said) is (encoding != "utf-8")
        assert said.count(" text") + said.count(":text") >= 6000
        assert "from a child" in said
        assert "could not be written" not in said


def test_a_closed_terminal_ends_no_process(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    end = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(command(SPEAKS, tmp_path / "done"), **end)
    os.close(follower)
    os.read(leader, 100)
    os.close(leader)
    assert process.wait(20) == 0
    assert (tmp_path / "done").read_text() == "done"


class Below:
    """Replaces a file: accepts data while it works."""

    def __init__(self) -> None:
        self.text = b""
        self.error: OSError | None = None
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, _descriptor: int, text: bytes) -> int:
        self.entered.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        self.text += text[:7]  # like an almost full pipe
        return len(text[:7])


def test_lines_that_nothing_reads_are_bounded_and_counted_in_their_place() -> None:
    below = Below()
    writer = ConsoleWriter(1, below)
    writer.add(b"first\n")
    below.entered.wait()
    line = b"x" * 1023 + b"\n"
    for _ in range(MOST_WAITING_BYTES // len(line) + 10):
        writer.add(line)
    assert writer._waiting_bytes <= MOST_WAITING_BYTES
    below.open.set()
    writer.drain()
    writer.add(b"last\n")
    writer.drain()
    kept = below.text.count(b"x\n")
    assert kept == MOST_WAITING_BYTES // len(line) - 1
    lost = b"\n(11 lines could not be written here: nothing read them in time)\nlast\n"
    assert below.text == b"first\n" + line * kept + lost


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_lines_that_fail_are_counted_and_their_own_error_is_named(number: int) -> None:
    below = Below()
    below.open.set()
    below.error = OSError(number, os.strerror(number))
    writer = ConsoleWriter(1, below)
    writer.add(b"one\ntwo\n")
    writer.add(b"part")
    writer.drain()
    below.error = None
    writer.add(b"here\n")
    writer.drain()
    why = f"[Errno {number}] {os.strerror(number)}"
    assert below.text.decode() == f"\n(3 lines could not be written here: {why})\nhere\n"


def test_a_pipe_that_another_process_has_made_non_blocking_loses_no_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = ConsoleWriter(writing)
    lines = b"".join(b"%d\n" % number for number in range(50_000))  # more than a pipe holds
    writer.add(lines)
    read = b""
    while len(read) < len(lines):
        read += os.read(reading, 4096)
    writer.drain()
    assert read == lines


def test_a_process_that_ends_at_once_has_said_why(tmp_path: Path) -> None:
    ends = "print('why', file=sys.stderr); console.drain_console(); os._exit(3)"
    script = SPEAKS.split("file = ")[0] + ends
    ended = subprocess.run(command(script, tmp_path), capture_output=True, timeout=20, check=False)
    assert (ended.returncode, ended.stderr) == (3, b"why\n")


def test_streams_that_are_not_the_consoles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr  # pytest's
    console.take_console()
    assert (sys.stdout, sys.stderr) == before
