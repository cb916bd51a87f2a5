"""Estimate the cost of a study before it runs: tokens, operations and GPU-hours per arm and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsa_study.jobs import jobs_of
from gsa_study.run_metrics import RunMetrics
from gsa_study.study_file import Study, StudyRun
from gsa_train.metrics.goodput.words import table
from gsa_train.metrics.progress import compact
from gsa_train.model.flops import count_parameters, measured_mfu, peak_flops_per_second
from gsa_train.planning.dry_run import training_operations


@dataclass(frozen=True)
class ArmCost:
    arm: str
    parameters: int
    runs: int
    finished: int
    tokens: int
    """Sum over all runs."""
    operations: float
    """Floating-point operations of all runs' training."""
    gpu_hours: float | None
    """GPU-hours of all steps of all runs; None without a known MFU."""
    gpu_hours_left: float | None
    """GPU-hours of the steps that are not logged yet."""
    source: str
    """Source of the MFU."""


def arm_costs(values: Sequence[RunMetrics], device: str, mfu: float | None) -> list[ArmCost]:
    """Return the costs in the order of the study.

    Args:
        device: a name in `gsa_train.model.flops.DEVICES`.
        mfu: share of the device's peak rate; None: the share in the arm's own runs, or else the share that we measured
            on such a device.
    """
    costs = []
    for arm in dict.fromkeys(each.run.arm for each in values):
        of_arm = [each for each in values if each.run.arm == arm]
        run = of_arm[0].run
        operations = training_operations(run.config)
        share, source = _mfu(of_arm, device, mfu)
        hours = None
        if share is not None:
            peak = peak_flops_per_second(device, "bf16")
            assert peak is not None
            hours = operations / (peak * share) / 3600
        left = sum(1 - _share_done(each) for each in of_arm)
        costs.append(
            ArmCost(
                arm=arm,
                parameters=count_parameters(run.config.model, run.config.gsa, run.config.moe).total,
                runs=len(of_arm),
                finished=sum(each.complete for each in of_arm),
                tokens=run.tokens * len(of_arm),
                operations=operations * len(of_arm),
                gpu_hours=None if hours is None else hours * len(of_arm),
                gpu_hours_left=None if hours is None else hours * left,
                source=source,
            )
        )
    return costs


def _mfu(of_arm: Sequence[RunMetrics], device: str, mfu: float | None) -> tuple[float | None, str]:
    if mfu is not None:
        return mfu, "as given"
    for each in of_arm:
        measured = each.statistic("mfu", "median")
        if measured and each.starts and each.starts[-1].get("device") == device:
            return measured, f"measured in {each.run.name}"
    run: StudyRun = of_arm[0].run
    known = measured_mfu(device, count_parameters(run.config.model, run.config.gsa, run.config.moe))
    return known, "unknown: give --mfu" if known is None else "measured for 1.7B parameters at 4096 tokens"


def _share_done(each: RunMetrics) -> float:
    """Return the share of the run's steps that are done, including steps after the last checkpoint. The next start may
    repeat these steps."""
    return 1.0 if each.complete else (each.records[-1]["step"] / each.run.steps if each.records else 0.0)


def describe_cost(
    study: Study, values: Sequence[RunMetrics], device: str, mfu: float | None, gpus: int
) -> str:
    """Return the report of a dry run.

    Args:
        gpus: the number of GPUs for the runs; 0: CPUs, whose speed is unmeasured.
    """
    costs = arm_costs(values, device, mfu)
    head = ["arm", "parameters", "runs", "finished", "tokens", "operations", "GPU-hours", "left", "MFU"]
    rows = [
        [each.arm, compact(each.parameters), str(each.runs), str(each.finished), compact(each.tokens),
         f"{each.operations:.3g}", _hours(each.gpu_hours), _hours(each.gpu_hours_left), each.source]
        for each in costs
    ]  # fmt: skip
    hours, left = (
        _sum([each.gpu_hours for each in costs]), _sum([each.gpu_hours_left for each in costs])
    )  # fmt: skip
    rows.append([
        "total", "", str(sum(each.runs for each in costs)), str(sum(each.finished for each in costs)),
        compact(sum(each.tokens for each in costs)), f"{sum(each.operations for each in costs):.3g}",
        _hours(hours), _hours(left), "",
    ])  # fmt: skip
    lines = [f"{study.title}, in {study.folder}", "", *table([head, *rows]), ""]
    lines.append(
        f"GPU-hours: of the training steps on {device}; validation, saves, starts and evaluations come on top."
    )
    if left is not None and gpus > 0:
        lines.append(f"On {gpus} GPUs at hand, evenly used: {_hours(left / gpus)} hours are left.")
    if followed := sum(job.kind != "train" for job in jobs_of(study)):
        lines.append(f"Evaluations, not in the table: {followed}.")
    return "\n".join(lines)


def _sum(hours: Sequence[float | None]) -> float | None:
    known = [each for each in hours if each is not None]
    return sum(known) if len(known) == len(hours) else None


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.3g}"
