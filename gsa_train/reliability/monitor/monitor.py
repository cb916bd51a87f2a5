"""What the host makes of the verdicts on the steps: counts, events, and the policy `monitor.action`.

The device has judged a step and left its update out, if it had to, before the host knows (spikes.py). The host
reads a verdict READ_DELAY_STEPS steps later, or before a logged or saved step if that comes first: the same step on all
ranks and in every repetition of the run, whatever the device is doing, and never a wait for the step under way.

What a spike is: flagged steps with fewer than SPIKE_GAP_STEPS others between them are one spike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gsa_train.config import MonitorConfig
from gsa_train.distributed.to_host import ToHost
from gsa_train.phases import PhaseRange
from gsa_train.reliability.monitor.layer_watch import LayerWatch
from gsa_train.reliability.monitor.spikes import Row, SpikeDetector, Verdict

READ_DELAY_STEPS = 2
"""The device is not further behind than this where host and device are busy, so reading so late waits for nothing."""
SPIKE_GAP_STEPS = 10
SCORE_STEPS, SCORE_SIGMAS = 128, 6.0
"""OLMo-core's SpikeScore: share of steps with a loss or gradient norm that far above the mean of as many steps."""


class MonitorStop(RuntimeError):
    """The monitor ends the run, by its policy or for want of another way. What is saved is from before the spike."""

    def __init__(self, why: str, first_step: int, last_step: int) -> None:
        """Steps, counted from 1, of the spike as far as it was read."""
        super().__init__(why)
        self.first_step, self.last_step = first_step, last_step


class NotFinite(MonitorStop):
    """What would be saved, or what was trained to the end, is not finite: no batch is known to be the cause."""

    def __init__(self, why: str, step: int) -> None:
        """After `step`, counted from 1."""
        super().__init__(why, step + 1, step)

    def as_spike(self, spikes: int) -> SpikeFound:
        """For a rewind, which leaves out the batches around the step.

        Args:
            spikes: of the run before.
        """
        return SpikeFound(self.last_step, self.last_step, "weights", math.nan, math.inf, spikes + 1)


class SpikeFound(NamedTuple):
    """A spike that asks for a rewind."""

    first_step: int
    """Its first flagged step, counted from 1."""
    last_step: int
    """The last one read."""
    signal: str
    value: float
    threshold: float
    spikes: int
    """Of the run so far, this one included."""


@dataclass
class MonitorState:
    """What a checkpoint keeps, as plain values."""

    phase_index: int = 0
    # Each phase begins its own.
    detector: dict[str, Any] | None = None
    """`SpikeDetector.state()`; None before the first save."""
    recent: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm of the last SCORE_STEPS finite steps."""
    layers: dict[str, list[list[float]]] = field(default_factory=dict)
    """`LayerWatch.history`."""
    in_a_row: int = 0
    """Flagged steps in a row up to the last one read."""
    first_in_a_row: int = 0
    """Step of the first of them."""
    last_flagged: int = -SPIKE_GAP_STEPS
    lowered: list[tuple[int, int]] = field(default_factory=list)
    """First and last steps with a lowered learning rate."""
    # Of the whole run.
    judged_steps: int = 0
    spikes: int = 0
    skipped_updates: int = 0
    score_steps: int = 0
    """Spiking steps by OLMo-core's rule."""
    rewinds: list[dict[str, Any]] = field(default_factory=list)
    """gsa_train.run_folder.rewind.Rewind of each, in order."""

    def entering(self, phase_index: int) -> MonitorState:
        """This state at the beginning of another phase."""
        if phase_index == self.phase_index:
            return self
        kept = ("judged_steps", "spikes", "skipped_updates", "score_steps", "rewinds")
        return MonitorState(phase_index, **{name: getattr(self, name) for name in kept})


class _Unread(NamedTuple):
    step: int
    row: ToHost


class Monitor:
    """One phase's."""

    def __init__(
        self,
        config: MonitorConfig,
        phase_range: PhaseRange,
        device: torch.device,
        state: MonitorState,
        log: Callable[[dict[str, Any]], None],
        saved_step: Callable[[], int | None],
    ) -> None:
        """
        Args:
            state: of the checkpoint, or of the phase before.
            log: takes events for metrics.jsonl.
            saved_step: newest checkpoint; asked where the run ends.
        """
        self._config, self._phase_range = config, phase_range
        self._log, self._saved_step = log, saved_step
        self._state = state.entering(phase_range.index)
        self._unread: deque[_Unread] = deque()
        self._last: Row | None = None
        self.detector = SpikeDetector(config, device)
        if self._state.detector is not None:
            self.detector.load(self._state.detector)
        self._layers = LayerWatch(self._state.layers)

    # --- a step --------------------------------------------------------------------------------------------

    def lr_factor(self, step: int) -> float:
        """Factor on the learning rates of a step."""
        lowered = any(first <= step <= last for first, last in self._state.lowered)
        return self._config.lower_lr_factor if lowered else 1.0

    def observe(self, step: int, verdict: Verdict) -> None:
        """Send the verdict on its way to the host."""
        self._unread.append(_Unread(step, ToHost(verdict.row)))

    def read(self, through: int) -> SpikeFound | None:
        """Count and act on the steps up to `through`, which may be more of them than READ_DELAY_STEPS asks for.

        Returns:
            The spike that asks for a rewind, if there is one: what follows it was not read.

        Raises:
            MonitorStop: the run ends here.
        """
        while self._unread and self._unread[0].step <= through:
            step, row = self._unread.popleft()
            found = self._judge(step, self.detector.row(row.read().tolist()))
            if found is not None:
                return found
        return None

    def watch_layers(self, step: int, record: dict[str, Any]) -> None:
        """Warn of layers whose statistics in a logged step's record have jumped; they often do before the loss does."""
        for jump in self._layers.look(record):
            self._event("warning", step, **jump, action="log")

    # --- records and checkpoints ---------------------------------------------------------------------------

    @property
    def last_grad_norm(self) -> float:
        """Of the last step read."""
        assert self._last is not None
        return self._last.grad_norm

    def metrics(self) -> dict[str, float]:
        """Over the whole run up to the last step read."""
        state = self._state
        steps = max(state.judged_steps, 1)
        return {
            "spikes": state.spikes,
            "spikes_per_100k_steps": 1e5 * state.spikes / steps,
            "spike_score": state.score_steps / steps,
            "skipped_updates": state.skipped_updates,
            "rewinds": len(state.rewinds),
        }

    def state(self) -> MonitorState:
        """Of this moment; every step must have been read. Waits for the device."""
        assert not self._unread
        self._state.detector = self.detector.state()
        self._state.layers = self._layers.history
        return self._state

    # --- policy --------------------------------------------------------------------------------------------

    def _judge(self, step: int, row: Row) -> SpikeFound | None:
        state, config = self._state, self._config
        self._last = row
        state.judged_steps += 1
        state.score_steps += self._counts_for_score(row)
        if not row.flagged:
            state.in_a_row = 0
            return None
        if step - state.last_flagged > SPIKE_GAP_STEPS:
            state.spikes += 1
        if state.in_a_row == 0:
            state.first_in_a_row = step
        state.last_flagged = step
        state.in_a_row += 1
        state.skipped_updates += not row.applied
        signal, value, threshold = row.strongest()
        self._event(
            "spike",
            step,
            signal=signal,
            value=value,
            threshold=threshold,
            action="log" if row.applied else "skip",
        )
        what = f"step {step}: the {signal.replace('grad_', 'gradient ')} is {value:g}"
        if math.isfinite(value):
            what += f", above {threshold:.3g}"
        if config.action == "log" and not row.finite:
            raise self._stop(what, step)
        if config.action in ("skip", "lower_lr") and state.in_a_row >= config.max_skips_in_a_row:
            raise self._stop(
                f"{what}: the update was left out for the {state.in_a_row}th step in a row "
                "(monitor.max_skips_in_a_row)",
                step,
            )
        if state.in_a_row < config.patience_steps:
            return None
        if config.action == "stop":
            raise self._stop(f"{what}, {state.in_a_row} steps in a row (monitor.action = stop)", step)
        if config.action == "lower_lr":
            # From a step on that no reading is too late for: a run stopped in between goes on with the same rates.
            first = step + READ_DELAY_STEPS + 1
            # The next phase has a rate of its own.
            last = min(first + config.lower_lr_steps - 1, self._phase_range.end)
            state.lowered = [each for each in state.lowered if each[1] > step]
            if first <= last:
                if not any(its_last >= first - 1 for _, its_last in state.lowered):
                    self._event("lower_lr", step, factor=config.lower_lr_factor, first=first, last=last)
                state.lowered.append((first, last))
        if config.action == "rewind":
            return SpikeFound(state.first_in_a_row, step, signal, value, threshold, state.spikes)
        return None

    def _stop(self, why: str, step: int) -> MonitorStop:
        return MonitorStop(
            f"{why}. Nothing was saved after step {self._saved_step() or 0}; resume from there with a lower learning "
            "rate, or look at the batch.",
            self._state.first_in_a_row,
            step,
        )

    def _counts_for_score(self, row: Row) -> bool:
        recent, spikes = self._state.recent, False
        if len(recent) == SCORE_STEPS:
            for value, seen in zip((row.loss, row.grad_norm), zip(*recent, strict=True), strict=True):
                mean = statistics.fmean(seen)
                deviation = math.sqrt(sum((one - mean) ** 2 for one in seen) / SCORE_STEPS)
                spikes |= value > mean + SCORE_SIGMAS * deviation
        if row.finite:
            recent.append((row.loss, row.grad_norm))
            del recent[:-SCORE_STEPS]
        return spikes

    def _event(self, event: str, step: int, **values: Any) -> None:
        self._log({"event": event, "step": step, "phase": self._phase_range.phase.name, **values})


def state_of(saved: dict[str, Any]) -> MonitorState:
    """From what a checkpoint holds; an empty one is of a version without monitor."""
    pairs = {name: [tuple(pair) for pair in saved.get(name, [])] for name in ("recent", "lowered")}
    return MonitorState(**{**saved, **pairs})
