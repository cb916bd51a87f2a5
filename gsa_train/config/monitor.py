"""`monitor.*`: spikes and wrong bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class MonitorConfig:
    action: Literal["log", "skip", "stop"] = "log"
    """Reaction to a spike of the loss or gradient norm. `log`: record it. `skip`: also skip the updates of spiking
    steps. `stop`: after `patience_steps` such steps, also end with exit code 13. With `log`, only a non-finite loss or
    gradient stops the run."""
    window_steps: int = 128
    """Steps of history with which a step is compared."""
    min_history_steps: int = 64
    """Steps of a phase before the first one is judged."""
    sigmas: float = 6.0
    """Rise of a single step that makes it a spike, in standard deviations of the noise."""
    lasting_sigmas: float = 3.0
    """A rise of this many standard deviations of the noise is a spike if it lasts `lasting_steps`. It must also reach
    half of `loss_min_rise_nats` (for the gradient norm: half of the log of `grad_norm_min_ratio`)."""
    lasting_steps: int = 8
    """Number of steps in a row above `lasting_sigmas` that make a spike. The text alone can raise the loss of up to 6
    steps in a row, because neighbouring batches come from the same shards."""
    loss_min_rise_nats: float = 0.2
    """Smallest rise of the loss, in nats, that can be a spike, even if the loss varied little before."""
    grad_norm_min_ratio: float = 4.0
    """Smallest factor by which the gradient norm rises in a spike. Rare documents alone cause factors of 3. From a
    factor of 4.5 on, a single gradient dominates AdamW's second moment (at beta 2 = 0.95). If `train.grad_clip` scales
    the gradient down and the loss does not rise, the norm must rise by the square of this field, or stay large."""
    patience_steps: int = 3
    """Spiking steps in a row before `stop` acts. The updates of these steps are left out."""
    max_skips_in_a_row: int = 50
    """Number of updates left out in a row after which `skip` stops the run."""
    recheck_every_steps: int = 0
    """Interval, in steps, at which a step's forward and backward pass is computed twice. Loss and each rank's gradients
    must be equal bit for bit. 0: never."""
    recheck_spikes: bool = False
    """Compute each spiking step twice before any reaction. The host then waits for the device at every step."""
    compare_replicas_every_steps: int = 0
    """Interval, in steps, at which the weights of all data-parallel replicas are compared bit for bit. A comparison
    also precedes each save. 0: never."""
    on_corruption: Literal["stop", "log"] = "stop"
    """Reaction if a recomputed step or a replica differs. `stop`: end the run with exit code 14. A restart continues
    from the last checkpoint. `log`: record the event `corruption` and continue. If a step was computed twice, its
    second result counts."""


UNREPEATABLE = ("cudnn", "flash_sdpa")
"""Values of `gsa.dense_attention` whose backward passes add with atomics."""


def check_monitor(config: Config, replicas: int) -> Iterator[str]:
    """Yield mistakes in the fields of `monitor`, and in other fields that they need.

    Args:
        replicas: data-parallel size; 0 if the layout itself is wrong.
    """
    monitor = config.monitor
    if monitor.window_steps < 32:
        wrong = "too few for medians of the last 32 steps and of differences over 8"
        yield config.problem("monitor.window_steps", wrong, "give 32 or more")
    if not 24 <= monitor.min_history_steps <= monitor.window_steps:
        wrong = f"outside [24, monitor.window_steps = {monitor.window_steps}]"
        yield config.problem("monitor.min_history_steps", wrong, "give a number of steps between them")
    if monitor.lasting_sigmas > monitor.sigmas:
        wrong = f"above monitor.sigmas = {monitor.sigmas}"
        yield config.problem("monitor.lasting_sigmas", wrong, "give that or less")
    if monitor.grad_norm_min_ratio < 1:
        yield config.problem("monitor.grad_norm_min_ratio", "below 1, where no rise is", "give 1 or more")
    yield from _check_corruption(config, replicas)
    last = sum(phase.steps for phase in config.phases)
    for index, step in enumerate(config.train.iterations_to_skip):
        if not 1 <= step <= last:
            wrong = f"no step of this run, which has {last} (phases.*.steps)"
            yield config.problem(f"train.iterations_to_skip.{index}", wrong, "remove it")


def _check_corruption(config: Config, replicas: int) -> Iterator[str]:
    """Check that replicas to compare exist, and that a step computed twice repeats bit for bit."""
    monitor, dense = config.monitor, config.gsa.dense_attention
    if monitor.compare_replicas_every_steps > 0 and replicas * config.parallel.context == 1:
        wrong = "but there is one replica of the model, and nothing to compare"
        yield config.problem("monitor.compare_replicas_every_steps", wrong, "set it to 0")
    if config.parallel.strategy == "deepspeed":
        for name in ("recheck_every_steps", "recheck_spikes", "compare_replicas_every_steps"):
            if getattr(monitor, name):
                wrong = "reads megatron-core's gradient buffers and whole weights, and parallel.strategy = deepspeed"
                remedy = "set that to megatron, or this one to its default"
                yield config.problem(f"monitor.{name}", wrong, remedy)
    for name in ("recheck_every_steps", "recheck_spikes"):
        if getattr(monitor, name) and dense in UNREPEATABLE:
            wrong = (
                f"asks for the same bits twice, and gsa.dense_attention = {dense} does not repeat bit for bit"
            )
            yield config.problem(f"monitor.{name}", wrong, "set that to auto, or this one to its default")
