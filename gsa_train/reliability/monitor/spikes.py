"""Which steps spike: decided on the device, alike on all ranks, before the update.

A step is judged by its loss and its gradient norm, both over the whole global batch, against the last `window_steps`
steps. Nothing is read back to the host: the verdict stays on the device, where it masks the update, and the host looks
at it later (monitor.py). `robust` compares the logarithm of the gradient norm, whose noise is a factor and has a
long tail; `sigma` the norm itself.

A large gradient with a usual loss is most often text: a short stretch of one kind. Where clipping makes of it an update
like any other, `robust` leaves it to what follows: a loss that rises, or a norm that stays large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from gsa_train.config import MonitorConfig

RECENT_STEPS = 32
"""Steps whose median follows a falling loss; half of them have to be spikes before it follows a spike."""
LAGS_STEPS = (8, 32)
"""Distances of the values whose differences are the noise; the larger one counts. Over 8 steps a trend adds little, but
lanes that read long documents make batches alike (correlation 0.7 from step to step in the demo, 0.3 after 8, and more
where the same lane comes again after 8)."""
TOGETHER = 2 / 3
"""Share of both single limits that loss and gradient norm have to rise by in the same step: each without the other has
causes that are no faults, such as a rare document."""
ALONE = 2.0
"""Times its rise, in logarithms, up to which a clipped norm may be text: a factor of 16. Text made 7 in recorded runs
with batches of 256 tokens, larger batches make less; a wrong exponent bit makes 2^8 or more."""
FOLLOWS_STEPS = 10
"""Steps, its own included, in which what a large gradient did to the loss shows: AdamW's momentum carries it so long,
1 / (1 - beta 1)."""
DEVIATIONS_PER_DIFFERENCE = 1.4826 / math.sqrt(2)
"""Standard deviation over the median absolute difference of two independent normal values."""


class Verdict(NamedTuple):
    """About one step; on the device."""

    applied: torch.Tensor
    """0-d bool: the update is made."""
    row: torch.Tensor
    """fp32 [8]: what `SpikeDetector.row` makes a `Row` of."""


@dataclass(frozen=True)
class Row:
    """What the host reads of one step."""

    loss: float
    """Nats per scored token of the global batch."""
    grad_norm: float
    loss_limit: float
    """The limit that it is above, else the limit of a single step; infinite while there is too little history."""
    grad_norm_limit: float
    loss_spikes: bool
    grad_norm_spikes: bool
    finite: bool
    applied: bool

    @property
    def flagged(self) -> bool:
        return self.loss_spikes or self.grad_norm_spikes or not self.finite

    def strongest(self) -> tuple[str, float, float]:
        """Signal, value and limit to report: what is not finite first, then the loss."""
        if not math.isfinite(self.loss) or (self.loss_spikes and self.finite):
            return "loss", self.loss, self.loss_limit
        return "grad_norm", self.grad_norm, self.grad_norm_limit


class SpikeDetector:
    """The history of a phase, and the verdict on its next step. No operation here makes the host wait.

    In its tensors the first of two rows or columns is the loss, the second the gradient norm or its logarithm.
    """

    def __init__(self, config: MonitorConfig, device: torch.device) -> None:
        self._config = config
        self._steps = 0
        self._history = torch.full((2, config.window_steps), torch.inf, device=device)
        """fp32 [signal, step], the newest step last; a step that is not finite repeats the one before it."""
        self._streak = torch.zeros(2, device=device)
        """fp32 [signal]: steps in a row above the limit of lasting spikes."""
        self._earlier = self._history, self._streak
        """Before the last step."""
        self._no_limits = torch.full((4, 2), torch.inf, device=device)
        self._is_norm = torch.tensor([False, True], device=device)
        least = torch.tensor([config.loss_min_rise_nats, math.log(config.grad_norm_min_ratio)])
        factors = DEVIATIONS_PER_DIFFERENCE * torch.tensor([config.sigmas, config.lasting_sigmas])
        self._least = torch.stack([least, 0.5 * least]).to(device)
        """fp32 [single or lasting, signal]."""
        self._factors = factors[:, None].to(device)

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor, grad_clip: float) -> Verdict:
        """The verdict on a step, which then joins the history.

        Spikes join, too: medians stand them until they are half of the window, and then they are the new level.

        Args:
            loss: 0-d, over the global batch.
            grad_norm: 0-d fp32, over all ranks, before clipping.
            grad_clip: largest norm that the update is made of; 0 for any.
        """
        compared_norm = grad_norm.log() if self._config.detector == "robust" else grad_norm
        values = torch.stack([loss.float(), grad_norm, compared_norm])
        finite = (values[:2] * 0 == 0).all()
        compared = values[::2]
        limits = self._limits()
        by_log = grad_clip > 0 and self._config.detector == "robust"
        clipped = self._is_norm & (limits[0] >= (math.log(grad_clip) if by_log else math.inf))
        alone = torch.where(clipped, limits[3], limits[0])
        above = torch.stack([compared > alone, compared > limits[1], compared > limits[2]])
        streak = (self._streak + 1) * above[1]
        lasts = streak >= self._config.lasting_steps
        together = above[2].all()
        after_large = (self._history[1, 1 - FOLLOWS_STEPS :] > limits[0, 1]).any()
        follows = above[2] & after_large & ~self._is_norm
        spikes = (above[0] | lasts | together | follows) & finite
        applied = finite if self._config.action == "log" else finite & ~spikes.any()
        self._earlier = self._history, self._streak
        self._streak = torch.where(finite, streak, self._streak)
        joins = torch.where(finite, compared, self._history[:, -1])
        self._history = torch.cat([self._history[:, 1:], joins[:, None]], dim=1)
        self._steps += 1
        flags = torch.stack([spikes[0], spikes[1], finite, applied]).float()
        lower = torch.where(lasts, limits[1], limits[2])
        shown = torch.where(spikes & ~above[0], lower, alone)
        return Verdict(applied, torch.cat([values[:2], shown, flags]))

    def take_back(self) -> None:
        """Forget the last step judged, once."""
        self._history, self._streak = self._earlier
        self._steps -= 1

    def row(self, values: list[float]) -> Row:
        """From `Verdict.row`, with limits in the units of the metrics."""
        loss, grad_norm, loss_limit, norm_limit, *flags = values
        if self._config.detector == "robust":
            norm_limit = math.exp(min(norm_limit, 700.0)) if norm_limit < math.inf else math.inf
        loss_spikes, norm_spikes, finite, applied = (flag != 0 for flag in flags)
        return Row(loss, grad_norm, loss_limit, norm_limit, loss_spikes, norm_spikes, finite, applied)

    def _limits(self) -> torch.Tensor:
        """fp32 [4, signal]: above what the next step is a spike by itself, with those before it, with the other signal;
        and by itself where it is clipped."""
        seen = min(self._steps, self._config.window_steps)
        if seen < self._config.min_history_steps:
            return self._no_limits
        history = self._history[:, -seen:]
        if self._config.detector == "sigma":
            return self._sigma_limits(history)
        return self._robust_limits(history)

    def _robust_limits(self, history: torch.Tensor) -> torch.Tensor:
        """Median + max(sigmas * deviation, least rise).

        The median is the lower of the medians of the window and of the last 32 steps: a falling loss is compared with
        where it is now, one that creeps up with where it was. The deviation comes from the differences of steps 8 and
        32 apart about their median, so that neither a trend widens it nor an earlier spike.
        """
        level = torch.minimum(_median(history), _median(history[:, -RECENT_STEPS:]))
        spread = torch.zeros_like(level)
        for lag in LAGS_STEPS:
            if history.shape[1] >= 2 * lag:  # else there are too few differences
                differences = history[:, lag:] - history[:, :-lag]
                deviations = (differences - _median(differences)[:, None]).abs()
                spread = torch.maximum(spread, _median(deviations))
        single, lasting = torch.maximum(self._factors * spread, self._least)
        return level + torch.stack([single, lasting, TOGETHER * single, ALONE * single])

    def _sigma_limits(self, history: torch.Tensor) -> torch.Tensor:
        """OLMo-core's rule: mean + sigmas * standard deviation of a window that keeps its spikes; nothing lasts."""
        seen = history < torch.inf  # a phase may begin with steps that are not finite
        count = seen.sum(dim=1)
        mean = torch.where(seen, history, 0).sum(dim=1) / count
        squares = torch.where(seen, history - mean[:, None], 0).square().sum(dim=1)
        limit = mean + self._config.sigmas * (squares / (count - 1)).sqrt()
        return torch.cat([limit[None], self._no_limits[1:]])

    def state(self) -> dict[str, Any]:
        """For the checkpoint, bit for bit. Waits for the device."""
        return {
            "detector": self._config.detector,
            "steps": self._steps,
            "history": self._history.tolist(),
            "streak": self._streak.tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Of a window that was longer or shorter the newest steps count."""
        saved = torch.tensor(state["history"], device=self._history.device)
        if state["detector"] != self._config.detector:
            saved[1] = saved[1].log() if self._config.detector == "robust" else saved[1].exp()
        size = min(saved.shape[1], self._history.shape[1])
        self._history[:, -size:] = saved[:, -size:]
        self._streak = torch.tensor(state["streak"], device=self._streak.device)
        self._steps = min(state["steps"], saved.shape[1])


def _median(values: torch.Tensor) -> torch.Tensor:
    """Lower median of each row [n, m], [n]."""
    return values.sort(dim=1).values[:, (values.shape[1] - 1) // 2]


@torch.inference_mode()
def replay(trace: torch.Tensor, config: MonitorConfig, grad_clip: float) -> list[Row]:
    """The verdicts on a recorded trace fp32 [steps, (loss, gradient norm)] from a phase's first step on."""
    detector = SpikeDetector(config, trace.device)
    return [detector.row(detector.judge(loss, norm, grad_clip).row.tolist()) for loss, norm in trace]
