"""Score a model on RULER: accuracy by task and length, and the effective length."""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from gsa_data.tokenize import Tokenizer
from gsa_eval.ruler import TASKS, Sample, check_task, samples

THRESHOLD = 85.6
"""Llama-2-7B's mean at 4K, by which RULER defines the effective length."""

MOST_PROCESSES = 8
IN_PROCESS_TOKENS = 200_000
"""With fewer prompt tokens in total, this process makes the prompts faster than worker processes could start."""

Generate = Callable[[Sequence[Sample], int], list[str]]
"""(samples, tokens of an answer) -> answers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RulerOptions:
    lengths_tokens: Sequence[int]
    tasks: Sequence[str] = tuple(TASKS)
    samples: int = 50
    seed: int = 0
    essay: Sequence[str] = ()
    """Words of the text that hides needles."""


def answer_score(answer: str, expected: Sequence[str]) -> float:
    """Returns the share of expected strings in the answer, ignoring case."""
    return sum(each.lower() in answer.lower() for each in expected) / len(expected)


def score_ruler(generate: Generate, tokenizer: Tokenizer, options: RulerOptions) -> dict[str, Any]:
    """Returns the entry `ruler` of results.json:

    * `scores` by length and task, and `mean` by length, from 0 to 100, with standard errors (NaN for one sample)
    * `effective_length`: the longest length with a mean of at least `THRESHOLD`, or None
    * `needles`: score and depth for each prompt with one needle

    Raises:
        ValueError: a task is unknown or lacks its filler text, or a length is too short for a task.
    """
    scores: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    needles: list[dict[str, Any]] = []
    for length, name, asked in _asked(tokenizer, options):
        answers = generate(asked, TASKS[name].new_tokens)
        got = [answer_score(answer, sample.answers) for answer, sample in zip(answers, asked, strict=True)]
        needles += [
            {"tokens": length, "task": name, "depth": round(sample.depth, 4), "score": 100 * value}
            for sample, value in zip(asked, got, strict=True)
            if sample.depth is not None
        ]
        mean = scores.setdefault(str(length), {})[name] = 100 * sum(got) / len(got)
        error = 100 * statistics.stdev(got) / math.sqrt(len(got)) if len(got) > 1 else math.nan
        errors.setdefault(str(length), {})[name] = error
        logger.info("RULER, %d tokens, %s: %.1f +- %.1f", length, name, mean, error)
    means = {length: sum(each.values()) / len(each) for length, each in scores.items()}
    good = [int(length) for length, mean in means.items() if mean >= THRESHOLD]
    return {
        "scores": scores,
        "standard_errors": errors,
        "mean": means,
        "mean_standard_error": {
            length: math.hypot(*each.values()) / len(each) for length, each in errors.items()
        },
        "effective_length": max(good, default=None),
        "needles": needles,
        "tasks": list(options.tasks),
        "samples": options.samples,
        "seed": options.seed,
    }


def _asked(tokenizer: Tokenizer, options: RulerOptions) -> Iterator[tuple[int, str, list[Sample]]]:
    """Yields (length, task, samples), the shortest length first.

    Worker processes make the next samples while the model answers, because fitting a prompt to its length takes
    longer than an answer on a GPU. Threads would not help, because tokenizing holds the interpreter's lock.

    Raises:
        ValueError: as in `score_ruler`.
    """
    for name in options.tasks:  # before the model answers anything
        check_task(name, min(options.lengths_tokens), tokenizer, options.essay)
    cells = [(length, name) for length in sorted(options.lengths_tokens) for name in options.tasks]
    calls = [
        (name, length, options.samples, options.seed, tokenizer, options.essay) for length, name in cells
    ]
    if sum(length for length, _ in cells) * options.samples < IN_PROCESS_TOKENS:
        for cell, call in zip(cells, calls, strict=True):
            yield *cell, samples(*call)
        return
    count = min(MOST_PROCESSES, os.cpu_count() or 1, len(cells))
    # Spawned, not forked, because this process may have threads and a CUDA device.
    # Workers ignore interrupts, which the parent handles.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(count, get_context("spawn"), signal.signal, ignore) as processes:
        made = [processes.submit(samples, *call) for call in calls]
        try:
            for cell, future in zip(cells, made, strict=True):
                yield *cell, future.result()
        finally:
            processes.shutdown(cancel_futures=True)


def ruler_table(found: dict[str, Any]) -> dict[str, Any]:
    effective = found["effective_length"] or "below all of these"
    title = f"RULER, {found['samples']} samples of each; effective length ({THRESHOLD}): {effective}"
    rows = [
        [length, *(f"{each[name]:.1f}" for name in found["tasks"]), f"{found['mean'][length]:.1f}"]
        for length, each in found["scores"].items()
    ]
    return {"title": title, "head": ["tokens", *found["tasks"], "mean"], "rows": rows}
