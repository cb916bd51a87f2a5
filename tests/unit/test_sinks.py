"""What a run logs can be read back: exactly, after a kill, and without repeated steps after a resume."""

import contextlib
import errno
import json
import math
import random
import re
import resource
import shutil
import struct
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer import event_file_writer

from gsa_train.config import LoggingConfig
from gsa_train.metrics.alerts import Alerts
from gsa_train.metrics.metrics_file import MetricsFile
from gsa_train.metrics.record_format import read_records, to_scalars, validation_prefixes
from gsa_train.metrics.sinks import Sinks, open_sinks
from gsa_train.metrics.tensorboard_sink import TensorBoardSink
from gsa_train.metrics.wandb_sink import WandbSink
from gsa_train.report.panels import SECTIONS

JSONL_ONLY = LoggingConfig(tensorboard=False, wandb="disabled")


@pytest.fixture(autouse=True)
def numbers_of_event_files(monkeypatch):
    """From 0 in each test: TensorBoard reads files of the same second in the order of their names, 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def open_run(run_dir, resume_step=None, logging=JSONL_ONLY):
    return open_sinks(logging, run_dir, [], resume_step, wandb=None)


def step_record(step, **values):
    return {"step": step, "phase": "sparse", "loss": 1.0 / step, "recall": None, **values}


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def read_strictly(path):
    *lines, rest = path.read_text().split("\n")
    assert rest == ""
    return [json.loads(line, parse_constant=refuse_constant) for line in lines]


def tensorboard_of(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def steps_of(run_dir):
    return [record["step"] for record in read_records(run_dir / "metrics.jsonl")]


def test_floats_read_back_bit_equal(tmp_path):
    generator = random.Random(0)
    values = [struct.unpack("d", generator.randbytes(8))[0] for _ in range(500)]
    values = [value for value in values if math.isfinite(value)]
    values += [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3]
    with open_run(tmp_path) as sinks:
        sinks.log(step_record(1, layer_recall=values, lrs={"base": 0.1 + 0.2}, tokens=2**60))
    (record,) = read_strictly(tmp_path / "metrics.jsonl")
    assert [v.hex() for v in record["layer_recall"]] == [v.hex() for v in values]
    assert record["lrs"]["base"].hex() == (0.1 + 0.2).hex()
    assert record["tokens"] == 2**60


@contextlib.contextmanager
def files_end_at(size_bytes):
    """No file of this process grows further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_full_disk_costs_metrics_no_record(tmp_path, caplog):
    """The kernel takes 20 bytes of the third record; TensorBoard's file is longer than that already."""
    wandb_run = Mock(id="abc")
    wandb = WandbSink(wandb_run, tmp_path, Alerts(1.5))
    path = tmp_path / "metrics.jsonl"
    with Sinks(tmp_path, TensorBoardSink(tmp_path / "tensorboard", None), wandb) as sinks:
        for step in (1, 2):
            sinks.log(step_record(step))
        before = path.read_bytes()
        with files_end_at(len(before) + 20):
            for step in (3, 4, 5):
                sinks.log(step_record(step))
        assert path.read_bytes() == before  # no torn line
        for step in (6, 7):
            sinks.log(step_record(step))

    assert read_strictly(path) == [step_record(step) for step in range(1, 8)]
    assert caplog.messages == [
        "step 3: metrics.jsonl cannot be written ([Errno 27] File too large); training goes on, and its records wait "
        "in memory",
        "step 3: tensorboard cannot be written ([Errno 27] File too large); training goes on, and what it misses is "
        "counted",
        "step 6: metrics.jsonl is written again, with 3 records that waited; it misses none",
        "step 6: tensorboard is written again; it misses 4 records of steps 3 to 5",
    ]
    sent = [call.args[0]["step"] for call in wandb_run.log.call_args_list if "train/loss" in call.args[0]]
    assert sent == [1, 2, 3, 4, 5, 6, 7]
    alerts = [call.kwargs["title"] for call in wandb_run.alert.call_args_list]
    assert alerts == ["A log cannot be written", "A log is written again"]
    assert [scalar.step for scalar in tensorboard_of(tmp_path).Scalars("train/loss")] == [1, 2, 6, 7]


class ReluctantFile:
    """Takes so many bytes; then a write takes a part, as a disk that gets full, and the next one fails."""

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
    """A metrics file, and the one below it, which takes nothing but what a test lets it."""
    file = MetricsFile(tmp_path / "metrics.jsonl", json.dumps, most_waiting_bytes=4 * 30)
    file._file = ReluctantFile(file._file, room=0)
    return file, file._file


def line_of(step):
    """Of 30 bytes with its end."""
    return {"step": step, "text": "a" * (7 - len(str(step)))}


def test_lines_wait_through_several_outages_and_are_written_in_order(tmp_path, reluctant):
    """One of them takes half a line, and the part cannot even be cut off again at once."""
    file, below = reluctant
    path, events = tmp_path / "metrics.jsonl", []
    for step, room, truncates in [(1, 45, True), (2, 20, False), (3, 0, True), (4, 10_000, True)]:
        below.room, below.truncates = room, truncates
        events.append(file.write(line_of(step)))
        assert file.works == (step in (1, 4))
        assert [each["step"] for each in read_records(path)] == list(
            range(1, 1 + {2: 1, 3: 1}.get(step, step))
        )
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
    assert caplog.messages[-1].endswith("with 4 records that waited; it misses 3 records of steps 1 to 3")
    assert file.write(line_of(9)) is None
    file.close()
    assert len(caplog.messages) == 2


def test_lines_that_wait_when_the_process_ends_are_lost_and_named(tmp_path, reluctant, caplog):
    file, _ = reluctant
    for step in (1, 2):
        file.write(line_of(step))
    file.close()
    assert caplog.messages[-1] == (
        "metrics.jsonl misses 2 records of steps 1 to 2, for which it could not be written"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_run_starts_and_goes_on_where_no_record_can_be_written(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Sinks(tmp_path, None, None) as sinks:
        for step in (1, 2):
            sinks.log(step_record(step))
    first, last = caplog.messages
    assert first.startswith("step 1: metrics.jsonl cannot be written ([Errno 28] No space left on device)")
    assert last.startswith("metrics.jsonl misses 2 records of steps 1 to 2")


def test_non_finite_numbers_are_visible_and_legal_json(tmp_path):
    with open_run(tmp_path) as sinks:
        sinks.log(step_record(1, loss=math.nan, grad_norm=math.inf, layer_recall=[0.5, -math.inf, None]))
    (record,) = read_strictly(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["grad_norm"]) == ("NaN", "Infinity")
    assert record["layer_recall"] == [0.5, "-Infinity", None]
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == math.inf
    assert record["layer_recall"] == [0.5, -math.inf, None]


def test_a_phase_may_be_called_nan(tmp_path):
    with open_run(tmp_path) as sinks:
        sinks.log(step_record(1) | {"phase": "NaN"})
    assert read_records(tmp_path / "metrics.jsonl")[0]["phase"] == "NaN"


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    sinks = open_run(tmp_path)
    for step in (1, 2):
        sinks.log(step_record(step))
        assert steps_of(tmp_path)[-1] == step
    sinks.close()
    sinks.close()


def test_resume_drops_what_will_run_again(tmp_path):
    with open_run(tmp_path) as sinks:
        for step in range(1, 8):
            sinks.log(step_record(step))
        sinks.log({"event": "validation", "step": 4, "phase": "sparse", "validation_loss": 2.0})
        sinks.log({"event": "validation", "step": 7, "phase": "sparse", "validation_loss": 1.0})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with open_run(tmp_path, resume_step=4) as sinks:
        sinks.log(step_record(5))
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:5] == [*before[:4], before[7]]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", ['{"step": 4, "loss": 0.1', '{"step": 4, "loss": 0.1\n', "\x00\x00\x00"])
def test_half_written_last_line_is_dropped(tmp_path, tail):
    with open_run(tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.log(step_record(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert steps_of(tmp_path) == [1, 2, 3]
    with open_run(tmp_path, resume_step=3) as sinks:
        sinks.log(step_record(4))
    assert [record["step"] for record in read_strictly(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b'{"step": ', b"[2]", b'{"step": 2, "loss": "\xff"}', b'{"loss": 1.0}'])
def test_damaged_records_are_named_and_kept_and_the_others_go_on(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1}\n' + damage + b'\n{"step": 3}\n'
    path.write_bytes(before)
    assert [record["step"] for record in read_records(path)] == [1, 3]
    assert re.search(r"metrics\.jsonl: record 2 of 3 is not .*; left out", caplog.text)
    for _ in range(2):  # the second resume finds nothing
        with open_run(tmp_path, resume_step=3):
            pass
    assert steps_of(tmp_path) == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    assert caplog.text.count("kept as metrics.jsonl.damaged") == 1


def test_resume_into_a_new_folder(tmp_path):
    with open_run(tmp_path / "a" / "b", resume_step=100) as sinks:
        sinks.log(step_record(101))
    assert steps_of(tmp_path / "a" / "b") == [101]


def test_fresh_start_keeps_the_earlier_files_apart(tmp_path):
    logging = LoggingConfig(tensorboard=True, wandb="disabled")
    for loss in (1.0, 2.0, 3.0):
        with open_run(tmp_path, logging=logging) as sinks:
            sinks.log(step_record(1, loss=loss))
            sinks.finish({"loss": loss})
        fault = tmp_path / "faults" / "20260101-000000" / "report.txt"
        fault.parent.mkdir(parents=True)
        fault.write_text(f"hang of {loss}")
    assert [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == [3.0]
    previous = sorted((tmp_path / "previous").iterdir())
    assert [read_records(path / "metrics.jsonl")[0]["loss"] for path in previous] == [1.0, 2.0]
    assert [json.loads((path / "summary.json").read_text())["loss"] for path in previous] == [1.0, 2.0]
    assert all((path / "tensorboard").is_dir() for path in previous)
    assert [next(path.glob("faults/*/report.txt")).read_text() for path in previous] == [
        "hang of 1.0",
        "hang of 2.0",
    ]


def test_summary(tmp_path):
    open_run(tmp_path).finish({"steps": 7, "recall": 0.1, "val_perplexity": math.nan})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse_constant)
    assert summary == {"steps": 7, "recall": 0.1, "val_perplexity": "NaN"}
    assert not list(tmp_path.glob("*.tmp"))


def test_names_of_scalars():
    record = step_record(
        5, loss=1.0, mfu=0.4, k_mean=9.0, lrs={"gates": 0.1}, layer_recall=[0.5, None], recall=None
    )
    record |= {"sink_by_position": {"0": 0.5, "1-3": None}, "head_first_token_attention": [[0.1, 0.2]]}
    assert to_scalars(record) == {
        "gsa/sink_by_position/0": 0.5,
        "train/loss": 1.0,
        "system/mfu": 0.4,
        "gsa/k_mean": 9.0,
        "lr/gates": 0.1,
        "gsa_layers/recall/layer_00": 0.5,
    }
    validation = {"event": "validation", "step": 5, "phase": "sparse", "validation_loss": 2.0, "tokens": 7}
    assert to_scalars(validation) == {"validation/loss": 2.0}
    validation = {"event": "validation", "validation_set": "web", "step": 5, "phase": "sparse"}
    validation |= {"validation_loss_by_source": {"C4": 1.0}, "validation_code_loss": 3.0}
    assert to_scalars(validation) == {"validation/loss_by_source/C4": 1.0, "validation/code_loss": 3.0}


def test_names_of_validation_sets(tmp_path):
    record = {"event": "validation", "step": 5, "phase": "sparse", "validation_loss": 2.0}
    assert validation_prefixes(record) == {"validation": "validation"}
    record |= {"validation_set": "NaN", "validation_a_loss": 1.0, "validation_a_perplexity": 2.0}
    record |= {"validation_a_loss_by_source": {"C4": math.nan}, "validation_b_loss": 1.0}
    with open_run(tmp_path) as sinks:
        sinks.log(record)
    (read,) = read_records(tmp_path / "metrics.jsonl")
    assert validation_prefixes(read) == {"validation": "NaN", "validation_a": "a", "validation_b": "b"}
    assert math.isnan(read["validation_a_loss_by_source"]["C4"])
    assert validation_prefixes(step_record(1)) == {}


def test_tensorboard_groups_its_plots_by_the_list_of_panels(tmp_path):
    with open_run(tmp_path, logging=LoggingConfig(tensorboard=True, wandb="disabled")) as sinks:
        sinks.log(step_record(1, loss=1.0, lrs={"base": 1.0}))
    events = tensorboard_of(tmp_path)
    (tensor,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(SECTIONS.values())
    losses, _, _, rates = layout.category[0].chart[:4]
    assert re.match(losses.multiline.tag[0], "train/loss")
    assert re.match(losses.multiline.tag[1], "validation/code_loss")
    assert not any(re.match(tag, "validation/loss_by_source/C4") for tag in losses.multiline.tag)
    assert re.match(rates.multiline.tag[0], "lr/base")


def test_no_curve_of_a_checksum(tmp_path):
    """The first chart of a run would be that of a number of 1e10 that says nothing by its height."""
    with open_run(tmp_path, logging=LoggingConfig(wandb="disabled")) as sinks:
        sinks.log(step_record(1, data_checksum=9_052_764_805, data_wait=0.5))
    tags = tensorboard_of(tmp_path).Tags()["scalars"]
    assert "data/data_wait" in tags
    assert not [tag for tag in tags if "checksum" in tag]
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["data_checksum"] == 9_052_764_805


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path):
    logging = LoggingConfig(tensorboard=True, wandb="disabled")
    with open_run(tmp_path, logging=logging) as sinks:
        for step in range(1, 7):
            sinks.log(step_record(step, loss=1.0, layer_recall=[0.25, 0.5]))
    with open_run(tmp_path, resume_step=3, logging=logging) as sinks:
        for step in range(4, 9):
            sinks.log(step_record(step, loss=2.0, layer_recall=[0.25, 0.5]))
    events = tensorboard_of(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((step, 2.0) for step in range(4, 9)),
    ]
    assert [event.step for event in events.Scalars("gsa_layers/recall/layer_01")] == list(range(1, 9))


def test_steps_that_run_again_move_to_a_file_of_their_own(tmp_path):
    logging = LoggingConfig(tensorboard=True, wandb="disabled")
    with open_run(tmp_path, logging=logging) as sinks:
        for step in range(1, 6):
            sinks.log(step_record(step))
        sinks.log({"event": "spike", "step": 5, "phase": "sparse", "signal": "NaN", "value": math.nan})
        sinks.go_back(3)
        sinks.log({"event": "rewind", "step": 3, "phase": "sparse"})
        for step in (4, 5):
            sinks.log(step_record(step, loss=9.0))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 3, 4, 5]
    assert records[-1]["loss"] == 9.0
    dropped = read_records(tmp_path / "metrics_rewound.jsonl")
    assert [record["step"] for record in dropped] == [4, 5, 5]
    assert (dropped[-1]["signal"], str(dropped[-1]["value"])) == ("NaN", "nan")
    events = tensorboard_of(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")][-2:] == [(4, 9.0), (5, 9.0)]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("events/rewind")] == [3]


def test_a_line_that_was_cut_off_among_the_dropped_ones_costs_no_other(tmp_path):
    """As a full disk or a kill leaves it."""
    with open_run(tmp_path) as sinks:
        for step in range(1, 5):
            sinks.log(step_record(step))
        (tmp_path / "metrics_rewound.jsonl").write_text(json.dumps(step_record(7)) + '\n{"step": 8, "ph')
        sinks.go_back(2)
    dropped = read_records(tmp_path / "metrics_rewound.jsonl")
    assert [record["step"] for record in dropped] == [7, 3, 4]


def test_a_rewind_misses_no_record_that_waited(tmp_path):
    with open_run(tmp_path) as sinks:
        for step in (1, 2):
            sinks.log(step_record(step))
        with files_end_at((tmp_path / "metrics.jsonl").stat().st_size + 20):
            for step in (3, 4, 5):
                sinks.log(step_record(step))
        sinks.go_back(4)
        sinks.log(step_record(5))
    assert read_strictly(tmp_path / "metrics.jsonl") == [step_record(step) for step in range(1, 6)]
    assert [record["step"] for record in read_records(tmp_path / "metrics_rewound.jsonl")] == [5]


def test_where_the_disk_is_still_full_in_a_rewind_the_steps_that_stay_wait_on(tmp_path, reluctant, caplog):
    file, _ = reluctant
    for step in (1, 2, 3):
        file.write(line_of(step))
    again = file.rewritten(lambda: None, last_step=2)
    again.write(line_of(3))
    again.close()
    *lines, lost = read_strictly(tmp_path / "metrics.jsonl")
    assert lines == [line_of(step) for step in (1, 2, 3)]
    assert (lost["event"], lost["lost_records"], lost["last_step"]) == ("log_lost", 1, 3)


def test_a_tensorboard_folder_that_cannot_be_made_ends_no_start(tmp_path, caplog):
    folder = tmp_path / "tensorboard"
    folder.write_text("in the way")
    sink = TensorBoardSink(folder, resume_step=4)
    sink.log({"step": 5}, {"train/loss": 1.0}, disk_works=True)
    assert "step 5: tensorboard cannot be written" in caplog.text
    folder.unlink()
    sink.log({"step": 6}, {"train/loss": 1.0}, disk_works=True)
    sink.close()
    assert "it misses 1 records of steps 5 to 5" in caplog.text
    (file,) = folder.iterdir()
    assert b"train/loss" in file.read_bytes()


@pytest.mark.parametrize("how", ["removed", "moved", "file removed", "file replaced"])
def test_a_run_folder_removed_under_a_run_costs_no_record(tmp_path, caplog, how):
    folder = tmp_path / "run"
    sinks = open_run(folder)
    for step in (1, 2):
        sinks.log(step_record(step))
    assert not sinks.folder_was_gone
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
    message = "metrics.jsonl was removed, moved or replaced while the run writes it: it is written again"
    assert caplog.text.count(message) == 1
    assert sinks.folder_was_gone is (how in ("removed", "moved"))
    if how == "removed":
        shutil.rmtree(folder)
    sinks.go_back(3)
    sinks.log(step_record(4))
    assert steps_of(folder) == [1, 2, 3, 4]
    sinks.close()
