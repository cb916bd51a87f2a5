"""List the jobs of a study as commands that a user could type: train, evaluate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gsa_study.config import EvaluationConfig
from gsa_study.study_file import Study, StudyRun
from gsa_train.run_folder.starts import SOURCE


@dataclass(frozen=True)
class Job:
    run: StudyRun
    kind: Literal["train", "evaluate"]
    name: str
    """Name of the evaluation; empty for a training."""
    command: tuple[str, ...]
    devices: int

    @property
    def key(self) -> str:
        """Identifies the job within the study, also in later starts."""
        return f"{self.run.name} {self.kind} {self.name}".strip()

    @property
    def result(self) -> Path:
        """Returns the file that exists and is complete once the job is finished."""
        if self.kind == "train":
            return self.run.folder / "summary.json"
        return self.run.folder / "evaluations" / self.name / "results.json"


def jobs_of(study: Study) -> list[Job]:
    """Returns all jobs, each run's evaluations after its training."""
    jobs = []
    for run in study.runs:
        jobs.append(Job(run, "train", "", train_command(run), run.ranks))
        for each in study.config.evaluations:
            for name, words in evaluations_of(each, run):
                command = (*_program("evaluate"), *words)
                jobs.append(Job(run, "evaluate", name, command, 1))
    return jobs


def train_command(run: StudyRun) -> tuple[str, ...]:
    """Returns the command `python launch/pretrain.py ...` for one rank, or a torchrun command for several ranks."""
    words = ("--config", run.config_path, *run.overrides)
    if run.ranks == 1:
        return (*_program("pretrain"), *words)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}")
    script = SOURCE / "launch" / "pretrain.py"
    program = (str(script),) if script.is_file() else ("-m", "gsa_train")
    return (sys.executable, *torchrun, *program, *words)


def evaluations_of(evaluation: EvaluationConfig, run: StudyRun) -> list[tuple[str, tuple[str, ...]]]:
    """Return name and arguments of the evaluation for each length. Arms without evaluation have none."""
    if evaluation.arms and run.arm not in evaluation.arms:
        return []
    lengths: Sequence[int | None] = evaluation.context_lengths or [None]
    found = []
    for length in lengths:
        name = evaluation.name + (f"-L{length}" if length else "")
        words = ["--run", str(run.folder), "--name", name]
        for text, place in evaluation.data.items():
            words += ["--data", f"{text}={place}"]
        for task in evaluation.tasks:
            words += ["--tasks", task]
        for option, value in (
            ("--context-length", length),
            ("--max-tokens", evaluation.max_tokens),
            ("--ruler", ",".join(map(str, evaluation.ruler))),
            ("--ruler-samples", evaluation.ruler and evaluation.ruler_samples),
        ):
            words += [option, str(value)] if value else []
        words += ["--validation"] * evaluation.validation
        words += evaluation.settings
        found.append((name, tuple(words)))
    return found


def _program(name: str) -> tuple[str, ...]:
    """Returns the script of the checkout, else the installed command next to this Python."""
    script = SOURCE / "launch" / f"{name}.py"
    if script.is_file():
        return (sys.executable, str(script))
    return (str(Path(sys.executable).with_name(f"gsa-{name}")),)
