"""Tests a run whose logs cannot be written for a while: it continues, and reports every lost record."""

import contextlib
import errno
import resource
import shutil
from contextlib import closing
from unittest.mock import Mock

import pytest

from gsa_train.metrics.alerts import Alerts
from gsa_train.metrics.metrics_file import MetricsFile
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import Sinks
from gsa_train.metrics.tensorboard_sink import TensorBoardSink
from gsa_train.metrics.wandb_sink import WandbSink
from helpers.run_logs import (
    numbers_of_event_files,  # noqa: F401 - pytest finds it here
    open_run,
    read_strictly,
    step_record,
    steps_of,
    tensorboard_of,
)


@contextlib.contextmanager
def files_end_at(size_bytes):
    """Let no file of this process grow further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_full_disk_costs_metrics_no_record(tmp_path, caplog):
    """The kernel accepts 20 bytes of the third record; TensorBoard's file is already longer."""
    wandb_run = Mock(id="abc")
    wandb = WandbSink(wandb_run, tmp_path, Alerts(1.5))
    path = tmp_path / "metrics.jsonl"
    with closing(Sinks(tmp_path, TensorBoardSink(tmp_path / "tensorboard", None), wandb)) as sinks:
        for step in (1, 2):
            sinks.log(step_record(step))
        before = path.read_bytes()
        with files_end_at(len(before) + 20):
            for step in (3, 4, 5):
                sinks.log(step_record(step))
        assert path.read_bytes() == before  # no partial line
        for step in (6, 7):
            sinks.log(step_record(step))

    assert read_strictly(path) == [step_record(step) for step in range(1, 8)]
    for message, said in zip(caplog.messages, [
        "step 3: metrics.jsonl cannot be written ([Errno 27] File too large); training goes on, and its records wait ",
        "step 3: tensorboard cannot be written ([Errno 27] File too large); training goes on, and lost records are ",
        "step 6: metrics.jsonl is written again, with 3 records that waited; it lacks none",
        "step 6: tensorboard is written again; it lacks 4 records of steps 3 to 5",
    ], strict=True):  # fmt: skip
        assert message.startswith(said)
    sent = [call.args[0]["step"] for call in wandb_run.log.call_args_list if "train/loss" in call.args[0]]
    assert sent == [1, 2, 3, 4, 5, 6, 7]
    alerts = [call.kwargs["title"] for call in wandb_run.alert.call_args_list]
    assert alerts == ["A log cannot be written", "A log is written again"]
    assert [scalar.step for scalar in tensorboard_of(tmp_path).Scalars("train/loss")] == [1, 2, 6, 7]


class ReluctantFile:
    """Accepts `room` bytes. A longer write is partial, and the next write fails, as on a disk that fills up."""

    def __init__(self, file, room):
        self._file, self.room, self.truncates = file, room, True

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def truncate(self, size):
        if not self.truncates:
            raise OSError(errno.EIO, "Input/output error")
        return self._file.truncate(size)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def reluctant(tmp_path):
    """Return a metrics file, and the file below it, which accepts only what a test allows."""
    file = MetricsFile(tmp_path / "metrics.jsonl", most_waiting_bytes=4 * 30)
    file._file = ReluctantFile(file._file, room=0)
    return file, file._file


def line_of(step):
    return {"step": step, "text": "a" * (7 - len(str(step)))}


def test_lines_wait_through_several_outages_and_are_written_in_order(tmp_path, reluctant):
    """During an outage the file takes half a line, which cannot be removed at once."""
    file, below = reluctant
    path, events = tmp_path / "metrics.jsonl", []
    for step, room, truncates in [(1, 45, True), (2, 20, False), (3, 0, True), (4, 10_000, True)]:
        below.room, below.truncates = room, truncates
        events.append(file.write(line_of(step)))
        assert file.works == (step in (1, 4))
        there = range(1, 2 if step in (2, 3) else step + 1)
        assert [each["step"] for each in read_records(path)] == list(there)
    assert read_strictly(path) == [line_of(step) for step in range(1, 5)]
    assert [each and each["event"] for each in events] == [None, "log_failed", None, "log_written"]
    below.room = 0
    file.write(line_of(5))
    below.room = 100
    file.close()
    file.close()
    assert read_strictly(path) == [line_of(step) for step in range(1, 6)]


def test_beyond_the_bound_the_oldest_lines_are_lost_and_named(tmp_path, reluctant, caplog):
    file, below = reluctant
    for step in range(1, 8):
        file.write(line_of(step))
    below.room = 10_000
    event = file.write(line_of(8))
    lost = {"event": "log_lost", "step": 8, "file": "metrics.jsonl", "lost_records": 3, "first_step": 1}
    lost["last_step"] = 3
    assert event == lost
    assert read_strictly(tmp_path / "metrics.jsonl") == [*map(line_of, range(4, 9)), lost]
    assert caplog.messages[-1].endswith("with 4 records that waited; it lacks 3 records of steps 1 to 3")
    assert file.write(line_of(9)) is None
    file.close()
    assert len(caplog.messages) == 2


def test_a_run_starts_and_goes_on_where_no_record_can_be_written(tmp_path, caplog):
    with files_end_at(0), closing(Sinks(tmp_path, None, None)) as sinks:
        for step in (1, 2):
            sinks.log(step_record(step))
    first, last = caplog.messages
    assert first.startswith("step 1: metrics.jsonl cannot be written ([Errno 27] File too large)")
    assert last == "metrics.jsonl lacks 2 records of steps 1 to 2, since it could not be written"
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_tensorboard_folder_that_cannot_be_made_ends_no_start(tmp_path, caplog):
    folder = tmp_path / "tensorboard"
    folder.write_text("in the way")
    sink = TensorBoardSink(folder, resume_step=4)
    sink.log({"step": 5}, {"train/loss": 1.0}, disk_works=True)
    assert "step 5: tensorboard cannot be written" in caplog.text
    folder.unlink()
    sink.log({"step": 6}, {"train/loss": 1.0}, disk_works=True)
    sink.close()
    assert "it lacks 1 records of steps 5 to 5" in caplog.text
    (file,) = folder.iterdir()
    assert b"train/loss" in file.read_bytes()


@pytest.mark.parametrize("how", ["removed", "moved", "file removed", "file replaced"])
def test_a_run_folder_removed_under_a_run_costs_no_record(tmp_path, caplog, how):
    folder = tmp_path / "run"
    sinks = open_run(folder)
    for step in (1, 2):
        sinks.log(step_record(step))
    assert not sinks.folder_was_gone()
    if how == "removed":
        shutil.rmtree(folder)
    elif how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / "metrics.jsonl").unlink()
    if how == "file replaced":
        (folder / "metrics.jsonl").write_text("other\n")
    for step in (3, 4):
        sinks.log(step_record(step))
    assert steps_of(folder) == [1, 2, 3, 4]
    message = "metrics.jsonl was removed, moved or replaced during the run: it is written again"
    assert caplog.text.count(message) == 1
    assert sinks.folder_was_gone() is (how in ("removed", "moved"))
    if how == "removed":
        shutil.rmtree(folder)
    sinks.close()
