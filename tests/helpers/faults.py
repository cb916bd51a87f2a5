"""Injects faults into one rank of a training run by patching its process, without changes to `launch/pretrain.py`.

The faults are a JSON object that maps each fault's name to its arguments. Steps are numbered from 1. In the list,
"before that step" means before the step trains on its batch:

    random_tokens: [[first, last], ...]     the corpus has uniformly random tokens where these steps read it
    nan_in: [step, rank, place]             one element at a place of NAN_PLACES is NaN after the step's update, or one
                                            element of a weight's `gradient` before its reduction
    unchecked_saves: true                   saves may contain NaN, as in versions that did not check
    flipped_bit: [step, bit, rank]          a bit of one weight flips before that step, once
    wrong_gradient: [step, rank]            a bit of one element of a weight's gradient is wrong, once
    wrong_output: [step, rank]              a layer's output is doubled, once
    removed_folder: [step, folder]          before that step rank 0 removes this folder
    full_disk: [first, last]                files of rank 0 cannot grow while it trains and logs these steps
    failing_saves: [rank, [number, ...]]    files cannot grow while this rank writes these saves, counted from 0
    lost_saves: [rank, [number, ...]]       this rank cannot tell the others how these saves ended
    slow: [first, last, rank]               in these steps this rank sleeps for four times its longest step
    held: [[step, rank], ...]               before that step this rank blocks forever, once in a run's life
    frozen: [step, rank]                    before that step this rank sends itself SIGSTOP, once in a run's life
    waits_for: [step, rank, signal]         before that step this rank waits for this signal
    held_write: [step, rank]                this rank writes its files of this checkpoint, but never reports it
    write_waits_for: [rank, signal]         this rank's saves wait until it has received this signal
    saves_end: true                         a step's save ends before the next step is trained
    wrong_product: rank                     this rank gets a wrong matrix product in the health check
    all_operations: true                    a profile names all operations, instead of only the longest

If a rank blocks, the other ranks wait in a collective until the run is ended.
"""

import contextlib
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gsa_data.stream import BlockStream
from gsa_train import trainer
from gsa_train.checkpoint import save
from gsa_train.profiling import table
from gsa_train.reliability.health import products
from gsa_train.reliability.stop_signals import StopRequest

NAN_PLACES = ("weight", "unread weight", "moment", "second moment", "fp32 weight", "average")
"""A weight that all steps read, one that none reads, AdamW's state, the variance average."""

UNREAD_ID = 3
"""The byte 0, which no text contains."""

SMALL_FILE_BYTES = 1000
LONGEST_SLEEP_SECONDS = 20.0
"""Far below the limit of a hang."""


class Faults:
    def __init__(self, faults: dict[str, Any], marks: Path | None = None) -> None:
        """`marks` is a folder of the run that records faults which happen once in its life."""
        self._faults, self._marks = faults, marks
        self._rank = int(os.environ.get("RANK", "0"))
        self._done: set[str] = set()
        self._signals: set[int] = set()
        self._saves = 0
        self._longest_step_seconds = 0.0

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, other in (
                (BlockStream, "next_blocks", self._poisoned(BlockStream.next_blocks)),
                (trainer, "train_step", self._faulty(trainer.train_step)),
                (save, "write_share", self._written(save.write_share)),
                (save.CheckpointSaver, "_write_mine", self._told(save.CheckpointSaver._write_mine)),
                (StopRequest, "_note", self._noted(StopRequest._note)),
            ):
                stack.enter_context(patch.object(target, name, other))
            if "all_operations" in self._faults:
                stack.enter_context(patch.object(table, "TOP_OPERATIONS", 10_000))
            if self._faults.get("wrong_product") == self._rank:
                stack.enter_context(patch.object(products, "multiply", lambda problem: problem.expected + 1))
            if "unchecked_saves" in self._faults:
                stack.enter_context(patch.object(save, "not_finite", lambda *_: None))
            if "saves_end" in self._faults:
                saver = save.CheckpointSaver
                stack.enter_context(patch.object(saver, "begin", _waiting(saver.begin)))
            yield

    def _mine(self, name: str, step: int) -> bool:
        return bool(self._faults.get(name) == [step, self._rank])

    def _once(self, name: str) -> bool:
        """Return True for the first start that asks; the test may wait for the mark."""
        self._marks.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (self._marks / name).touch(exist_ok=False)
            return True
        return False

    # --- text ----------------------------------------------------------------------------------------------

    def _poisoned(self, next_blocks: Any) -> Any:
        def poisoned_blocks(stream: BlockStream, count: int) -> Any:
            step = stream.consumed_samples // (count * stream.world_size) + 1
            blocks = next_blocks(stream, count)
            if any(first <= step <= last for first, last in self._faults.get("random_tokens", [])):
                generator = np.random.default_rng([step, stream.rank])
                return generator.integers(3, 4096, blocks.shape, dtype=blocks.dtype)
            return blocks

        return poisoned_blocks

    # --- steps ---------------------------------------------------------------------------------------------

    def _faulty(self, train_step: Any) -> Any:
        def faulty_step(
            training: Any, micro_batches: Any, lr: float, steps_before: int, **options: Any
        ) -> Any:
            step, gpt = steps_before + 1, training.model.gpt
            self._stand_still(step)
            self._limit_disk(step)
            at, folder = self._faults.get("removed_folder", (0, ""))
            if self._rank == 0 and step == at:
                shutil.rmtree(folder)
            weight = next(p for name, p in gpt.named_parameters() if name.endswith("linear_fc2.weight"))
            self._flip_a_bit(step, weight)
            hooks = self._hooks(step, gpt, weight)
            began = time.monotonic()
            result = train_step(training, micro_batches, lr, steps_before, **options)
            self._longest_step_seconds = max(self._longest_step_seconds, time.monotonic() - began)
            for hook in hooks:
                hook.remove()
            at, rank, place = self._faults.get("nan_in", (0, 0, ""))
            if (step, self._rank) == (at, rank) and place in NAN_PLACES and self._first("nan"):
                _put_nan(place, training, weight)
            return result

        return faulty_step

    def _stand_still(self, step: int) -> None:
        if [step, self._rank] in self._faults.get("held", []) and self._once(f"held_{step}"):
            _for_ever()
        if self._mine("frozen", step) and self._once(f"frozen_{step}"):
            os.kill(os.getpid(), signal.SIGSTOP)
        at, rank, number = self._faults.get("waits_for", (0, 0, 0))
        if (step, self._rank) == (at, rank):
            self._wait_for(number)
        first, last, rank = self._faults.get("slow", (0, 0, 0))
        if first <= step <= last and rank == self._rank:
            time.sleep(min(4 * self._longest_step_seconds, LONGEST_SLEEP_SECONDS))

    def _limit_disk(self, step: int) -> None:
        first, last = self._faults.get("full_disk", (0, 0))
        if self._rank == 0 and step in (first, last + 1):
            let_files_grow_to(0 if step == first else resource.RLIM_INFINITY)

    def _flip_a_bit(self, step: int, weight: torch.nn.Parameter) -> None:
        at, bit, rank = self._faults.get("flipped_bit", (0, 0, 0))
        if (step, self._rank) == (at, rank) and self._first("bit"):
            weight.data.view(torch.int32).view(-1)[0] ^= 1 << bit

    def _hooks(self, step: int, gpt: torch.nn.Module, weight: torch.nn.Parameter) -> list[Any]:
        hooks: list[Any] = []
        if self._faults.get("nan_in") == [step, self._rank, "gradient"]:
            hooks.append(weight.register_hook(self._with_nan))
        if self._mine("wrong_gradient", step):
            hooks.append(weight.register_hook(self._with_wrong_bit))
        if self._mine("wrong_output", step):
            module = next(module for name, module in gpt.named_modules() if name.endswith("linear_fc2"))
            hooks.append(module.register_forward_hook(self._doubled))
        return hooks

    def _first(self, name: str) -> bool:
        known = name in self._done
        self._done.add(name)
        return not known

    def _with_nan(self, gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        if self._first("nan"):
            spoilt.view(-1)[0] = torch.nan
        return spoilt

    def _with_wrong_bit(self, gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        if self._first("gradient"):
            spoilt.view(-1).view(torch.int32)[0] ^= 1 << 20
        return spoilt

    def _doubled(self, module: torch.nn.Module, inputs: Any, output: tuple[Any, ...]) -> Any:
        return (2 * output[0], *output[1:]) if self._first("output") else None

    # --- saves and signals ---------------------------------------------------------------------------------

    def _written(self, write_share: Any) -> Any:
        """Run in the thread that writes."""

        def write(writer: Any, buckets: Any, others: Any, rank: int) -> Any:
            fails = self._of_save("failing_saves")
            if fails:  # this rank writes nothing else meanwhile
                let_files_grow_to(SMALL_FILE_BYTES)
            written = write_share(writer, buckets, others, rank)
            if fails:
                let_files_grow_to(resource.RLIM_INFINITY)
            step, held_rank = self._faults.get("held_write", (0, None))
            if held_rank == self._rank and any(f"step_{step:08d}/" in path for path, *_ in buckets):
                _for_ever()
            waiting_rank, number = self._faults.get("write_waits_for", (None, 0))
            if waiting_rank == self._rank:
                self._wait_for(number)
            return written

        return write

    def _told(self, write_mine: Any) -> Any:
        """Run in the thread that writes and then reports to the other ranks."""

        def write_and_tell(saver: save.CheckpointSaver, under_way: Any) -> Any:
            try:
                if self._of_save("lost_saves"):
                    raise MemoryError
                return write_mine(saver, under_way)
            finally:
                self._saves += 1

        return write_and_tell

    def _of_save(self, name: str) -> bool:
        """Return whether the current save has this fault on this rank."""
        rank, numbers = self._faults.get(name, (None, []))
        return rank == self._rank and self._saves in numbers

    def _noted(self, note: Any) -> Any:
        def noting(request: StopRequest, number: int, frame: Any) -> None:
            note(request, number, frame)
            self._signals.add(number)

        return noting

    def _wait_for(self, number: int) -> None:
        while number not in self._signals:
            time.sleep(0.01)


def _put_nan(place: str, training: Any, weight: torch.nn.Parameter) -> None:
    gpt = training.model.gpt
    if place == "weight":
        target = weight.data
    elif place == "unread weight":
        target = gpt.embedding.word_embeddings.weight.data[UNREAD_ID]
    elif place == "average":
        target = training.model.variance_trackers[0].ema
    else:
        kinds = {"moment": "exp_avg", "second moment": "exp_avg_sq", "fp32 weight": "param"}
        (target, *_) = (
            part.tensors[kinds[place]]
            for part in training.optimizer.state_parts()
            if part.parameter is weight or part.parameter.shape == weight.shape
        )
    target.view(-1)[0] = torch.nan


def _waiting(begin: Any) -> Any:
    def begin_and_wait(saver: save.CheckpointSaver, *state: Any) -> Any:
        ended = begin(saver, *state)
        if saver._save is not None and saver._save.future is not None:
            saver._save.future.exception()  # only waits
        return ended

    return begin_and_wait


def _for_ever() -> None:
    while True:
        threading.Event().wait(3600.0)


def let_files_grow_to(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
