"""Detect spikes on the device before the update, with the same result on all ranks.

A step's loss and gradient norm over the global batch are compared with their values in the last `window_steps` steps.
The gradient norm is compared by its logarithm, because the noise of the norm is multiplicative and has a long tail. The
verdict masks the update on the device, and the host reads the verdict later (monitor.py).

A large gradient with a normal loss usually comes from a short stretch of unusual text. A step with a clipped gradient
is therefore flagged only in three cases: the norm exceeds a higher limit, the norm remains large for several steps, or
the loss also rises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from gsa_train.config import MonitorConfig

RECENT_STEPS = 32
"""Steps of the short median, which follows a falling loss. It follows a spike only if the spike lasts for half of
these steps."""
LAGS_STEPS = (8, 32)
"""The noise is estimated from differences over these lags, and the larger estimate counts. Over 8 steps a trend adds
little. The lag of 32 is needed because long documents make nearby batches similar."""
TOGETHER = 2 / 3
"""If loss and gradient norm rise in the same step, the limits for both rises are multiplied by this factor. A rise of
only one of the two often has harmless causes, such as a rare document."""
ALONE = 2.0
"""If the gradient is clipped, the limit for the rise of the norm's logarithm is multiplied by this factor. By default,
a norm is then a spike above 16 times the usual norm. In recorded runs, text caused smaller norms. A wrong exponent bit
causes larger norms."""
FOLLOWS_STEPS = 10
"""Number of steps, from the step of a large gradient on, in which this gradient may affect the loss. AdamW's momentum
lasts 1 / (1 - beta 1) steps."""
DEVIATIONS_PER_DIFFERENCE = 1.4826 / math.sqrt(2)
"""Standard deviation divided by the median absolute difference of two independent normal values."""


class Verdict(NamedTuple):
    applied: torch.Tensor
    """0-d bool: the update is made."""
    row: torch.Tensor
    """fp32 [8]: input of `SpikeDetector.row`."""


@dataclass(frozen=True)
class Row:
    loss: float
    """Loss in nats per scored token of the global batch."""
    grad_norm: float
    loss_limit: float
    """The limit that the loss exceeds, or the limit of a single step if it exceeds none. Infinite while the history is
    too short."""
    grad_norm_limit: float
    loss_spikes: bool
    grad_norm_spikes: bool
    finite: bool
    applied: bool

    @property
    def flagged(self) -> bool:
        return self.loss_spikes or self.grad_norm_spikes or not self.finite

    def strongest(self) -> tuple[str, float, float]:
        """Returns signal, value and limit to report. A value that is not finite comes first, then the loss."""
        if not math.isfinite(self.loss) or (self.loss_spikes and self.finite):
            return "loss", self.loss, self.loss_limit
        return "grad_norm", self.grad_norm, self.grad_norm_limit


class SpikeDetector:
    """Holds the history of a phase and judges its next step. No operation here synchronizes with the device.

    The `signal` dimension of its tensors has the loss first, then the logarithm of the gradient norm.
    """

    def __init__(self, config: MonitorConfig, device: torch.device) -> None:
        self._config = config
        self._steps = 0
        self._history = torch.full((2, config.window_steps), torch.inf, device=device)
        """fp32 [signal, step], the newest step last; a step that is not finite repeats the one before it."""
        self._streak = torch.zeros(2, device=device)
        """fp32 [signal]: consecutive steps above the limit of lasting spikes."""
        self._earlier = self._history, self._streak
        """History and streak before the last step."""
        self._no_limits = torch.full((4, 2), torch.inf, device=device)
        self._is_norm = torch.tensor([False, True], device=device)
        least = torch.tensor([config.loss_min_rise_nats, math.log(config.grad_norm_min_ratio)])
        factors = DEVIATIONS_PER_DIFFERENCE * torch.tensor([config.sigmas, config.lasting_sigmas])
        self._least = torch.stack([least, 0.5 * least]).to(device)
        """fp32 [single or lasting, signal]: least rise."""
        self._factors = factors[:, None].to(device)

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor, grad_clip: float) -> Verdict:
        """Returns the verdict on a step, and adds the step to the history.

        A spike also enters the history. Spikes change a median once they fill half of the window.

        Args:
            loss: 0-d, over the global batch.
            grad_norm: 0-d fp32, over all ranks, before clipping.
            grad_clip: norm to which the gradient is clipped; 0 for no clipping.
        """
        values = torch.stack([loss.float(), grad_norm, grad_norm.log()])
        finite = (values[:2] * 0 == 0).all()
        compared = values[::2]
        limits = self._limits()
        clipped = self._is_norm & (limits[0] >= (math.log(grad_clip) if grad_clip > 0 else math.inf))
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
        """Remove the last judged step from the history. Only one step can be removed."""
        self._history, self._streak = self._earlier
        self._steps -= 1

    def row(self, values: list[float]) -> Row:
        """Convert `Verdict.row`, with limits in the units of the metrics."""
        loss, grad_norm, loss_limit, norm_limit, *flags = values
        norm_limit = math.exp(min(norm_limit, 700.0)) if norm_limit < math.inf else math.inf
        loss_spikes, norm_spikes, finite, applied = (flag != 0 for flag in flags)
        return Row(loss, grad_norm, loss_limit, norm_limit, loss_spikes, norm_spikes, finite, applied)

    def _limits(self) -> torch.Tensor:
        """Returns four limits of the next step, fp32 [4, signal]: for one step alone, for a lasting rise, for a rise of
        loss and norm together, and for one clipped step alone. A limit is median + max(sigmas * deviation, least rise).

        The median is the smaller of the medians over the whole window and over the last 32 steps. While the loss falls,
        the median over 32 steps is smaller, so the limits follow the loss. While the loss rises slowly, the median over
        the window is smaller, so the limits stay low.

        The deviation is the larger of two median absolute deviations: of the 8-step changes and of the 32-step changes.
        Neither a trend nor an earlier spike increases it.
        """
        seen = min(self._steps, self._config.window_steps)
        if seen < self._config.min_history_steps:
            return self._no_limits
        history = self._history[:, -seen:]
        level = torch.minimum(_median(history), _median(history[:, -RECENT_STEPS:]))
        spread = torch.zeros_like(level)
        for lag in LAGS_STEPS:
            if history.shape[1] >= 2 * lag:  # otherwise there are too few differences
                differences = history[:, lag:] - history[:, :-lag]
                deviations = (differences - _median(differences)[:, None]).abs()
                spread = torch.maximum(spread, _median(deviations))
        single, lasting = torch.maximum(self._factors * spread, self._least)
        return level + torch.stack([single, lasting, TOGETHER * single, ALONE * single])

    def state(self) -> dict[str, Any]:
        """Returns the exact state for the checkpoint. Synchronizes with the device."""
        return {
            "steps": self._steps,
            "history": self._history.tolist(),
            "streak": self._streak.tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load `state`. If the window had another length, the newest steps are used."""
        saved = torch.tensor(state["history"], device=self._history.device)
        size = min(saved.shape[1], self._history.shape[1])
        self._history[:, -size:] = saved[:, -size:]
        self._streak = torch.tensor(state["streak"], device=self._streak.device)
        self._steps = min(state["steps"], saved.shape[1])


def _median(values: torch.Tensor) -> torch.Tensor:
    """Returns the lower median [n] of each row of [n, m]."""
    return values.sort(dim=1).values[:, (values.shape[1] - 1) // 2]


@torch.inference_mode()
def replay(trace: torch.Tensor, config: MonitorConfig, grad_clip: float) -> list[Row]:
    """Returns the verdicts on a recorded trace fp32 [steps, (loss, gradient norm)] from a phase's first step."""
    detector = SpikeDetector(config, trace.device)
    return [detector.row(detector.judge(loss, norm, grad_clip).row.tolist()) for loss, norm in trace]
