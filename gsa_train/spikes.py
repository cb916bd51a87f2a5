"""Which steps spike: decided on the device, alike on all ranks, before the update.

A step is judged by its loss and its gradient norm, both over the whole global batch, against the last `window_steps`
steps. Nothing is read back to the host: the verdict stays on the device, where it masks the update, and the host looks
at it later (gsa_train.monitor). The rules are functions of a history, so a recorded trace can be judged as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from gsa_train.config import MonitorConfig

SIGNALS = ("loss", "grad_norm")
RECENT_STEPS = 16
"""Steps whose median follows a falling loss; half of them have to be spikes before it follows a spike."""
DEVIATIONS_PER_STEP = 1.4826 / math.sqrt(2)
"""Standard deviation over the median absolute difference of two independent normal values."""


class Verdict(NamedTuple):
    """About one step; on the device."""

    applied: torch.Tensor
    """0-d bool: the update is made."""
    row: torch.Tensor
    """fp32 [8], see `Row`."""


@dataclass(frozen=True)
class Row:
    """What the host reads of one step."""

    loss: float
    """Nats per scored token of the global batch."""
    grad_norm: float
    loss_limit: float
    """Above it a single step is a spike; infinite while there is too little history."""
    grad_norm_limit: float
    loss_spikes: bool
    grad_norm_spikes: bool
    finite: bool
    applied: bool

    @staticmethod
    def of(values: list[float]) -> Row:
        """From `Verdict.row`."""
        loss, grad_norm, loss_limit, grad_norm_limit, *flags = values
        loss_spikes, grad_norm_spikes, finite, applied = (flag != 0 for flag in flags)
        return Row(
            loss, grad_norm, loss_limit, grad_norm_limit, loss_spikes, grad_norm_spikes, finite, applied
        )

    @property
    def flagged(self) -> bool:
        return self.loss_spikes or self.grad_norm_spikes or not self.finite

    def strongest(self) -> tuple[str, float, float]:
        """Signal, value and limit to report: what is not finite first, then the loss."""
        if not math.isfinite(self.loss) or (self.loss_spikes and self.finite):
            return "loss", self.loss, self.loss_limit
        return "grad_norm", self.grad_norm, self.grad_norm_limit


class SpikeDetector:
    """The history of a phase, and the verdict on its next step. No operation here makes the host wait."""

    def __init__(self, config: MonitorConfig, device: torch.device) -> None:
        self._config = config
        self.history = torch.full((len(SIGNALS), config.window_steps), torch.nan, device=device)
        """fp32 [signal, step], the newest step last, NaN where there was none yet."""
        self.streak = torch.zeros(len(SIGNALS), device=device)
        """fp32 [signal]: steps in a row above the limit of lasting spikes."""

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> Verdict:
        """The verdict on a step, which then joins the history if it is finite.

        Spikes join, too: medians stand them until they are half of the window, and then they are the new level.

        Args:
            loss: 0-d, over the global batch.
            grad_norm: 0-d, over all ranks, before clipping.
        """
        config = self._config
        values = torch.stack([loss.float(), grad_norm.float()])
        finite = values.isfinite().all()
        compared = as_compared(values, config)
        alone, lasting = limits(self.history, config)
        streak = torch.where(compared > lasting, self.streak + 1, 0)
        spikes = ((compared > alone) | (streak >= config.lasting_steps)) & finite
        self.streak = torch.where(finite, streak, self.streak)
        moved = torch.cat([self.history[:, 1:], values[:, None]], dim=1)
        self.history = torch.where(finite, moved, self.history)
        applied = finite if config.action == "log" else finite & spikes.any().logical_not()
        shown = torch.cat([values, as_recorded(alone, config), spikes, finite[None], applied[None]])
        return Verdict(applied, shown)

    def state(self) -> dict[str, list[list[float]] | list[float]]:
        """For the checkpoint, bit for bit. Waits for the device."""
        return {"history": self.history.tolist(), "streak": self.streak.tolist()}

    def load(self, state: dict[str, list[list[float]] | list[float]]) -> None:
        """Go on from `state`; of a longer or shorter window the newest steps count."""
        saved = torch.tensor(state["history"], device=self.history.device)
        size = min(saved.shape[1], self.history.shape[1])
        self.history[:, -size:] = saved[:, -size:]
        self.streak = torch.tensor(state["streak"], device=self.streak.device)


def as_compared(values: torch.Tensor, config: MonitorConfig) -> torch.Tensor:
    """[2, ...]: `robust` compares the logarithm of the gradient norm, whose noise is a factor and has a long tail."""
    if config.detector == "sigma":
        return values
    return torch.stack([values[0], values[1].clamp(min=torch.finfo(torch.float32).tiny).log()])


def as_recorded(limit: torch.Tensor, config: MonitorConfig) -> torch.Tensor:
    """A limit [2] in the units of the metrics."""
    return limit if config.detector == "sigma" else torch.stack([limit[0], limit[1].exp()])


def limits(history: torch.Tensor, config: MonitorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Above what the next step is a spike by itself, and above what it is one together with those before it.

    Args:
        history: fp32 [signal, step], NaN where there was no step.

    Returns:
        Two fp32 [signal] in the units of `as_compared`; infinite before `min_history_steps`.
    """
    rule = robust_limits if config.detector == "robust" else sigma_limits
    alone, lasting = rule(as_compared(history, config), config)
    enough = history[0].isfinite().sum() >= config.min_history_steps
    return torch.where(enough, alone, torch.inf), torch.where(enough, lasting, torch.inf)


def robust_limits(history: torch.Tensor, config: MonitorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Median + max(sigmas * deviation, least rise).

    The median is the lower of that of the window and that of the last 16 steps: a falling loss is compared with where
    it is now, one that creeps up with where it was. The deviation comes from the differences of neighbouring steps, so
    that a trend does not widen it, and from their median, so that an earlier spike does not.
    """
    level = torch.minimum(_median(history), _median(history[:, -RECENT_STEPS:]))
    deviation = DEVIATIONS_PER_STEP * _median((history[:, 1:] - history[:, :-1]).abs())
    least = torch.stack(
        [
            torch.full_like(level[0], config.loss_min_rise_nats),
            torch.full_like(level[1], math.log(config.grad_norm_min_ratio)),
        ]
    )
    alone = level + torch.maximum(config.sigmas * deviation, least)
    lasting = level + torch.maximum(config.lasting_sigmas * deviation, 0.5 * least)
    return alone, lasting


def sigma_limits(history: torch.Tensor, config: MonitorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """OLMo-core's rule: mean + sigmas * standard deviation of the window, which keeps its spikes. No lasting limit."""
    seen = history.isfinite()
    count = seen.sum(dim=1)
    mean = torch.where(seen, history, 0).sum(dim=1) / count
    squares = torch.where(seen, history - mean[:, None], 0).square().sum(dim=1)
    limit = mean + config.sigmas * (squares / (count - 1)).sqrt()
    return limit, torch.full_like(limit, torch.inf)


def _median(values: torch.Tensor) -> torch.Tensor:
    """Lower median of each row [n, m] without its NaN, [n]. (`nanmedian` may wait for a GPU.)"""
    ordered = values.sort(dim=1).values  # NaN last
    middle = (values.isfinite().sum(dim=1, keepdim=True) - 1).clamp(min=0) // 2
    return ordered.gather(1, middle).squeeze(1)
