"""Tests how commands end at Ctrl-C, and when the reader of their output has ended."""

import importlib
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gsa_eval import commands as evaluation_commands
from gsa_study import commands as study_commands
from gsa_train import commands
from gsa_train.process.as_command import READER_LEFT, as_command
from gsa_train.process.exit_codes import INTERRUPTED

ROOT = Path(__file__).parents[2]
# Training continues without a reader and handles signals itself. config_reference is for `make docs`.
NOT_MAINS = ("pretrain", "config_reference")


# With PYTHONUNBUFFERED=1 the first print fails, otherwise the final flush.
@pytest.mark.parametrize("write_through", [True, False])
def test_where_its_reader_has_left_a_command_ends_in_silence(write_through, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        stdout.reconfigure(write_through=write_through)
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end, as_command():
            print("one line")
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


def test_ctrl_c_that_a_library_hides_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = ImportError()
    hidden.__context__ = KeyboardInterrupt()
    with pytest.raises(SystemExit) as end, as_command():
        raise hidden
    assert (end.value.code, capsys.readouterr().err) == (INTERRUPTED, "stopped by Ctrl-C\n")
    with pytest.raises(ImportError), as_command():
        raise ImportError


def test_no_memory_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, as_command():
        torch.empty(1 << 60, dtype=torch.uint8)
    assert end.value.code == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("out of memory: ")
    assert "give it less at once (shorter texts, or fewer), or more memory" in said
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        with pytest.raises(SystemExit), as_command():
            raise error
    with pytest.raises(RuntimeError, match="shapes"), as_command():
        raise RuntimeError("shapes do not fit")


SCRIPTS = [*sorted((ROOT / "launch").rglob("*.py")), ROOT / "data" / "prepare.py"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_ctrl_c_in_a_scripts_imports_is_a_line(script, monkeypatch, capsys):
    """The last import of a script is its own command, or the last part of that."""
    (name,) = re.findall(r"\n    from (gsa_\S+) import [^\n]+\n\n", script.read_text("utf-8"))

    class Pressed:
        @staticmethod
        def find_spec(found: str, *_: object) -> None:
            if found == name:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Pressed, *sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == INTERRUPTED
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_an_installed_command_loads_torch_only_where_it_catches_ctrl_c() -> None:
    names = re.findall(r'^gsa-\S+ = "(.+):main"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert "gsa_data.prepare" in names
    code = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_every_command_ends_so() -> None:
    packages = (commands, evaluation_commands, study_commands)
    found = [(package, each.name) for package in packages for each in pkgutil.iter_modules(package.__path__)]
    names = [f"{package.__name__}.{name}" for package, name in found if name not in NOT_MAINS]
    assert {name.partition(".")[0] for name in names} == {"gsa_train", "gsa_eval", "gsa_study"}
    for name in names:
        main = importlib.import_module(name).main
        assert hasattr(main, "__wrapped__"), f"{name}.main lacks @as_command()"
