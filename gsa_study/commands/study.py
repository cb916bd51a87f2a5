"""Run a study: launch/study.py of a checkout, `gsa-study` of an installation.

    python launch/study.py --study FILE [--gpus 0,1] [--stop-after-minutes N] [--retry-failed]
        [--arms A,B] [--seeds 1,2] [key=value ...]
    python launch/study.py --study FILE --dry-run [--device NAME] [--mfu SHARE] [key=value ...]
    python launch/study.py --study FILE --report [key=value ...]

The command trains each arm (config to compare) of a study file with each seed. Then it evaluates the models, and writes
the report that compares them. If the command ends early, run it again to continue.

    exit code  meaning
    0          all jobs are finished
    1          at least one job has failed, or lacks the checkpoint that it needs, and no other job can run
    2          incorrect usage, a mistake in the file, a missing package, a run that began with another config, or a
               full disk
    75         the study was stopped, or a job was interrupted; run the command again to continue
    130        a second Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gsa_study.cost import describe_cost
from gsa_study.jobs import jobs_of
from gsa_study.plan import StudyError, StudyPlan, check_unchanged, chosen, plan_study
from gsa_study.processes import check_devices, find_gpus
from gsa_study.report import write_study_report
from gsa_study.runner import StudyRunner, lock_study, say
from gsa_study.states import JobState, note_failure, read_failures, read_state
from gsa_study.study_file import Study, load_study
from gsa_study.tables import read_results
from gsa_train.arguments import DEVICE
from gsa_train.config import ConfigError, RunConfig
from gsa_train.config.checks import is_installed
from gsa_train.model.flops import DEVICES
from gsa_train.process import exit_codes
from gsa_train.process.as_command import as_command
from gsa_train.process.console import open_descriptors, take_console
from gsa_train.reliability.stop_signals import find_deadline


@as_command()
def main() -> int:
    began = time.time()
    open_descriptors()
    arguments = parse(sys.argv[1:])
    only_looks = arguments.report or arguments.dry_run
    try:
        study = load_study(arguments.study, arguments.overrides, need_data=not only_looks)
        all_states = states_of(study)
        check_unchanged(all_states)
        states = chosen(all_states, arguments.arms, arguments.seeds)
        plan = plan_study(states, read_failures(study.folder), arguments.retry_failed)
        gpus = gpus_at_hand(arguments.gpus)
        if arguments.dry_run:
            values = read_results(study, {}).values
            print(describe_cost(study, values, arguments.device, arguments.mfu, len(set(gpus or ()))))
            return 0
        if arguments.report:
            report(study)
            return 0
        # Evaluations would miss the package only after the GPUs have done their work.
        if study.config.evaluations and not is_installed("transformers"):
            raise StudyError(
                "the package transformers is not installed, and evaluations cannot do without it; run in the checkout: "
                "pip install '.[hf]'"
            )
        check_devices(plan.due, gpus)
        with lock_study(study.folder):
            take_console()
            return run(study, plan, gpus, arguments, began)
    except (ConfigError, StudyError) as error:
        print(error, file=sys.stderr)
        return exit_codes.REFUSED
    except KeyboardInterrupt:  # before the first job or in the report; the runner handles others
        say("stopped by Ctrl-C: no job was under way; the same command goes on")
        return exit_codes.STOPPED
    except OSError as error:  # a full disk
        print(
            f"stopped: {error}. Jobs under way were told to save and end. Free space on the disk, or mend what else "
            "the error names; then the same command goes on",
            file=sys.stderr,
        )
        return exit_codes.REFUSED


def run(
    study: Study, plan: StudyPlan, gpus: list[str] | None, arguments: argparse.Namespace, began: float
) -> int:
    """Run what is due, write the report, and print the state.

    Args:
        began: start of this command, by `time.time`.
    """
    if arguments.retry_failed:
        for job in plan.due:
            if job.key in read_failures(study.folder):
                note_failure(study.folder, job.key, None)
    where = f"on GPU {', '.join(gpus)}" if gpus else "on CPUs, one after another"
    done, all_jobs = len(plan.finished), sum(map(len, vars(plan).values()))
    say(
        f"{study.title}: {done} of {all_jobs} jobs are finished, {len(plan.due)} due, {where}; {study.folder}"
    )
    margin = RunConfig().slurm_margin_minutes
    try:
        deadline = find_deadline(arguments.stop_after_minutes or 0.0, margin, os.environ, began)
    except ValueError as error:
        raise StudyError(str(error)) from error
    runner = StudyRunner(study.folder, plan.due, gpus, deadline)
    runner.run()
    report(study)
    return conclude(study, plan, runner, arguments)


def conclude(study: Study, plan: StudyPlan, runner: StudyRunner, arguments: argparse.Namespace) -> int:
    """Print what is finished, what failed and why, and what is left. Returns the exit code."""
    states = chosen(states_of(study), arguments.arms, arguments.seeds)
    failures = read_failures(study.folder)
    finished = sum(state.finished for state in states)
    failed = {state.job.key for state in states if state.job.key in failures and not state.finished}
    say(f"{finished} of {len(states)} jobs are finished, {len(failed)} failed")
    for key in sorted(failed):
        print(f"  failed: {key}: {failures[key]}")
    for job in plan.without_checkpoint:
        print(f"  cannot be done: {job.key}: {job.run.name} is finished, and its checkpoint is not here;")
        print(f"    to train it again, remove {job.run.folder}")
    for job, reason in runner.interrupted:
        print(f"  interrupted: {job.key}: {reason}")
    if failed:
        print("  --retry-failed starts what failed again, from its last checkpoint")
    if runner.killed:
        return exit_codes.INTERRUPTED
    left = len(states) - finished - len(failed) - len(plan.without_checkpoint)
    if runner.stop_reason or runner.interrupted or runner.due:
        print(f"  the same command goes on with the {left} that are left")
        return exit_codes.STOPPED
    return exit_codes.FAILED if failed or plan.without_checkpoint else 0


def states_of(study: Study) -> list[JobState]:
    return [read_state(job) for job in jobs_of(study)]


def report(study: Study) -> None:
    """Write tables of what the run folders have."""
    results = read_results(study, read_failures(study.folder))
    for path in write_study_report(results, study.folder / "report"):
        print(f"wrote {path}")


def gpus_at_hand(asked: str | None) -> list[str] | None:
    """Return the GPUs to use, or None for CPUs.

    Raises:
        StudyError: `--gpus` names none.
    """
    if asked is None:
        return find_gpus(os.environ) or None
    if asked == "none":
        return None
    names = [name.strip() for name in asked.split(",")]
    if not all(names):
        raise StudyError(f"--gpus {asked}: name the GPUs, as in --gpus 0,1; --gpus none for CPUs")
    return names


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run a study: train its arms, evaluate them, compare them.", allow_abbrev=False
    )
    parser.add_argument("--study", type=Path, required=True, metavar="FILE", help="YAML file of the study")
    parser.add_argument(
        "--gpus",
        metavar="0,1",
        help="GPUs to use, or `none` (default: all that there are, else CPUs); 0,1,0,1: two small runs on each",
    )
    parser.add_argument(
        "--stop-after-minutes",
        type=positive_number,
        metavar="N",
        help="then stop what is under way as Ctrl-C does",
    )
    parser.add_argument("--arms", type=words_of, metavar="A,B", help="do only these arms")
    parser.add_argument("--seeds", type=numbers_of, metavar="1,2", help="do only these seeds")
    parser.add_argument("--retry-failed", action="store_true", help="start again what has failed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print what the study will cost, and stop")
    what.add_argument("--report", action="store_true", help="write the report of what is there, and stop")
    parser.add_argument("--device", default=DEVICE, choices=DEVICES, metavar="NAME", help="with --dry-run")
    parser.add_argument(
        "--mfu", type=share, metavar="SHARE", help="with --dry-run, such as 0.3 (default: as measured)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="fields of all arms' configs, such as data.train_dir",
    )
    arguments = parser.parse_intermixed_args(words)
    if arguments.mfu is not None and not arguments.dry_run:
        parser.error("--mfu needs --dry-run; a real study measures its time")
    return arguments


def words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def numbers_of(text: str) -> list[int]:
    try:
        return [int(word) for word in words_of(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, as in 1,2") from None


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return value


def share(text: str) -> float:
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share of the peak rate, at most 1")
    return value
