"""How long training waits for saves, the first, later ones and the last, of a whole model; how long a start reads one.

    torchrun --standalone --nproc_per_node=1 benchmarks/bench_save.py [--config FILE] [--folder DIR] [key=value ...]

Steps of the config's last phase on random tokens, and real checkpoints in a temporary folder of --folder (which is to
be on the disk that runs use). Two ways, one after the other:

    before   pinned memory made by the first save, all copied before the next step; two files a rank, a thread for
             the checksum of each
    now      memory made meanwhile (`pinning_s`: from when it was asked for until a step found it there), copies behind
             the next step's forward and backward pass, up to eight files

`stall_s` is what the steps from the beginning of a save on took beyond as many usual ones (median without saves), so
that what the device waits for counts, too; `host_s` what the save itself says (`checkpoint_stall_seconds`); `plan_s`
the part before the copies; `durable_s` until a resume would find it, while steps go on. The last save is waited for
until then. Bar: less than one step, first and later. `read_s`: the last checkpoint read into the same model and checked
meanwhile, as at a start, from the system's cache where that has room.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import harness
import torch
import torch.distributed as dist

from gsa_train.checkpoint import checksums, save
from gsa_train.checkpoint.damage import tensor_files
from gsa_train.checkpoint.files import find_checkpoint
from gsa_train.checkpoint.load import RunState, load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver, SaveResult
from gsa_train.checkpoint.staging import Copies, Group, Staging
from gsa_train.config import CheckpointConfig, Config, config_to_yaml
from gsa_train.distributed.parallel import Parallel, shutdown_parallel
from gsa_train.model.mcore.build import Model
from whole_steps.step_bench import OurTrainee, add_model, random_batches, start_model

WAYS = ("before", "now")
Row = dict[str, Any]
"""By column."""


class Saving:
    """A model that takes steps and is saved."""

    def __init__(self, way: str, trainee: OurTrainee, config: Config, folder: Path, steps: int) -> None:
        """
        Args:
            steps: behind each save, over which its stall is counted.
        """
        parallel = trainee.parallel
        self.way, self._trainee, self._config, self._steps = way, trainee, config, steps
        self._batches = random_batches(config, parallel)
        self._saver = CheckpointSaver(folder, CheckpointConfig(keep_last=1), parallel)
        self._step = 0
        self._plan_seconds = 0.0
        self._asked = time.perf_counter()
        if way == "now":
            self._saver.reserve(trainee.model, trainee.optimizer)

    def step(self) -> list[SaveResult]:
        self._step += 1
        self._trainee.step(self._batches, hold_update=self._saver.hold_update)
        return self._saver.ended(now=self._step)

    def until_pinned(self) -> float:
        """Seconds until a step found the memory there; 0.0 where none was asked for."""
        reserving = self._saver._host_memory._reserving
        if reserving is None:
            return 0.0
        while not reserving.done():
            self.span(self.step)
        return time.perf_counter() - self._asked

    def span(self, do: Callable[[], object]) -> float:
        """Seconds until the device has done it."""
        _synchronize(self._trainee.parallel)
        began = time.perf_counter()
        do()
        _synchronize(self._trainee.parallel)
        return time.perf_counter() - began

    def begin(self) -> None:
        began = time.perf_counter()
        begin_copies = Staging.begin

        def begin(staging: Staging, groups: list[Group]) -> Copies:
            self._plan_seconds = time.perf_counter() - began
            copies = begin_copies(staging, groups)
            if self.way == "before":
                copies.wait()
            return copies

        with patch.object(Staging, "begin", begin):
            state = _state(self._step, self._config, self._trainee.parallel)
            assert not self._saver.begin(state, self._trainee.model, self._trainee.optimizer)

    def save_and_go_on(self, usual: float) -> Row:
        found: list[SaveResult] = []

        def run() -> None:
            self.begin()
            for _ in range(self._steps):
                found.extend(self.step())

        took = self.span(run)
        while not found:
            found.extend(self.step())
        return self._row(found[0], took - self._steps * usual, usual)

    def save_at_the_end(self, usual: float) -> Row:
        found: list[SaveResult] = []

        def run() -> None:
            self.begin()
            found.extend(self._saver.ended(now=self._step, wait=True))

        took = self.span(run)
        return self._row(found[0], took, usual)

    def read(self) -> float:
        """Seconds."""
        folder = find_checkpoint(self._saver.checkpoints)
        assert folder is not None
        model, optimizer, parallel = self._trainee.model, self._trainee.optimizer, self._trainee.parallel
        return self.span(
            lambda: load_checkpoint(
                folder, model, optimizer, parallel, with_optimizer=True, unchecked=tensor_files(folder)
            )
        )

    def close(self) -> None:
        self._saver.close()

    def _row(self, result: SaveResult, stall: float, usual: float) -> Row:
        assert result.error is None, result.error
        return {
            "stall_s": stall,
            "host_s": result.stall_seconds,
            "plan_s": self._plan_seconds,
            "step_s": usual,
            "durable_s": result.save_seconds,
            "gb": result.bytes / 1e9,
            "pinned_gib": self._saver.pinned_bytes / 2**30,
        }


def _state(step: int, config: Config, parallel: Parallel) -> RunState:
    return RunState(
        step=step,
        tokens=0,
        phase_index=len(config.phases) - 1,
        phase_name=config.phases[-1].name,
        phase_start=0,
        data={},
        wandb_run_id=None,
        config_yaml=config_to_yaml(config),
        layout=parallel.layout,
        rng=[],
    )


def _synchronize(parallel: Parallel) -> None:
    if parallel.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@contextlib.contextmanager
def as_it_was(way: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if way == "before":
            stack.enter_context(patch.object(save, "MOST_FILES", save.FEWEST_FILES))
            stack.enter_context(patch.object(checksums, "MOST_THREADS", 1))
        yield


def leave_to_no_collection(model: Model) -> None:
    """As training does before its optimizer is built: megatron-core asks for a full collection at each save."""
    gc.collect()
    gc.freeze()


def measure(
    way: str, trainee: OurTrainee, config: Config, folder: Path, steps: int, saves: int
) -> Iterator[Row]:
    """A row for each save, and one for reading the last."""
    saving = Saving(way, trainee, config, folder, steps)
    with as_it_was(way):
        for _ in range(3):
            saving.step()
        pinning = saving.until_pinned()
        usual = median(saving.span(saving.step) for _ in range(max(3, steps)))
        for number in range(saves):
            row = {"way": way, "save": "first" if number == 0 else "later", **saving.save_and_go_on(usual)}
            yield {**row, "pinning_s": pinning if number == 0 else None}
        saving.step()
        yield {"way": way, "save": "last", **saving.save_at_the_end(usual), "pinning_s": None}
        yield {"way": way, "read_s": saving.read()}
    saving.close()


def main(argv: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    add_model(parser, harness.ROOT / "configs" / "gsa_1.7b.yaml")
    parser.add_argument("--folder", default="runs", help="where checkpoints are written, and deleted again")
    parser.add_argument("--steps", type=int, default=8, help="behind each save")
    parser.add_argument("--saves", type=int, default=3, help="before the last one")
    arguments = parser.parse_intermixed_args(argv)
    harness.require_cuda()
    config, parallel = start_model(arguments)
    report = harness.Report("bench_save", arguments) if parallel.is_main else None
    trainee = OurTrainee(config, config.phases[-1], parallel, leave_to_no_collection)
    shared: list[Any] = [None]
    if parallel.is_main:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
        shared = [Path(tempfile.mkdtemp(prefix="bench_save_", dir=arguments.folder))]
    dist.broadcast_object_list(shared, src=0)
    try:
        for way in WAYS:
            if parallel.device.type == "cuda":
                torch._C._host_emptyCache()  # torch keeps pinned memory that it was given back
            for row in measure(way, trainee, config, shared[0] / way, arguments.steps, arguments.saves):
                if report is not None:
                    add_to(report, row)
            if parallel.is_main:
                shutil.rmtree(shared[0] / way)
    finally:
        if parallel.is_main:
            shutil.rmtree(shared[0])
    trainee.close()
    code = report.finish() if report is not None else 0
    shutdown_parallel()
    return code


def add_to(report: harness.Report, row: Row) -> None:
    report.row(**row)
    if row["way"] == "now" and row.get("save") in ("first", "later"):
        report.bar(f"{row['save']} save: stall / step", row["stall_s"] / row["step_s"], at_most=1.0)


if __name__ == "__main__":
    sys.exit(main())
