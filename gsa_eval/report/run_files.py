"""Read one run for a report: its records, starts, config and events, and values derived from them."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_eval.report.events import events_of
from gsa_eval.report.run_series import (
    flat,
    is_own,
    known_of,
    phase_starts,
    records_of,
    token_knots,
    tokens_at,
)
from gsa_train.config import Config, ConfigError, load_config
from gsa_train.config.batch_ramp import tokens_before
from gsa_train.metrics.goodput.account import Account
from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.progress import compact
from gsa_train.metrics.record_checks import fault_of_samples, is_number
from gsa_train.metrics.record_format import SAMPLES, Record, numbers_back, read_records
from gsa_train.run_folder.starts import read_starts

logger = logging.getLogger(__name__)


class RunFiles:
    """Holds a running, complete or killed run. Unknown values are None."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.records = [flat(record) for record in records_of(folder)]
        self.known = known_of(self.records)
        self.steps = [record for record in self.records if "event" not in record]
        self.starts = read_starts(folder, needed=("step", "layout", "host"))
        self.samples = _read_samples(folder / SAMPLES)
        """Records of validations with `evaluate.prompts`, in the order of the steps."""
        self.summary = read_summary(folder)
        self.stopped: Record = read_json(folder / "stopped.json", {"step": int, "reason": str})
        self.config_path = folder / "config.yaml"
        has_config = self.config_path.is_file() and is_own(self.config_path, folder)
        self.config_yaml = (
            self.config_path.read_text(encoding="utf-8", errors="replace") if has_config else ""
        )
        self.phases = phase_starts(self.records)
        self.token_knots = token_knots(self.records)
        self.events = events_of(folder, self.records, self.starts)

    @cached_property
    def config(self) -> Config | None:
        """Returns the config, or None if it is missing or of a version with other fields."""
        if not self.config_yaml:
            return None
        try:
            return load_config(self.config_path, need_data=False)
        except ConfigError:
            return None

    @cached_property
    def goodput(self) -> Account | None:
        return read_account(self.folder)

    @property
    def last_step(self) -> int:
        return max(record["step"] for record in self.records)

    @property
    def planned_steps(self) -> int | None:
        return None if self.config is None else sum(phase.steps for phase in self.config.phases)

    @property
    def planned_tokens(self) -> int | None:
        """Returns the tokens of all phases: tokens trained so far, and one batch of the config for each step left."""
        if self.config is None or self.planned_steps is None:
            return None
        done = min(self.last_step, self.planned_steps)
        trained = tokens_at(self.token_knots, [done])[0] if self.token_knots else None
        train = self.config.train
        before = tokens_before(train, done)
        left = tokens_before(train, self.planned_steps) - before
        return round(before if trained is None else trained) + left

    @property
    def wall_seconds(self) -> float | None:
        """Returns the sum of times from each start to the last record before the next start. Loading and validating
        count, but waiting for a start does not."""
        times = [record["time"] for record in self.records if "time" in record]
        begins = [start["unix_seconds"] for start in self.starts]
        if not times or not begins:
            return None
        ends = [*begins[1:], float("inf")]
        total = 0.0
        for begin, end in zip(begins, ends, strict=True):
            total += max((time for time in times if begin <= time < end), default=begin) - begin
        return total

    @property
    def state(self) -> str:
        if self.summary:
            return "complete"
        if self.stopped:
            return (
                f"stopped after step {self.stopped['step']} by {self.stopped['reason']}, to be started again"
            )
        return "running, or killed"

    def tokens_at(self, step: int) -> str:
        """Format the tokens at a step; a dash if unknown."""
        return compact(tokens_at(self.token_knots, [step])[0]) if self.token_knots else "–"

    def last(self, key: str) -> Any:
        """Returns the newest value of a metric, or None."""
        values = [record[key] for record in self.records if record.get(key) is not None]
        return values[-1] if values else None

    def median(self, key: str) -> float | None:
        """Returns the median over the logged steps, or None if no step has a value."""
        values = [record[key] for record in self.steps if record.get(key) is not None]
        return statistics.median(values) if values else None


def _read_samples(path: Path) -> list[Record]:
    return read_records(path, fault_of_samples) if path.is_file() else []


def read_summary(folder: Path) -> Record:
    """Read summary.json, which is {} before the end of the run."""
    return read_json(folder / "summary.json", {"steps": int})


def baselines_of(summary: Record) -> dict[str, float]:
    """Returns the losses of unigram and bigram models on the same text."""
    perplexities = {name: numbers_back(summary.get(f"{name}_perplexity")) for name in ("unigram", "bigram")}
    return {
        name: math.log(value)
        for name, value in perplexities.items()
        if is_number(value) and 0 < value < math.inf
    }


def read_json(path: Path, needed: Mapping[str, type]) -> Record:
    """Read a JSON file. The result is {} if the file is missing, or damaged (with a warning).

    Args:
        needed: the keys of an intact file, and their types.
    """
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in needed.items()):
            return found
        fault = f"it is not an object with {' and '.join(needed)}"
    except (OSError, ValueError, RecursionError) as error:  # from JSON and UTF-8
        fault = str(error)
    logger.warning("%s is damaged (%s); left out", path, fault)
    return {}
