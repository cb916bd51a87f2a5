"""Where logged records go: metrics.jsonl, TensorBoard and Weights & Biases. Opened on rank 0 only.

A *record* is a flat dict for one logged step. A value is a number, a string, None (not applicable), a
list with one number per layer (keys `layer_*`) or a dict of numbers (`lrs`: group -> learning rate).
What happens beside the steps has records of its own with an `event`: spikes and what was done about them
(gsa_train/monitor/); validation results (`validation`), where those of sets after the first have the set's name in
their keys (`validation_<name>_loss`), and `*_by_source` are dicts source -> value; saves that ended (`checkpoint`),
failed (`checkpoint_failed`), and checkpoints found damaged (`checkpoint_damaged`): their `step` is the checkpoint's;
they are logged when the loop hears of them, up to `logging.every_steps` later. `log_failed` (not in the file that it
tells of) and `log_lost` say which records a file misses (lost_records.py).

`metrics.jsonl` is strict JSON, one object per line, and floats read back bit-equal. JSON has no NaN, so a
non-finite number is written as the string "NaN", "Infinity" or "-Infinity": visible, legal in every
parser, and what `float()` and JavaScript's `Number()` accept. `read_records` turns them back into floats.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from gsa_train.config import LoggingConfig
from gsa_train.metrics.metrics_file import MetricsFile
from gsa_train.metrics.tensorboard_sink import TensorBoardSink
from gsa_train.metrics.wandb_sink import WandbSink
from gsa_train.report.panels import tag_of

Record = dict[str, Any]


def open_sinks(
    logging_config: LoggingConfig,
    run_dir: Path,
    phases: Sequence[str],
    resume_step: int | None,
    wandb: WandbSink | None,
    keeps_later: bool = False,
    validates_again: bool = False,
) -> Sinks:
    """`resume_step` is the step of the loaded checkpoint: what was logged after it is dropped, because those
    steps run again. With None the run starts at step 0, and what an earlier start left in the folder moves
    to `previous/<time>/`, so that nothing is lost and nothing is mixed. With `keeps_later` what is dropped moves to
    `metrics_rewound.jsonl`. With `validates_again` the validation at that step is dropped, too, because it comes
    again.

    `phases` are names, in their order; `wandb` is the open W&B run, if there is to be one.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_path = run_dir / "metrics.jsonl"
    if resume_step is None:
        _move_aside(run_dir)
    elif metrics_path.exists():
        if keeps_later:
            _keep_after(metrics_path, resume_step)
        _drop_after(metrics_path, resume_step, with_validation=validates_again)
    tensorboard = (
        TensorBoardSink(run_dir / "tensorboard", resume_step) if logging_config.tensorboard else None
    )
    return Sinks(run_dir, tensorboard, wandb, phases)


class Sinks:
    """Use as a context manager, or end with `finish` (the run is complete) or `close` (it is not)."""

    def __init__(
        self,
        run_dir: Path,
        tensorboard: TensorBoardSink | None,
        wandb: WandbSink | None,
        phases: Sequence[str] = (),
    ):
        """
        Args:
            phases: names, in their order.
        """
        self.run_dir = run_dir
        self.wandb_run_id: str | None = wandb.id if wandb else None
        """Belongs into every checkpoint, so that a restart continues the same W&B run."""
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", _to_json)
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._phases = list(phases)
        self._late: list[Record] = []

    def log(self, record: Record) -> None:
        """Every sink is flushed: a run killed right after this call has lost nothing. One that fails costs its own."""
        self.write_late()
        self._write(record)

    def log_later(self, record: Record) -> None:
        """Write it before the next record, or at `write_late`: writing takes the host some 10 ms."""
        self._late.append(record)

    def write_late(self) -> None:
        """What `log_later` left."""
        late, self._late = self._late, []
        for record in late:
            self._write(record)

    def _write(self, record: Record) -> None:
        news = self._metrics.write(record)
        for each in [record] if news is None else [record, news]:
            scalars = to_scalars(each)
            if each["phase"] in self._phases and "event" not in each:
                scalars[tag_of("phase_index")] = self._phases.index(each["phase"])
            if self._tensorboard:
                self._tensorboard.log(each, scalars, disk_works=self._metrics.works)
            if self._wandb:
                self._wandb.log(each, scalars)

    def tell_of_hang(self, step: int, report: str) -> None:
        """To W&B alone, whose run ends as failed: the main thread hangs, perhaps in one of the files."""
        record = {"event": "hang", "step": step, "reason": report}
        if self._wandb:
            self._wandb.log(record, to_scalars(record))
            self._wandb.close(exit_code=1)

    def go_back(self, step: int) -> None:
        """What was logged after `step` moves to `metrics_rewound.jsonl`, because those steps run again."""
        self.write_late()
        self._metrics.close()
        path = self.run_dir / "metrics.jsonl"
        _keep_after(path, step)
        _drop_after(path, step)
        self._metrics = MetricsFile(path, _to_json, self._metrics.lost)
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = TensorBoardSink(self.run_dir / "tensorboard", step)

    def finish(self, summary: Record) -> None:
        """Write `summary.json` and close."""
        self.write_late()
        write_atomically(self.run_dir / "summary.json", _to_json(summary, indent=2) + "\n")
        if self._wandb:
            self._wandb.finish(summary)
        self.close()

    def close(self, exit_code: int = 0) -> None:
        """Close without a summary; W&B marks the run as failed when `exit_code` is not 0. Twice is once."""
        self.write_late()
        self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb:
            self._wandb.close(exit_code)
            self._wandb = None

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)


def to_scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by their tags (gsa_train.report.panels); None and text have none."""
    scalars: dict[str, float | None] = {}
    if tells_by_its_event(record):
        return {f"events/{record['event']}": 1.0}
    for key, value in record.items():
        if key == "step" or isinstance(value, str):
            continue
        tag = tag_of(key)
        if isinstance(value, list):
            scalars.update({f"{tag}/layer_{i:02d}": v for i, v in enumerate(value)})
        elif isinstance(value, dict):
            scalars.update({f"{tag}/{name}": v for name, v in value.items()})
        elif key != "tokens" or "event" not in record:  # of an event they are only where it stands
            scalars[tag] = value
    return {name: value for name, value in scalars.items() if value is not None}


def tells_by_its_event(record: Record) -> bool:
    """What the monitor says; validations and saves come with numbers of their own."""
    event = record.get("event", "")
    return event not in ("", "validation") and not event.startswith("checkpoint")


def validation_prefixes(record: Record) -> dict[str, str]:
    """Of a validation record: how the keys of each set begin -> the set's name, the first set first."""
    if record.get("event") != "validation":
        return {}
    first = {"validation": record.get("validation_set", "validation")}
    others = (re.fullmatch(r"(validation_(\w+))_loss", key) for key in record)
    return first | {match[1]: match[2] for match in others if match}


# --- metrics.jsonl -------------------------------------------------------------------------------------

TEXTS = frozenset(
    "phase event validation_set signal action reason file checkpoint_name checkpoint_error".split()  # noqa: SIM905
)
"""Keys of strings that are no numbers, whatever they say."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_records(path: Path) -> list[Record]:
    """All complete records of a metrics.jsonl, in order; the run may still be writing it."""
    return [_numbers_back(record) for _, record in _read_lines(path)]


def write_atomically(path: Path, text: str) -> None:
    """After a crash at any moment the file has its old content or the new one, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_lines(path: Path) -> list[tuple[str, Record]]:
    """(line, its object). A last line that is cut off, as a kill or a full disk leaves it, is dropped."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]
    parsed: list[tuple[str, Record]] = []
    for number, line in enumerate(lines, start=1):
        wrong = None
        try:
            record = json.loads(line)
            if isinstance(record, dict):
                parsed.append((line, record))
            else:
                wrong = "an object"
        except json.JSONDecodeError as error:
            if number < len(lines):
                wrong = f"JSON ({error})"
        if wrong is not None:
            raise ValueError(
                f"{path}: record {number} of {len(lines)} is not {wrong}. A killed run leaves only its last record cut "
                "off; delete this line, or move the file away to go on without it."
            )
    return parsed


def _keep_after(path: Path, step: int) -> None:
    dropped = [line for line, record in _read_lines(path) if record["step"] > step]
    kept = path.with_name("metrics_rewound.jsonl")
    before = [line for line, _ in _read_lines(kept)] if kept.exists() else []
    write_atomically(kept, "".join(f"{line}\n" for line in [*before, *dropped]))


def _drop_after(path: Path, step: int, with_validation: bool = False) -> None:
    """Lines are kept as they are, so that their floats stay bit-equal.

    Args:
        with_validation: drop the validation at `step`, too.
    """

    def stays(record: Record) -> bool:
        again = with_validation and record["step"] == step and record.get("event") == "validation"
        return bool(record["step"] <= step) and not again

    write_atomically(path, "".join(f"{line}\n" for line, record in _read_lines(path) if stays(record)))


FILES = (
    "metrics.jsonl",
    "metrics_rewound.jsonl",
    "monitor_stop.json",
    "summary.json",
    "starts.jsonl",
    "report.html",
)
OUTPUTS = (*FILES, "tensorboard", "plots", "profile", "checkpoints", "faults")


def _move_aside(run_dir: Path) -> None:
    found = [run_dir / name for name in OUTPUTS]
    found = [path for path in found if path.exists()] + sorted(run_dir.glob("summary_*.json"))
    if found:
        previous = run_dir / "previous" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        previous.mkdir(parents=True)
        for path in found:
            path.rename(previous / path.name)


def _to_json(record: Record, indent: int | None = None) -> str:
    return json.dumps(_strict(record), allow_nan=False, indent=indent)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers_back(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _numbers_back(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers_back(item) for item in value]
    if isinstance(value, str) and key not in TEXTS:
        return _NON_FINITE.get(value, value)
    return value
