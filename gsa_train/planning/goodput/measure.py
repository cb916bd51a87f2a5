"""Read the parts of a simulation from a run's folder, and simulate the run itself for comparison."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gsa_train.config import ConfigError, config_from_yaml
from gsa_train.metrics.goodput.account import PAUSES, START_UP, STOPPED, Account
from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.record_format import read_records
from gsa_train.planning.goodput.simulate import Life, Outcome, Parts, simulate

BESIDE_STEPS = ("validation", "tasks", "text", "stragglers", "other")


class NoAccount(ValueError):
    """The folder has no account of the run's time. The message names what is missing, and the remedy."""


@dataclass(frozen=True)
class MeasuredRun:
    account: Account
    parts: dict[str, float]
    """Fields of Parts that the run measured; fields of faults or saves are absent if it had none."""
    interval_steps: int
    """checkpoint.every_steps"""


def measure_run(folder: Path) -> MeasuredRun:
    """
    Raises:
        NoAccount: there is no run, its version did not record its time, or a file is missing.
    """
    account = read_account(folder)
    if account is None or account.step_seconds is None:
        raise NoAccount(
            f"{folder}: no goodput.jsonl with steps in it; give the folder of a run of this version, "
            "<run.dir>/<run.name>, once it has trained some steps"
        )
    path = folder / "config.yaml"
    try:
        config = config_from_yaml(path.read_text(encoding="utf-8"), path)
    except ConfigError as error:
        raise NoAccount(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise NoAccount(f"{path} cannot be read ({error}); copy it from a checkpoint of the run") from error
    return MeasuredRun(account, _parts(account, folder / "metrics.jsonl"), config.checkpoint.every_steps)


def _parts(account: Account, metrics: Path) -> dict[str, float]:
    lost, starts = account.lost_seconds, account.starts
    steps_seconds = account.productive_seconds + lost["repeated"]
    start_up = sum(lost[name] for name in (*START_UP, "first_step"))
    assert account.step_seconds is not None
    parts = {
        "step_seconds": account.step_seconds,
        "start_up_seconds": start_up / len(starts),
        "extra_share": max(0.0, sum(lost[name] for name in BESIDE_STEPS)) / steps_seconds,
    }
    records = read_records(metrics) if metrics.exists() else []
    if account.saves and not records:
        raise NoAccount(
            f"{metrics}: missing or empty, though the run has saved checkpoints; copy it beside goodput.jsonl, for it "
            "says how long saves take"
        )
    durable = [each["checkpoint_save_seconds"] for each in records if each.get("event") == "checkpoint"]
    if account.saves:
        parts["stall_seconds"] = (lost["save"] + lost["copies"]) / account.saves
    if durable:
        parts["durable_seconds"] = statistics.fmean(durable)
    faults = [each.detection_seconds for each in starts if each.ended == "lost"]
    if faults:
        parts["detection_seconds"] = statistics.fmean(faults)
    gaps = [after.down_seconds for before, after in pairwise(starts) if before.ended not in PAUSES]
    if gaps:
        parts["down_seconds"] = statistics.fmean(gaps)
    return parts


def again_in_fast_motion(run: MeasuredRun, parts: Parts) -> Outcome:
    """Simulate the run with its own faults, stops and start-ups at their times, and mean values for everything else."""
    account = run.account
    first_step = account.lost_seconds["first_step"] / len(account.starts)
    lives = [
        Life(
            max(0.0, start.until - start.detection_seconds - start.began),
            start.ended in (STOPPED, *PAUSES),
            start.start_up_seconds + first_step,
            0.0 if start.ended in PAUSES else None,
        )
        for start in account.starts
    ]
    lives[-1] = lives[-1]._replace(seconds=float("inf"))
    return simulate(parts, run.interval_steps, lives, account.wall_seconds)
