"""Tests that the logs of a run can be read back exactly, also after a kill. After a resume, no step is in the logs
twice."""

import json
import math
import random
import re
import struct
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from gsa_train.config import LoggingConfig
from gsa_train.metrics.panels import BEST, PANELS, SECTIONS, tag_of
from gsa_train.metrics.record_format import go_back, read_records, to_scalars, validation_prefixes
from gsa_train.run.run_log import RunLog
from helpers.run_logs import (
    numbers_of_event_files,  # noqa: F401 - pytest finds it here
    open_run,
    read_strictly,
    refuse_constant,
    step_record,
    steps_of,
    tensorboard_of,
)


def test_floats_read_back_bit_equal(tmp_path):
    generator = random.Random(0)
    values = [struct.unpack("d", generator.randbytes(8))[0] for _ in range(500)]
    values = [value for value in values if math.isfinite(value)]
    values += [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3]
    with closing(open_run(tmp_path)) as sinks:
        sinks.log(step_record(1, layer_recall=values, lrs={"base": 0.1 + 0.2}, tokens=2**60))
    (record,) = read_strictly(tmp_path / "metrics.jsonl")
    assert [v.hex() for v in record["layer_recall"]] == [v.hex() for v in values]
    assert record["lrs"]["base"].hex() == (0.1 + 0.2).hex()
    assert record["tokens"] == 2**60


def test_non_finite_numbers_are_visible_and_legal_json(tmp_path):
    with closing(open_run(tmp_path)) as sinks:
        record = step_record(1, loss=math.nan, grad_norm=math.inf, layer_recall=[0.5, -math.inf, None])
        sinks.log(record | {"phase": "NaN"})  # a phase of this name keeps it
    (record,) = read_strictly(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["grad_norm"]) == ("NaN", "Infinity")
    assert record["layer_recall"] == [0.5, "-Infinity", None]
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["phase"]) == (math.inf, "NaN")
    assert record["layer_recall"] == [0.5, -math.inf, None]


def test_resume_drops_what_will_run_again(tmp_path):
    with closing(open_run(tmp_path)) as sinks:
        for step in range(1, 8):
            sinks.log(step_record(step))
        sinks.log({"event": "validation", "step": 4, "phase": "sparse", "validation_loss": 2.0})
        sinks.log({"event": "validation", "step": 7, "phase": "sparse", "validation_loss": 1.0})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    sinks = open_run(tmp_path, resume_step=4)
    sinks.log(step_record(5))  # and is on disk now
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    sinks.close()
    sinks.close()
    assert after[:5] == [*before[:4], before[7]]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", ['{"step": 4, "loss": 0.1', '{"step": 4, "loss": 0.1\n', "\x00\x00\x00"])
def test_half_written_last_line_is_dropped(tmp_path, tail):
    with closing(open_run(tmp_path)) as sinks:
        for step in (1, 2, 3):
            sinks.log(step_record(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert steps_of(tmp_path) == [1, 2, 3]
    with closing(open_run(tmp_path, resume_step=3)) as sinks:
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
        open_run(tmp_path, resume_step=3).close()
    assert steps_of(tmp_path) == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    assert caplog.text.count("kept as metrics.jsonl.damaged") == 1


def test_a_file_from_which_nothing_is_dropped_is_not_written_again(tmp_path):
    """The file may have hundreds of MB, and all ranks wait for it."""
    path = tmp_path / "metrics.jsonl"
    with closing(open_run(tmp_path)) as sinks:
        for step in (10, 20):
            sinks.log(step_record(step))
    before = path.stat().st_ino
    assert go_back(path, 20) == 20
    assert go_back(path, 30, keeps_later=True, with_validation=True) == 20
    assert path.stat().st_ino == before
    path.write_bytes(path.read_bytes() + b'{"step": 20, "lo')  # as a kill leaves it
    assert go_back(path, 20) == 20
    assert steps_of(tmp_path) == [10, 20]
    assert path.stat().st_ino != before
    assert go_back(path, 5) == 0
    assert path.read_bytes() == b""


def test_fresh_start_keeps_the_earlier_files_apart(tmp_path):
    logging = LoggingConfig(tensorboard=True, wandb="disabled")
    for loss in (1.0, 2.0, 3.0):
        with closing(open_run(tmp_path, logging=logging)) as sinks:
            sinks.log(step_record(1, loss=loss))
            sinks.finish({"loss": loss})
        fault = tmp_path / "faults" / "20260101-000000" / "report.txt"
        fault.parent.mkdir(parents=True)
        fault.write_text(f"hang of {loss}")
        (tmp_path / "evaluations" / "last").mkdir(parents=True)  # of weights that the next start lacks
    assert [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == [3.0]
    previous = sorted((tmp_path / "previous").iterdir())
    assert [read_records(path / "metrics.jsonl")[0]["loss"] for path in previous] == [1.0, 2.0]
    assert [json.loads((path / "summary.json").read_text())["loss"] for path in previous] == [1.0, 2.0]
    assert all((path / "tensorboard").is_dir() for path in previous)
    faults = [next(path.glob("faults/*/report.txt")).read_text() for path in previous]
    assert faults == ["hang of 1.0", "hang of 2.0"]
    assert all((path / "evaluations" / "last").is_dir() for path in previous)


def test_summary(tmp_path):
    open_run(tmp_path).finish({"steps": 7, "recall": 0.1, "val_perplexity": math.nan})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse_constant)
    assert summary == {"steps": 7, "recall": 0.1, "val_perplexity": "NaN"}
    assert not list(tmp_path.glob("*.tmp"))


def test_names_of_scalars():
    record = step_record(5, loss=1.0, mfu=0.4, k_mean=9.0, lrs={"gates": 0.1}, recall=None, data_checksum=7)
    record |= {"layer_recall": [0.5, None], "head_first_token_attention": [[0.1, 0.2]]}
    record |= {"sink_by_position": {"0": 0.5, "1-3": None}}
    scalars = {"train/loss": 1.0, "system/mfu": 0.4, "gsa/k_mean": 9.0, "lr/gates": 0.1}
    scalars |= {"gsa/sink_by_position/0": 0.5, "gsa_layers/recall/layer_00": 0.5}
    assert to_scalars(record) == scalars
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
    with closing(open_run(tmp_path)) as sinks:
        sinks.log(record)
    (read,) = read_records(tmp_path / "metrics.jsonl")
    assert validation_prefixes(read) == {"validation": "NaN", "validation_a": "a", "validation_b": "b"}
    assert math.isnan(read["validation_a_loss_by_source"]["C4"])
    assert validation_prefixes(step_record(1)) == {}


def test_tensorboard_groups_its_plots_by_the_list_of_panels(tmp_path):
    with closing(open_run(tmp_path, logging=LoggingConfig(tensorboard=True, wandb="disabled"))) as sinks:
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


def test_steps_that_run_again_move_to_a_file_of_their_own_and_are_shown_once(tmp_path):
    logging = LoggingConfig(tensorboard=True, wandb="disabled")
    with closing(open_run(tmp_path, logging=logging)) as sinks:
        for step in range(1, 7):
            sinks.log(step_record(step, loss=1.0, layer_recall=[0.25, 0.5]))
    with closing(open_run(tmp_path, resume_step=3, logging=logging)) as sinks:
        for step in (4, 5, 6):
            sinks.log(step_record(step, loss=2.0, layer_recall=[0.25, 0.5]))
        sinks.log({"event": "spike", "step": 6, "phase": "sparse", "signal": "NaN", "value": math.nan})
    with closing(open_run(tmp_path, resume_step=5, logging=logging, keeps_later=True)) as sinks:
        sinks.log(step_record(6, loss=9.0, layer_recall=[0.25, 0.5]))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    again, spike = read_records(tmp_path / "metrics_rewound.jsonl")
    assert (again["step"], again["loss"], spike["signal"], str(spike["value"])) == (6, 2.0, "NaN", "nan")
    events = tensorboard_of(tmp_path)
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 9.0)]
    assert [event.step for event in events.Scalars("gsa_layers/recall/layer_01")] == [1, 2, 3, 4, 5, 6]


# --- late records ------------------------------------------------------------------------------------------


def test_a_late_record_comes_before_the_next_one_and_at_the_latest_at_the_end(tmp_path: Path) -> None:
    log = RunLog(open_run(tmp_path), Mock(), None, writes_late=True)

    def log_late(step: int) -> None:
        def make_and_log() -> None:
            log.log({"step": step, "phase": "sparse", "loss": 1.0})
            log.log({"event": "warning", "step": step, "phase": "sparse"})  # of the record

        log.log_late(make_and_log)

    def logged(file: str = "metrics.jsonl") -> list[tuple[int, str | None]]:
        return [(each["step"], each.get("event")) for each in read_records(tmp_path / file)]

    log_late(1)
    assert logged() == []
    log.write_late()
    log.write_late()
    expected: list[tuple[int, str | None]] = [(1, None), (1, "warning")]
    assert logged() == expected
    log_late(2)
    log.log({"event": "spike", "step": 2, "phase": "sparse"})
    expected += [(2, None), (2, "warning"), (2, "spike")]
    assert logged() == expected
    log_late(4)
    log.write_late()
    expected += [(4, None), (4, "warning")]
    assert logged() == expected
    log_late(5)
    log.close(0)
    assert logged() == [*expected, (5, None), (5, "warning")]


def test_the_list_of_panels_is_one():
    assert {panel.section for panel in PANELS} == set(SECTIONS)
    assert len({(panel.section, panel.label) for panel in PANELS}) == len(PANELS)
    shown = [tag for panel in PANELS for tag in panel.tags]
    assert len(shown) == len(set(shown)), "a metric stands in two panels"
    assert all(map(tag_of, BEST))
    tags = {"lr": "train/lr", "lrs": "lr", "tokens": "train/tokens", "k_mean": "gsa/k_mean"}
    assert {key: tag_of(key) for key in tags} == tags
    keys = {key for panel in PANELS for key in panel.keys}
    assert set(BEST) <= keys | {"validation_loss", "validation_perplexity"}
