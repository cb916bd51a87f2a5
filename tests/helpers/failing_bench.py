"""Runs benchmarks/bench_training.py on devices that run out of memory: FAILURES is JSON of [variant, rank, step]."""

import json
import os
import runpy
from typing import Any

import torch

from helpers.runs import REPOSITORY
from whole_steps import failures, step_bench

PLAN = [tuple(each) for each in json.loads(os.environ["FAILURES"])]
BUILT = 0


class FailingTrainee(step_bench.OurTrainee):
    def __init__(self, *arguments: Any) -> None:
        global BUILT
        self.number, BUILT = BUILT, BUILT + 1
        self.done = 0
        super().__init__(*arguments)

    def step(self, batches: list[Any]) -> None:
        if (self.number, self.parallel.rank, self.done) in PLAN:
            alone = len([each for each in PLAN if each[0] == self.number]) < self.parallel.world_size
            failures.GRACE_SECONDS = 0.5 if alone else 300.0  # waits for no rank, or for a slow machine
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore about it.")
        self.done += 1
        super().step(batches)


step_bench.OurTrainee = FailingTrainee  # type: ignore[misc]
runpy.run_path(str(REPOSITORY / "benchmarks" / "bench_training.py"), run_name="__main__")
