"""Define the format of records, and of metrics.jsonl, which stores them.

A *record* is a flat dict for one logged step. `time` is when the record was made, in Unix seconds. A value is a
number, a string, None (not applicable), or one of:
- a list with one number per layer (keys `layer_*`);
- a dict of numbers (`lrs`: group -> learning rate; `sink_by_position`: positions -> share);
- a list of lists: one list per layer, with one number per head (keys `head_*`) or per expert (`expert_loads`).

Other events have records with the key `event`:
- events of the monitor: a spike, or the reaction to a spike (gsa_train/reliability/monitor/);
- `validation`: the results of a validation. For each set after the first, the keys contain the name of the set
  (`validation_<name>_loss`). The values of keys `*_by_source` are dicts source -> value;
- `tasks`: the scores of tasks. The values of keys `eval_<score>` are dicts task -> value;
- `checkpoint`, `checkpoint_failed` and `checkpoint_damaged`: a save has ended, a save has failed, or a checkpoint was
  found to be damaged. `step` is the step of the checkpoint. The record may be logged up to `logging.every_steps` steps
  later;
- `log_failed` and `log_written`: a file cannot be written, or can be written again. Only the other sinks get these
  records;
- `log_lost`: how many records a file lacks, and the first and last step of these records (lost_records.py).

`metrics.jsonl` is strict JSON with one object per line. Floats read back bit-equal. JSON has no NaN, so a number that
is not finite is written as the string "NaN", "Infinity" or "-Infinity". `read_records` turns the strings into floats.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from gsa_data.faults import printable
from gsa_train.files import write_atomically
from gsa_train.metrics.panels import PICTURES, tag_of
from gsa_train.metrics.record_checks import TEXTS, Record, is_step

logger = logging.getLogger(__name__)

NO_CURVES = frozenset(["step", "time", "data_checksum"])
"""Keys without a curve in TensorBoard and W&B, in addition to PICTURES. Both store step and time themselves, and the
checksum is only compared between runs."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RARE = re.compile(r"\\u[dD]|\d{19}")
"""Matches lone surrogates, which cannot be encoded, and integers too large for a float. Only matching lines are checked
value by value."""
_LONGEST_INTEGER = 20
"""Largest number of digits."""


def to_scalars(record: Record) -> dict[str, float]:
    """Returns the numbers of a record by their tags (gsa_train.metrics.panels), without None and text."""
    scalars: dict[str, float | None] = {}
    if tells_by_its_event(record):
        return {f"events/{record['event']}": 1.0}
    for key, value in record.items():
        if key in NO_CURVES or key in PICTURES or isinstance(value, str):
            continue
        tag = tag_of(key)
        if isinstance(value, list):
            scalars.update({f"{tag}/layer_{i:02d}": v for i, v in enumerate(value)})
        elif isinstance(value, dict):
            scalars.update({f"{tag}/{name}": v for name, v in value.items()})
        elif key != "tokens" or "event" not in record:  # in an event they only give its position
            scalars[tag] = value
    return {name: value for name, value in scalars.items() if value is not None}


def tells_by_its_event(record: Record) -> bool:
    """Whether the event itself is the message, as for the monitor. Validations and saves have numbers."""
    event = record.get("event", "")
    return event not in ("", "validation", "tasks") and not event.startswith("checkpoint")


def values_in_words(record: Record, without: Collection[str]) -> list[str]:
    """Returns `key value` for each entry except the time, floats with four digits."""
    return [
        f"{key.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else printable(str(value))}"
        for key, value in record.items()
        if key not in without and key != "time"
    ]


def validation_prefixes(record: Record) -> dict[str, str]:
    """Returns a dict from the prefix of a validation set's keys to the set's name, for all sets in the record.

    The first set comes first. If the record is not of a validation, the dict is empty.
    """
    if record.get("event") != "validation":
        return {}
    first = {"validation": record.get("validation_set", "validation")}
    others = (re.fullmatch(r"(validation_(\w+))_loss", key) for key in record)
    return first | {match[1]: match[2] for match in others if match}


def read_records(path: Path, fault_of: Callable[[Record], str] = lambda _: "") -> list[Record]:
    """Returns all intact records of a metrics.jsonl, in order. The run may still be writing the file.

    Damaged records are counted, and the first is named.

    Args:
        fault_of: returns the fault of a record, or ""; for callers that need more than the step.
    """
    lines, damaged = read_lines(path, lambda record: _without_step(record) or fault_of(record))
    if damaged:
        logger.warning("%s: %s; left out", path, damaged)
    return [record for _, record in lines]


def _without_step(record: Any) -> str:
    is_whole = isinstance(record, dict) and is_step(record.get("step"))
    return "" if is_whole else "is not an object with a step"


def read_lines(
    path: Path, fault_of: Callable[[Any], str] = _without_step, kind: str = "record"
) -> tuple[list[tuple[str, Any]], str]:
    """Returns (line, value) for each intact line of JSON, and a text about damaged lines, or "". The text has the first
    fault and the number of further faults. If a kill or a full disk cut off the last line, that line is dropped.

    Args:
        fault_of: returns the fault of a value, or "".
        kind: what the text calls a line.
    """
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    parsed: list[tuple[str, Any]] = []
    wrong: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
            record = _parse(text)
        except (ValueError, RecursionError) as error:  # from JSON and UTF-8
            if number < len(lines):
                wrong.append(f"{kind} {number} of {len(lines)} is not JSON ({error})")
            continue
        if fault := fault_of(record):
            wrong.append(f"{kind} {number} of {len(lines)} {fault}")
        else:
            parsed.append((text, record))
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return parsed, f"{wrong[0]}{more}" if wrong else ""


def _parse(line: str) -> Any:
    value = json.loads(line)
    if _RARE.search(line):
        json.loads(line, parse_int=_bounded)
        json.dumps(value, ensure_ascii=False).encode()
    # Few lines match. Checking all values would take longer than parsing them.
    return numbers_back(value) if any(name in line for name in _NON_FINITE) else value


def _bounded(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def go_back(path: Path, step: int, keeps_later: bool = False, with_validation: bool = False) -> int:
    """Drop the records of a metrics.jsonl after `step`, because their steps run again.

    Other ranks wait for this call. To save time, the file is read only once, and is written only if its content
    changes. The remaining lines are copied as text, so floats stay bit-equal. Damaged lines are also dropped, and a
    copy of the damaged file is kept as `*.damaged`.

    Args:
        keeps_later: move dropped records to `metrics_rewound.jsonl`.
        with_validation: also drop the validation and the samples at `step`.

    Returns:
        The step of the newest record that stays, or 0.
    """
    lines, damaged = _intact_lines(path)
    if keeps_later:
        _keep_rewound(path, [line for line, record in lines if record["step"] > step])
    stay = [(line, record) for line, record in lines if _stays(record, step, with_validation)]
    text = _as_text(line for line, _ in stay)
    if damaged or len(text.encode()) != path.stat().st_size:
        write_atomically(path, text)
    return max((record["step"] for _, record in stay), default=0)


def _stays(record: Record, step: int, with_validation: bool) -> bool:
    again = with_validation and record["step"] == step and record.get("event") in ("validation", "samples")
    return bool(record["step"] <= step) and not again


def _keep_rewound(path: Path, dropped: list[str]) -> None:
    kept = path.with_name("metrics_rewound.jsonl")
    before = _intact_lines(kept)[0] if kept.exists() else []
    write_atomically(kept, _as_text([*(line for line, _ in before), *dropped]))


def _intact_lines(path: Path) -> tuple[list[tuple[str, Record]], bool]:
    """Returns (line, record) for each intact line, and whether others are damaged. Keeps a copy of a damaged file."""
    lines, damaged = read_lines(path)
    if damaged:
        kept, count = path.with_name(f"{path.name}.damaged"), 1
        while os.path.lexists(kept):
            count += 1
            kept = path.with_name(f"{path.name}.damaged.{count}")
        write_atomically(kept, path.read_bytes())
        said = "%s: %s; kept as %s, the run continues with the intact records"
        logger.warning(said, path, damaged, kept.name)
    return lines, bool(damaged)


def _as_text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def to_json(record: Record, indent: int | None = None) -> str:
    return json.dumps(to_strict(record), allow_nan=False, indent=indent)


def to_strict(value: Any) -> Any:
    """Returns the value with non-finite numbers as text, for strict JSON."""
    if isinstance(value, dict):
        return {key: to_strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def numbers_back(value: Any, key: str = "") -> Any:
    """Invert `to_strict`. Tuples come back as lists.

    Args:
        key: the key under which a dict holds the value.
    """
    if isinstance(value, dict):
        return {name: numbers_back(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [numbers_back(item) for item in value]
    if isinstance(value, str) and key not in TEXTS:
        return _NON_FINITE.get(value, value)
    return value
