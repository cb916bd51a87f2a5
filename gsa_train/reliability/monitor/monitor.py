"""Act on the verdicts about steps, on the host: count spikes, log events, and apply the policy `monitor.action`.

The device judges a step and, if needed, skips its update (spikes.py). The host reads the verdict READ_DELAY_STEPS steps
later, so the host does not wait for the device. Before a step is logged or saved, the host reads all verdicts up to
this step. All ranks thus act on a verdict at the same step.

Flagged steps belong to the same spike if fewer than SPIKE_GAP_STEPS unflagged steps lie between them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gsa_train.config import MonitorConfig
from gsa_train.distributed.to_host import ToHost
from gsa_train.phases import PhaseRange
from gsa_train.reliability.monitor.layer_watch import LayerWatch
from gsa_train.reliability.monitor.spikes import Row, SpikeDetector, Verdict

READ_DELAY_STEPS = 2
"""Delay in steps before a verdict is read. The device lags the host by at most this delay, so a read does not wait."""
SPIKE_GAP_STEPS = 10
SCORE_STEPS, SCORE_SIGMAS = 128, 6.0
"""OLMo-core's SpikeScore: share of steps whose loss or gradient norm is SCORE_SIGMAS standard deviations above the mean
of SCORE_STEPS."""


class MonitorStop(RuntimeError):
    """The monitor ends the run. All checkpoints are older than the spike."""

    def __init__(self, why: str, first_step: int, last_step: int) -> None:
        """`first_step` to `last_step` are the spike's steps that were read, counted from 1."""
        super().__init__(why)
        self.first_step, self.last_step = first_step, last_step


class NotFinite(MonitorStop):
    """A save found weights or optimizer state that are not finite, or the last validation loss is not finite. No batch
    is known to be the cause."""

    def __init__(self, why: str, step: int) -> None:
        """`step` is the last trained step, counted from 1."""
        super().__init__(why, step + 1, step)


@dataclass
class MonitorState:
    """State of the monitor in a checkpoint, as plain values."""

    phase_index: int = 0
    # Reset at the beginning of each phase.
    detector: dict[str, Any] | None = None
    """`SpikeDetector.state()`; None before the first save."""
    recent: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm of the last SCORE_STEPS finite steps."""
    layers: dict[str, list[list[float]]] = field(default_factory=dict)
    """`LayerWatch.history`."""
    in_a_row: int = 0
    """Consecutive flagged steps up to the last one read."""
    first_in_a_row: int = 0
    """First of the consecutive flagged steps."""
    last_flagged: int = -SPIKE_GAP_STEPS
    # Kept for the whole run.
    judged_steps: int = 0
    spikes: int = 0
    skipped_updates: int = 0
    score_steps: int = 0
    """Spiking steps by OLMo-core's rule."""

    def entering(self, phase_index: int) -> MonitorState:
        if phase_index == self.phase_index:
            return self
        kept = ("judged_steps", "spikes", "skipped_updates", "score_steps")
        return MonitorState(phase_index, **{name: getattr(self, name) for name in kept})


class Monitor:
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
            saved_step: returns the step of the newest checkpoint; called when the run ends.
        """
        self._config, self._phase_range = config, phase_range
        self._log, self._saved_step = log, saved_step
        self._state = state.entering(phase_range.index)
        self._unread: deque[tuple[int, ToHost]] = deque()
        self._last: Row | None = None
        self.detector = SpikeDetector(config, device)
        if self._state.detector is not None:
            self.detector.load(self._state.detector)
        self._layers = LayerWatch(self._state.layers)

    # --- a step --------------------------------------------------------------------------------------------

    def observe(self, step: int, verdict: Verdict) -> None:
        self._unread.append((step, ToHost(verdict.row)))

    def read(self, through: int) -> None:
        """Read the verdicts on the steps up to `through` and act on them.

        Raises:
            MonitorStop: a spike ends the run.
        """
        while self._unread and self._unread[0][0] <= through:
            step, row = self._unread.popleft()
            self._judge(step, self.detector.row(row.read().tolist()))

    def watch_layers(self, step: int, record: dict[str, Any]) -> None:
        """Warn of layers with statistics that jumped in a logged step's record."""
        for jump in self._layers.look(record):
            self._event("warning", step, **jump, action="log")

    # --- records and checkpoints ---------------------------------------------------------------------------

    @property
    def last_grad_norm(self) -> float:
        assert self._last is not None
        return self._last.grad_norm

    def metrics(self) -> dict[str, float]:
        """Returns metrics over the whole run up to the last step read."""
        state = self._state
        steps = max(state.judged_steps, 1)
        return {
            "spikes": state.spikes,
            "spikes_per_100k_steps": 1e5 * state.spikes / steps,
            "spike_score": state.score_steps / steps,
            "skipped_updates": state.skipped_updates,
        }

    def state(self) -> MonitorState:
        """Returns the current state. Every step must have been read. Synchronizes with the device."""
        assert not self._unread
        self._state.detector = self.detector.state()
        self._state.layers = self._layers.history
        return self._state

    # --- policy --------------------------------------------------------------------------------------------

    def _judge(self, step: int, row: Row) -> None:
        state, config = self._state, self._config
        self._last = row
        state.judged_steps += 1
        state.score_steps += self._counts_for_score(row)
        if not row.flagged:
            state.in_a_row = 0
            return
        if step - state.last_flagged > SPIKE_GAP_STEPS:
            state.spikes += 1
        if state.in_a_row == 0:
            state.first_in_a_row = step
        state.last_flagged = step
        state.in_a_row += 1
        state.skipped_updates += not row.applied
        signal, value, threshold = row.strongest()
        action = "log" if row.applied else "skip"
        self._event("spike", step, signal=signal, value=value, threshold=threshold, action=action)
        what = f"step {step}: the {signal.replace('grad_', 'gradient ')} is {value:g}"
        if math.isfinite(value):
            what += f", above {threshold:.3g}"
        if config.action == "log" and not row.finite:
            raise self._stop(what, step)
        if config.action == "skip" and state.in_a_row >= config.max_skips_in_a_row:
            raise self._stop(
                f"{what}: the update was left out for the {state.in_a_row}th step in a row "
                "(monitor.max_skips_in_a_row)",
                step,
            )
        if config.action == "stop" and state.in_a_row >= config.patience_steps:
            raise self._stop(f"{what}, {state.in_a_row} steps in a row (monitor.action = stop)", step)

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
    """Returns the state from a checkpoint, which is empty for versions without monitor. Earlier versions have more
    fields."""
    known = {each.name: saved[each.name] for each in fields(MonitorState) if each.name in saved}
    return MonitorState(**{**known, "recent": [tuple(pair) for pair in saved.get("recent", [])]})
