"""Score the model between steps: loss on validation sets, tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gsa_train.distributed.objects import from_main
from gsa_train.metrics.record_format import read_records
from gsa_train.run.state import Run
from gsa_train.run_folder.paths import run_dir
from gsa_train.validation.perplexity import evaluate
from gsa_train.validation.tasks import score_tasks

RECORDS = "metrics.jsonl"


def validate(run: Run, phase_name: str, stop_if_asked: Callable[[], None]) -> dict[str, Any]:
    """Score the validation sets and log. Does nothing if this step has been scored. Collective."""
    step, data = run.state.step, run.data
    if run.newest_validation is not None and run.newest_validation[0] == step:
        return run.newest_validation[1]
    eos_id = data.tokenizer.eos_id
    result = evaluate(run.model, data.validation_sets, eos_id, run.config, run.parallel, stop_if_asked)
    place = {"step": step, "phase": phase_name, "tokens": run.state.tokens}
    run.services.log.log({"event": "validation", **place, **result})
    run.newest_validation = (step, result)
    return result


def validate_tasks(run: Run, phase_name: str, stop_if_asked: Callable[[], None]) -> None:
    """Score and log `evaluate.tasks`, or log why they are left out. Collective.

    Tasks are left out if they would exceed their share of the run's time (`evaluate.tasks_max_time_percent`). The clock
    of the main rank decides this for all ranks. The training itself does not depend on any clock.

    If the tasks have been scored at this step, the function does nothing. If `stop_if_asked` raises, the next start
    scores all tasks again.
    """
    step, clock = run.state.step, run.state.task_clock
    if run.newest_tasks_step == step:
        return
    if _has_time(run):
        before, began = clock.task_seconds, time.perf_counter()

        def count_and_ask() -> None:  # Update the clock first, because a stop saves it.
            clock.task_seconds = before + time.perf_counter() - began
            stop_if_asked()

        eos_id = run.data.tokenizer.eos_id
        scores = score_tasks(run.model, run.data.tasks, eos_id, run.config, run.parallel, count_and_ask)
        clock.newest_seconds = time.perf_counter() - began
        clock.task_seconds = before + clock.newest_seconds
        place = {"step": step, "phase": phase_name, "tokens": run.state.tokens}
        share = clock.task_seconds / (clock.task_seconds + clock.train_seconds)
        spent = {"eval_seconds": clock.newest_seconds, "eval_time_share": share}
        run.services.log.log({"event": "tasks", **place, **scores, **spent})
    run.newest_tasks_step = step


def _has_time(run: Run) -> bool:
    """Returns the main rank's decision to all ranks. Collective."""
    step, clock, percent = run.state.step, run.state.task_clock, run.config.evaluate.tasks_max_time_percent
    has_room = False
    if run.parallel.is_main and not (step == run.start.step and _was_scored(run)):
        expected = clock.expected_seconds(run.data.tasks, run.config, run.parallel)
        has_room = clock.has_room(expected, percent)
        if not has_room:
            run.services.log.message(
                f"tasks left out at step {step}: they took {clock.task_seconds:.1f} s and would take about "
                f"{expected:.1f} s more, above evaluate.tasks_max_time_percent = {percent:g} of "
                f"{clock.train_seconds:.0f} s of steps and their own time"
            )
    return from_main(has_room)


def _was_scored(run: Run) -> bool:
    path = run_dir(run.config) / RECORDS
    records = read_records(path) if path.exists() else []
    return any(each.get("event") == "tasks" and each["step"] == run.state.step for each in records)
