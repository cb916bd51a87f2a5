"""Tests that stdout and stderr never end a process."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gsa_train.process import console

SPEAKS = """
import logging, os, sys
from gsa_train.process import console
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
file.write(b"done")
"""
SHELL = {  # what follows the command in a shell
    "read": "| cat",
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "full disk": ">/dev/full 2>&1",
    "its reader leaves": "2>&1 | head -n 1",
    "no reader reads": "2>&1 | sleep 1",
}


def command(script: str, path: Path) -> list[str]:
    return [sys.executable, "-c", script, str(path)]


@pytest.mark.parametrize(
    ("console_is", "encoding"), [*((each, "utf-8") for each in SHELL), ("read", "ascii"), ("read", "latin-1")]
)
def test_no_console_ends_a_process(tmp_path: Path, console_is: str, encoding: str) -> None:
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


def test_a_closed_terminal_ends_no_process(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    end = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(command(SPEAKS, tmp_path / "done"), **end)
    os.close(follower)
    os.read(leader, 100)
    os.close(leader)
    assert process.wait(20) == 0
    assert (tmp_path / "done").read_text() == "done"


def test_a_process_that_ends_at_once_has_said_why(tmp_path: Path) -> None:
    ends = "print('why', file=sys.stderr); os._exit(3)"
    script = SPEAKS.split("file = ")[0] + ends
    ended = subprocess.run(command(script, tmp_path), capture_output=True, timeout=20, check=False)
    assert (ended.returncode, ended.stderr) == (3, b"why\n")


def test_streams_that_are_not_the_consoles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr  # pytest's
    console.take_console()
    assert (sys.stdout, sys.stderr) == before
