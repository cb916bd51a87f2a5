"""Checks of `evaluate.tasks`, without what their files hold. Plain Python, as checks.py."""

from __future__ import annotations

from gsa_data.request_files import is_request_file
from gsa_train.config.load import problem_line
from gsa_train.config.sections import Config


def check_tasks(config: Config) -> list[str]:
    evaluate, lines = config.evaluate, []
    for index, task in enumerate(evaluate.tasks):
        if not task.strip():
            lines.append(problem_line(f"evaluate.tasks.{index}", task, "empty", "give a task"))
    if evaluate.tasks_every_steps > 0 and not evaluate.tasks:
        wrong, remedy = "there are no evaluate.tasks to score", "list some, or leave it out"
        lines.append(problem_line("evaluate.tasks_every_steps", evaluate.tasks_every_steps, wrong, remedy))
    percent = evaluate.tasks_max_time_percent
    if not 0 < percent <= 100:
        remedy = "give more than 0 and at most 100, which is no limit"
        lines.append(problem_line("evaluate.tasks_max_time_percent", percent, "no share of the time", remedy))
    return lines


def check_harness_tasks(config: Config) -> list[str]:
    """Of a machine without lm-evaluation-harness."""
    tasks = [task for task in config.evaluate.tasks if not is_request_file(task)]
    wrong = "a task of lm-evaluation-harness, and the package lm_eval is not installed"
    remedy = "run pip install '.[hf,eval]' in the checkout, or give a request file (with a / in its place)"
    return [problem_line("evaluate.tasks", task, wrong, remedy) for task in tasks[:1]]
