"""What must hold between the fields of `monitor`, and what they need of the checkpoints."""

from __future__ import annotations

from gsa_train.config.load import problem_line
from gsa_train.config.sections import Config

UNREPEATABLE = ("cudnn", "flash_sdpa")
"""Of `gsa.dense_attention`: their backward passes add with atomics."""


def check_monitor(config: Config, replicas: int) -> list[str]:
    """Lines about the fields of `monitor` and what they need of others.

    Args:
        replicas: data-parallel size; 0 where the layout itself is wrong.
    """
    monitor, lines = config.monitor, []
    if monitor.window_steps < 32:
        wrong = "too few for medians of the last 32 steps and of differences over 8"
        lines.append(problem_line("monitor.window_steps", monitor.window_steps, wrong, "give 32 or more"))
    if not 24 <= monitor.min_history_steps <= monitor.window_steps:
        wrong = f"outside [24, monitor.window_steps = {monitor.window_steps}]"
        remedy = "give a number of steps between them"
        lines.append(problem_line("monitor.min_history_steps", monitor.min_history_steps, wrong, remedy))
    if monitor.lasting_sigmas > monitor.sigmas:
        wrong = f"above monitor.sigmas = {monitor.sigmas}"
        lines.append(
            problem_line("monitor.lasting_sigmas", monitor.lasting_sigmas, wrong, "give that or less")
        )
    if monitor.grad_norm_min_ratio < 1:
        wrong, remedy = "below 1, where no rise is", "give 1 or more"
        lines.append(problem_line("monitor.grad_norm_min_ratio", monitor.grad_norm_min_ratio, wrong, remedy))
    if not 0 < monitor.lower_lr_factor < 1:
        wrong, remedy = "outside (0, 1)", "give a number between 0 and 1"
        lines.append(problem_line("monitor.lower_lr_factor", monitor.lower_lr_factor, wrong, remedy))
    lines += _check_corruption(config, replicas)
    last = sum(phase.steps for phase in config.phases)
    for index, step in enumerate(config.train.iterations_to_skip):
        if not 1 <= step <= last:
            wrong, remedy = f"no step of this run, which has {last} (phases.*.steps)", "remove it"
            lines.append(problem_line(f"train.iterations_to_skip.{index}", step, wrong, remedy))
    needed, every = monitor.reach_steps, config.checkpoint.every_steps
    keep = -(-needed // every) + 1 if needed is not None and every > 0 else 1
    if needed is not None and config.checkpoint.keep_last < keep:
        lines.append(
            problem_line(
                "checkpoint.keep_last",
                config.checkpoint.keep_last,
                f"with checkpoint.every_steps = {config.checkpoint.every_steps} deletes checkpoints before they are "
                f"monitor.rewind_min_steps = {monitor.rewind_min_steps} steps older than the newest",
                f"set it to {keep} or more",
            )
        )
    return lines


def _check_corruption(config: Config, replicas: int) -> list[str]:
    """What compares bits needs something to compare, and numbers that repeat."""
    monitor, lines = config.monitor, []
    every = monitor.compare_replicas_every_steps
    if every > 0 and replicas * config.parallel.context == 1:
        wrong, remedy = "but there is one replica of the model, and nothing to compare", "set it to 0"
        lines.append(problem_line("monitor.compare_replicas_every_steps", every, wrong, remedy))
    dense = config.gsa.dense_attention
    if config.parallel.strategy == "deepspeed":
        for name in ("recheck_every_steps", "recheck_spikes", "compare_replicas_every_steps"):
            if getattr(monitor, name):
                wrong = "reads megatron-core's gradient buffers and whole weights, and parallel.strategy = deepspeed"
                remedy = "set that to megatron, or this one to its default"
                lines.append(problem_line(f"monitor.{name}", getattr(monitor, name), wrong, remedy))
    for name in ("recheck_every_steps", "recheck_spikes"):
        if getattr(monitor, name) and dense in UNREPEATABLE:
            wrong = (
                f"asks for the same bits twice, and gsa.dense_attention = {dense} does not repeat bit for bit"
            )
            remedy = "set that to auto, or this one to its default"
            lines.append(problem_line(f"monitor.{name}", getattr(monitor, name), wrong, remedy))
    return lines
