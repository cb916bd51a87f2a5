"""Tests that the reason of a process's end is reported once, also where torchrun's user reads it."""

import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gsa_data.faults import DataFault
from gsa_train.commands import pretrain
from gsa_train.process.console import ConsoleWriter, console_stream
from gsa_train.reliability.last_words import (
    SUBMISSION,
    end_launcher,
    ended_in_silence,
    forget_end,
    note_end,
    say_last,
)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that a rank of torchrun has in its last start."""
    path = tmp_path / "error.json"
    for name, value in {"ERROR_FILE": str(path), "RESTART_COUNT": "2", "MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    return path


def summary(error_file: Path) -> str:
    """Return torchrun's report of a rank that ended with exit code 2."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(error_file))
    return str(ChildFailedError("pretrain.py", {0: failure}))


@pytest.mark.parametrize(
    "setting", [("ERROR_FILE", None), ("RESTART_COUNT", "1"), ("ERROR_FILE", "/no/folder/e.json")]
)
def test_where_torchrun_will_print_no_summary_on_stderr(setting, error_file, monkeypatch, capsys):
    monkeypatch.setenv(f"TORCHELASTIC_{setting[0]}", setting[1] or "")
    if setting[1] is None:
        monkeypatch.delenv(f"TORCHELASTIC_{setting[0]}")
    say_last("no text")
    assert capsys.readouterr().err == "no text\n"


def test_what_was_said_is_written_before_torchrun_is_asked_to_end(error_file, monkeypatch):
    """torchrun sends SIGTERM to this rank at once, and a thread writes its console."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    begin = threading.Event()
    written: list[bytes] = []

    def write(_: int, text: bytes) -> int:
        begin.wait()
        written.append(text)
        return len(text)

    def ends(_pid: int, _signal: int) -> None:
        assert b"".join(written).startswith(b"1 of 2 devices is bad\n"), "killed before it was written"

    writer = ConsoleWriter(2, write)
    monkeypatch.setattr("gsa_train.process.console._writers", [writer])
    monkeypatch.setattr("sys.stderr", console_stream(2, writer, "utf-8"))
    monkeypatch.setattr("os.kill", ends)
    say_last("1 of 2 devices is bad")
    threading.Timer(0.05, begin.set).start()  # however late, this is the only wait
    end_launcher()
    assert len(b"".join(written).splitlines()) == 2


def test_a_full_shared_memory_gets_its_remedy() -> None:
    nccl = "ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)"
    said = pretrain.known_failure(RuntimeError(nccl))
    assert said.startswith(f"{nccl}\n/dev/shm is too small or full for NCCL: make room there")
    assert "--shm-size" in said
    assert pretrain.known_failure(RuntimeError("CUDA error: an illegal memory access")) is None
    assert pretrain.known_failure(DataFault("no text")) == "the text failed: no text"


def test_an_error_of_ours_has_its_last_line_in_the_summary(error_file, monkeypatch):
    def fail() -> int:
        raise ZeroDivisionError("no rows")

    monkeypatch.setattr(pretrain, "run_command", fail)
    with pytest.raises(ZeroDivisionError):
        pretrain.main()
    assert "traceback : ZeroDivisionError: no rows\n" in summary(error_file)


def test_a_slurm_job_hears_how_its_main_rank_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "exit_code"
    note_end(2)  # no such job
    monkeypatch.setenv(SUBMISSION, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    note_end(2)
    assert not note.exists()
    note_end(15, by_any_rank=True)
    assert note.read_text() == "15\n"
    forget_end()
    assert note.exists()  # the main one removes it at the next start
    note.unlink()
    monkeypatch.setenv("RANK", "0")
    note_end(1)
    note_end(2)  # the first reason counts
    assert note.read_text() == "1\n"
    forget_end()
    assert not note.exists()
    forget_end()
    monkeypatch.setenv(SUBMISSION, str(tmp_path / "gone"))
    note_end(2)


def test_a_rank_whose_process_before_left_no_words_knows_it(tmp_path, monkeypatch):
    """torchrun gives each start a folder, and each rank a file in it."""
    for attempt in (0, 1):
        for rank in (0, 1):
            (tmp_path / f"attempt_{attempt}" / str(rank)).mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "error.json").touch()
    silent = []
    for attempt, rank in ((0, 0), (1, 0), (1, 1)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/attempt_{attempt}/{rank}/error.json")
        silent.append(ended_in_silence())
    assert silent == [False, True, False]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/error.json")  # of another torch
    assert not ended_in_silence()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not ended_in_silence()
