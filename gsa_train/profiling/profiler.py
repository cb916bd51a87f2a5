"""Trace a few training steps and record the device's allocations (section `profile` of the config).

For each profiled rank, in `<run>/profile/steps_<first>-<last>/`:
    rank_<rank>.json.gz        trace for ui.perfetto.dev or chrome://tracing (spans: gsa_train.profiling.trace_spans)
    rank_<rank>.txt            short table of where the time went (gsa_train.profiling.table)
    rank_<rank>.memory.pickle  snapshot for pytorch.org/memory_viz, only with `profile.memory_snapshot`

Profiling does not change any result of the training.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gsa_train.config import ProfileConfig
from gsa_train.files import write_atomically
from gsa_train.profiling.table import profile_table
from gsa_train.services import Service, StepPlan

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 1_000_000
"""Largest number of allocations and releases in a snapshot; torch's default has no limit."""


class ProfileError(ValueError):
    """The config requests a profile that this device does not support."""


class StepProfiler(Service):
    def __init__(self, config: ProfileConfig, folder: Path, rank: int, device: torch.device) -> None:
        """
        Raises:
            ProfileError: a memory snapshot is requested without a CUDA device.
        """
        if config.memory_snapshot and device.type != "cuda":
            raise ProfileError(
                "profile.memory_snapshot = true: snapshots are of a CUDA device's memory, and this run is on CPUs; "
                "set it to false"
            )
        self._folder, self._rank, self._device = folder, rank, device
        wanted = config.start_step > 0 and (not config.ranks or rank in config.ranks)
        self._first, self._last = config.start_step, config.start_step + config.steps - 1 if wanted else 0
        self._snapshots = config.memory_snapshot
        self._prepared: profile | None = None
        self._running: profile | None = None
        self._step_name: record_function | None = None
        self._steps: list[int] = []

    def before_step(self, plan: StepPlan) -> None:
        """Start the trace at the first profiled step, or at a later one if the run resumes there. The profiler warms up
        in the step before the first profiled step."""
        step = plan.step
        if not self._first - 1 <= step <= self._last:
            return
        if self._running is None:
            if self._prepared is None:
                activities = [ProfilerActivity.CPU]
                if self._device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self._prepared = profile(activities=activities)
                self._prepared.prepare_trace()
            if step < self._first:
                return
            self._running, self._prepared = self._prepared, None
            if self._snapshots:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # excludes work of the previous step
            self._running.start_trace()
        self._step_name = record_function(f"ProfilerStep#{step}")  # name that trace viewers expect
        self._step_name.__enter__()
        self._steps.append(step)

    def after_step(self, plan: StepPlan) -> None:
        self._end(plan.step)

    def on_stop(self) -> None:
        """Write the partial trace of a run that ends inside the window, as when memory is exhausted."""
        if self._running is not None:
            self._end(self._last)

    def _end(self, step: int) -> None:
        if self._step_name is not None:
            self._step_name.__exit__(None, None, None)
            self._step_name = None
        if self._running is not None and step >= self._last:
            self._write(self._running)

    def _write(self, trace: profile) -> None:
        """Write the trace. An OSError is logged and does not end the run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        trace.stop_trace()
        self._running = None
        try:
            self._export(trace)
        except OSError as error:
            steps = self._steps[0], self._steps[-1]
            logger.error("the profile of steps %d to %d cannot be written: %s", *steps, error)
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _export(self, trace: profile) -> None:
        folder = self._folder / f"steps_{self._steps[0]:08d}-{self._steps[-1]:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{self._rank:05d}.json.gz"
        snapshot = path.with_name(f"rank_{self._rank:05d}.memory.pickle")
        for each in (path, snapshot):  # torch would write through a link
            each.unlink(missing_ok=True)
        if self._snapshots:
            torch.cuda.memory._dump_snapshot(str(snapshot))
        trace.export_chrome_trace(str(path))
        table = profile_table(trace.events(), self._steps, self._device.type == "cuda")
        write_atomically(path.with_name(f"rank_{self._rank:05d}.txt"), table)
        logger.info("profile of steps %d to %d: %s\n%s", self._steps[0], self._steps[-1], path, table)
