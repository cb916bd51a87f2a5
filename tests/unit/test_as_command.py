"""How commands end at Ctrl-C, and where what reads them has left."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gsa_eval.commands
import gsa_study.commands
import gsa_train.commands
from gsa_train.commands import goodput
from gsa_train.process.as_command import READER_LEFT, as_command
from gsa_train.process.exit_codes import INTERRUPTED

ROOT = Path(__file__).parents[2]
NOT_MAINS = ("config_reference", "export_indexer", "pretrain")
"""What `make docs` calls; its main is in launch/; training goes on without a reader, and heeds signals itself."""


# With PYTHONUNBUFFERED=1 the first print fails; without, what is flushed at the end.
@pytest.mark.parametrize("write_through", [True, False])
def test_where_its_reader_has_left_a_command_ends_in_silence(
    write_through: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["", "--gpus", "10", "--mtbf-hours", "50000", "--trials", "2"])
    with os.fdopen(writer, "w") as stdout:
        stdout.reconfigure(write_through=write_through)
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            goodput.main()
    assert end.value.code == READER_LEFT
    assert not capfd.readouterr().err


def test_a_dry_run_ends_in_silence_too() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, str(ROOT / "launch" / "pretrain.py"), "--config", "demo", "--dry-run"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (READER_LEFT, b"")


def test_another_broken_pipe_is_an_error() -> None:
    with pytest.raises(BrokenPipeError), as_command():
        raise BrokenPipeError


def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, as_command():
        raise KeyboardInterrupt
    assert end.value.code == INTERRUPTED
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_no_memory_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, as_command():
        torch.empty(1 << 60, dtype=torch.uint8)
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("out of memory: ")
    assert "give it less at once (shorter texts, or fewer), or more memory" in said
    assert said.count("\n") == 1
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        with pytest.raises(SystemExit), as_command():
            raise error
    with pytest.raises(RuntimeError, match="shapes"), as_command():
        raise RuntimeError("shapes do not fit")


def test_every_command_ends_so() -> None:
    for package in (gsa_train.commands, gsa_eval.commands, gsa_study.commands):
        for each in pkgutil.iter_modules(package.__path__):
            if each.name not in NOT_MAINS:
                main = importlib.import_module(f"{package.__name__}.{each.name}").main
                assert hasattr(main, "__wrapped__"), f"{each.name}.main lacks @as_command()"
