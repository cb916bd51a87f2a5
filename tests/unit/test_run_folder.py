"""Tests what a start does with its run folder: it admits one run at a time, reports what changed since the checkpoint,
and keeps an older summary."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest

from gsa_train.config import Config, ProfileConfig, config_to_yaml
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import Sinks
from gsa_train.run import folder as run_folder
from gsa_train.run.folder import config_changes, open_run_folder
from gsa_train.run_folder import lock as run_lock
from gsa_train.run_folder.lock import FILE, RunFolderError, RunLock
from gsa_train.run_folder.resume import Start
from gsa_train.run_folder.starts import command_line, source_commit
from helpers.checkpoints import run_state
from helpers.single_rank import SPARSE, WARM_UP, single_rank, tiny_config

HOLD = """
import fcntl, os, socket, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on {socket.gethostname()}")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""
"""Another process's run."""


@pytest.fixture(autouse=True)
def world() -> None:
    single_rank()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    logging = {"wandb": "disabled", "tensorboard": False}
    return tiny_config([SPARSE], run={"dir": str(tmp_path), "name": "run"}, logging=logging)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def open_at(step: int, config: Config, validation_due: bool = False) -> None:
    checkpoint = Path(config.run.dir) / "run" / "checkpoints" / f"step_{step:08d}"
    state = dataclasses.replace(run_state(step, config), validation_due=validation_due)
    start = Start(checkpoint, state, same_run=True)
    open_run_folder(config, start, single_rank(), GoodputLog(RunClock()))[0].close(0)


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("run", 4, ("the-wandb-run", True, None)),
        ("run", 0, ("the-wandb-run", False, None)),
        ("copy", 4, (None, True, "the-wandb-run")),
    ],
)
def test_wandb_hears_whether_the_run_has_begun_and_a_copied_folder_gets_a_wandb_run_of_its_own(
    name, step, expected, config, monkeypatch
):
    opened = Mock(return_value=None)
    monkeypatch.setattr(run_folder, "open_wandb", opened)
    state = dataclasses.replace(run_state(step, config), run="run", wandb_run_id="the-wandb-run")
    own = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
    run_folder._open_wandb(own, Start(Path("step_00000004"), state, same_run=True))
    assert opened.call_args.args[-3:] == expected


def test_a_second_run_in_the_folder_is_refused_until_the_first_one_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(run_lock, "REMOTE_PATIENCE_SECONDS", 0.0)
    command = [sys.executable, "-c", HOLD, str(tmp_path / FILE)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    lock = RunLock(tmp_path)
    with pytest.raises(
        RunFolderError, match=f"another run writes {tmp_path}: process {other.pid} on .* delete"
    ):
        lock.take()
    other.kill()  # without cleanup
    other.communicate()
    lock.take()
    lock.take()
    lock.close()


def test_a_folder_that_cannot_be_made_is_named_and_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/run cannot be written: .*set run\.dir"):
        RunLock(tmp_path / "file" / "run").take()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    for name in ("run", "mine"):
        lock = RunLock(tmp_path / name)
        lock.take()
        assert (tmp_path / name / FILE).exists()
        lock.take_back()
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_run_that_became_longer_is_not_complete(config: Config, run_dir: Path) -> None:
    (run_dir / "summary.json").write_text('{"steps": 6, "val_loss": 2.5}')
    open_at(6, config)
    assert not (run_dir / "summary.json").exists()
    assert json.loads((run_dir / "summary_00000006.json").read_text())["val_loss"] == 2.5


@pytest.mark.parametrize(
    ("step", "due", "comes_again"),
    [(10, False, True), (6, True, True), (6, False, False)],
    ids=["the end that is written again", "the start before ended before it saved", "logged and saved"],
)
def test_a_validation_that_is_made_again_is_there_once(step, due, comes_again, config, run_dir):
    (run_dir / "summary.json").write_text('{"steps": 10}')
    records = [{"step": number, "phase": "sparse"} for number in (step - 1, step)]
    records += [{**record, "event": "validation"} for record in records]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    open_at(step, config, validation_due=due)
    assert read_records(run_dir / "metrics.jsonl") == records[: 3 if comes_again else 4]
    assert (run_dir / "summary.json").exists() == (step == 10)


def test_what_changed_since_the_checkpoint_is_said(config, capsys):
    longer = dataclasses.replace(SPARSE, steps=12, lr=2e-2)
    changed = dataclasses.replace(config, phases=[longer, WARM_UP])
    lines = ["phases: sparse -> sparse, warm-up", "phases.0.steps: 10 -> 12", "phases.0.lr: 0.01 -> 0.02"]
    assert config_changes(config_to_yaml(config), changed) == lines
    saved = "\n".join(line for line in config_to_yaml(config).splitlines() if "loss_row_fraction" not in line)
    assert config_changes(saved, config) == []
    for first, is_said in ((None, False), (5, False), (4, True)):
        profile = ProfileConfig() if first is None else ProfileConfig(start_step=first, steps=3)
        open_at(6, dataclasses.replace(config, profile=profile))
        said = capsys.readouterr().out
        assert ("nothing is traced" in said) is is_said
        assert "changed since" not in said


@pytest.mark.parametrize("writer", ["note_start", "write_atomically", "open_sinks"])
def test_a_full_disk_at_a_start_is_one_line_with_path_and_remedy(config, tmp_path, monkeypatch, writer):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "file"))

    monkeypatch.setattr(run_folder, writer, full)
    with pytest.raises(RunFolderError, match=r"run cannot be opened: .*No space left.*/run/file'; make room"):
        open_at(6, config)
    monkeypatch.undo()
    open_at(6, config)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"steps": "x"}', b"\xff"])
def test_a_damaged_summary_is_named_and_kept(config, run_dir, content, caplog):
    (run_dir / "summary.json").write_bytes(content)
    open_at(6, config)
    assert "summary.json is damaged" in caplog.text
    assert (run_dir / "summary.json.damaged").read_bytes() == content
    assert not (run_dir / "summary.json").exists()


WRITTEN = ("starts.jsonl", "goodput.jsonl", "alive.json", "metrics.jsonl", "config.yaml", "launch.txt")
WRITTEN += ("summary.json",)


@pytest.mark.parametrize("leads", ["symbolic", "symbolic, of its .tmp", "hard"])
@pytest.mark.parametrize("name", [*WRITTEN, FILE])
def test_no_file_of_the_folder_is_written_through_a_link(name, leads, config, tmp_path):
    """The start replaces the link or refuses it, because the link's target belongs to someone else."""
    run, target = tmp_path / "run", tmp_path / "of_another"
    open_at(6, config)
    (run / "summary.json").write_text('{"steps": 6}')
    target.write_text('{"of": "another"}\n')
    path = run / (f"{name}.tmp" if "tmp" in leads else name)
    path.unlink(missing_ok=True)
    if leads == "hard":
        path.hardlink_to(target)
    else:
        path.symlink_to(target)
    lock = RunLock(run)
    appended = name in ("starts.jsonl", "goodput.jsonl", "metrics.jsonl") and leads == "symbolic"
    locked = name == FILE and "tmp" not in leads
    if appended or locked:
        why = "a hard link to another file; delete" if leads == "hard" else "a link, and a run writes plain"
        with pytest.raises(RunFolderError, match=f"it is {why}.*/run/{name}'"):
            lock.take() if locked else open_at(6, config)
        assert (run / "summary.json").read_text() == '{"steps": 6}'  # nothing has changed
    else:
        lock.take()
        open_at(6, config)
        Sinks(run, None, None).finish({"steps": 10})
        assert "tmp" in leads or not (run / name).is_symlink()
    lock.close()
    assert target.read_text() == '{"of": "another"}\n'


def test_a_pipe_in_place_of_a_file_is_named_at_once(run_dir: Path) -> None:
    os.mkfifo(run_dir / FILE)
    with pytest.raises(RunFolderError, match=r"it is not a plain file, .* remove it .*/lock"):
        RunLock(run_dir).take()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "previous"])
def test_an_output_folder_on_another_disk_stays_there(name, config, tmp_path, run_dir, caplog):
    """The link must not move to previous/, because the run would continue on the small disk."""
    run, disk = run_dir, tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    (run / name).symlink_to(disk)
    open_run_folder(config, Start(), single_rank(), GoodputLog(RunClock()))[0].close(0)
    assert (run / name).resolve() == disk
    assert "stays one" not in caplog.text
    (run / "checkpoints" / "step_00000002").mkdir()

    open_run_folder(config, Start(), single_rank(), GoodputLog(RunClock()))[0].close(0)
    assert (run / name).resolve() == disk
    assert not (run / "checkpoints" / "step_00000002").exists()
    assert len(list((run / "previous").glob("*/checkpoints/step_00000002"))) == 1
    assert (disk / "lost+found").is_dir()
    if name == "checkpoints":
        assert f"is a link to {disk}, and stays one for the new run; the previous run's" in caplog.text
        assert len(list(disk.glob("previous/*/step_00000002"))) == 1


def test_a_link_to_a_disk_that_is_not_there_is_named_before_anything_moves(config, run_dir):
    (run_dir / "checkpoints").symlink_to(run_dir / "unmounted")
    (run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(
        RunFolderError, match=r"link to .*unmounted, where no folder is; mount .*/checkpoints"
    ):
        open_run_folder(config, Start(), single_rank(), GoodputLog(RunClock()))
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 7}\n'


def test_a_start_that_waited_for_one_that_was_refused_locks_the_file_that_is_there(tmp_path, monkeypatch):
    """The waiting start must not lock a removed file, because another start could lock the new file."""
    path, opened = tmp_path / "run" / FILE, []

    def open_and_lose(of: Path) -> IO[str]:
        opened.append(of)
        file = open_lock(of)
        if len(opened) == 1:
            shutil.rmtree(tmp_path / "run")
        return file

    open_lock = run_lock._open
    monkeypatch.setattr(run_lock, "_open", open_and_lose)
    lock = RunLock(tmp_path / "run")
    lock.take()
    assert opened == [path, path]
    assert path.read_text().startswith("process ")
    lock.close()


def test_a_refused_start_removes_no_folder_in_which_another_has_trained(tmp_path, monkeypatch):
    """The two starts check for the folder before one of them makes it."""
    first, second = (RunLock(tmp_path / "run") for _ in range(2))

    def open_late(path: Path) -> IO[str]:
        monkeypatch.undo()
        first.take()
        (tmp_path / "run" / "metrics.jsonl").write_text("{}")
        first.close()
        return run_lock._open(path)

    monkeypatch.setattr(run_lock, "_open", open_late)
    second.take()
    second.take_back()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [FILE, "metrics.jsonl"]


def test_the_command_of_a_start():
    words = ["launch/pretrain.py", "--config", "a b.yaml", "data.train_dir=s3://me:secret@host/x"]
    alone = command_line(words, {})
    assert alone == "python launch/pretrain.py --config 'a b.yaml' data.train_dir=s3://host/x"
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert command_line(words[:1], torchrun) == "torchrun --nproc_per_node=8 --nnodes=2 launch/pretrain.py"
    assert command_line(["/x/gsa_train/__main__.py", "y=1"], {}) == "python -m gsa_train y=1"
    assert command_line(["/x/bin/gsa-pretrain", "y=1"], {}) == "/x/bin/gsa-pretrain y=1"


@pytest.mark.parametrize(("listed", "commit"), [("abc\n", "abc"), ("abc\n M x.py\n", "abc+")])
def test_the_commit_of_a_frozen_source(tmp_path, listed, commit, monkeypatch):
    monkeypatch.delenv("GSA_COMMIT", raising=False)
    (tmp_path / "source").mkdir()
    (tmp_path / "commit.txt").write_text(listed)
    assert source_commit(tmp_path / "source") == commit
    assert source_commit(tmp_path) is None
    monkeypatch.setenv("GSA_COMMIT", "def")
    assert source_commit(tmp_path / "source") == commit
    # A checkout may be newer than its git.
    assert source_commit(Path(__file__).parents[2]) == source_commit(tmp_path) == "def"
