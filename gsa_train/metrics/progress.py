"""Print progress to the console: a bar on a terminal, otherwise one plain line per logged record."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from gsa_data.faults import printable
from gsa_train.metrics.record_format import tells_by_its_event, validation_prefixes, values_in_words

SMOOTHING = 0.3
"""Weight of the latest interval in the moving average of seconds per step (tqdm's default)."""


class Progress:
    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin after `start_step` steps. `interactive=None` asks whether stderr is a terminal."""
        self._total_steps = total_steps
        self._clock = clock
        self._last_step, self._last_time = start_step, clock()
        self._seconds_per_step: float | None = None
        self._bar: tqdm[Any] | None = None
        if _is_terminal() if interactive is None else interactive:
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=sys.stderr,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar:10}| step {n_fmt}/{total_fmt}  {desc}",
            )

    def show(self, record: dict[str, Any]) -> None:
        width = max(6, len(str(self._total_steps)))
        place = f"step {record['step']:>{width}}/{self._total_steps}  {record['phase']:<8}"
        if "event" in record:
            for columns in _columns_of_event(record):
                self.message("  ".join([place, *columns]))
            return
        eta = duration(self._measure(record["step"]))
        if self._bar is None:
            self.message("  ".join([place, *_columns(record), f"eta {eta}"]))
            return
        self._bar.n = record["step"]
        self._bar.set_description_str(f"{_bar_text(record)}  eta {eta}")

    def message(self, text: str) -> None:
        """Print a line to stdout without breaking the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _measure(self, step: int) -> float | None:
        """Returns the seconds left, from the wall time between records, which includes saves and validation."""
        now = self._clock()
        if step > self._last_step:
            latest = (now - self._last_time) / (step - self._last_step)
            average = latest if self._seconds_per_step is None else self._seconds_per_step
            self._seconds_per_step = average + SMOOTHING * (latest - average)
            self._last_step, self._last_time = step, now
        if self._seconds_per_step is None:
            return None
        return self._seconds_per_step * (self._total_steps - step)


def _is_terminal() -> bool:
    """Whether stderr is a terminal with a width. Some terminals in containers have no width, and would show no bar."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # the terminal was closed
        return False


def _columns(record: dict[str, Any]) -> list[str]:
    return [
        f"loss {_number(record.get('loss'), '7.4f')}",
        f"kl {_number(record.get('indexer_kl'), '7.4f')}",
        _recall(record, "", "5.3f"),
        f"gnorm {_number(record.get('grad_norm'), '8.3g')}",
        f"lr {_number(record.get('lr'), '7.1e')}",
        f"{compact(record.get('tokens_per_second')):>6} tok/s",
        f"mfu {_percent(record.get('mfu')):>5}",
        f"data {_percent(record.get('data_wait')):>5}",
    ]


def _bar_text(record: dict[str, Any]) -> str:
    columns = [
        str(record["phase"]),
        f"loss {_number(record.get('loss'), '.4f')}",
        f"kl {_number(record.get('indexer_kl'), '.4f')}",
        _recall(record, "", ".3f"),
        f"{compact(record.get('tokens_per_second'))} tok/s",
    ]
    return "  ".join(columns)


def _recall(record: dict[str, Any], prefix: str, form: str) -> str:
    """Format the recall of the selected keys and, for comparison, the recall of as many random keys."""
    selected, random = record.get(f"{prefix}recall"), record.get(f"{prefix}random_recall")
    return f"recall {_number(selected, form)} (random {_number(random, form)})"


def _columns_of_event(record: dict[str, Any]) -> list[list[str]]:
    """Returns the columns of each line. Each validation set or task has a line. Events that are logged elsewhere have
    none."""
    if record["event"] == "validation":
        return [
            [
                f"validation loss {_number(record.get(f'{prefix}_loss'), '7.4f')}",
                f"perplexity {_number(record.get(f'{prefix}_perplexity'), '8.2f')}",
                _recall(record, "validation_", "5.3f") if prefix == "validation" else name,
            ]
            for prefix, name in validation_prefixes(record).items()
        ]
    if record["event"] == "tasks":
        scores = {
            key.removeprefix("eval_"): value for key, value in record.items() if isinstance(value, dict)
        }
        return [
            [printable(name)]
            + [f"{key.replace('_', ' ')} {each[name]:.4f}" for key, each in scores.items() if name in each]
            for name in dict.fromkeys(itertools.chain(*scores.values()))
        ]
    if tells_by_its_event(record):
        words = values_in_words(record, without=("event", "step", "phase"))
        return [[record["event"].replace("_", " ").upper(), *words]]
    return []


def _number(value: float | None, form: str) -> str:
    """Format a number. A missing value becomes `--` of the same width."""
    width = int(form.split(".")[0] or 0)
    return f"{'--':>{width}}" if value is None else f"{value:{form}}"


def _percent(fraction: float | None) -> str:
    return "--" if fraction is None else f"{fraction:.1%}"


def compact(value: float | None) -> str:
    """Format 12345 as 12.3k."""
    if value is None:
        return "--"
    for unit in ("", "k", "M"):
        if abs(value) < 999.5 or not math.isfinite(value):
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def duration(seconds: float | None) -> str:
    """Format with the two largest units: 45s, 2m31s, 3h05m, 2d04h."""
    if seconds is None or not math.isfinite(seconds):
        return "--"
    total = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for (unit, length), (next_unit, next_length) in itertools.pairwise(units):
        if total >= length:
            return f"{total // length}{unit}{total % length // next_length:02d}{next_unit}"
    return f"{total}s"
