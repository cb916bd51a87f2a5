"""What equal bits cost in a step of a whole model, and whether they are equal: on one device, or under torchrun.

    python benchmarks/bench_determinism.py [--config FILE] [--sequences 8] [key=value ...]         # the table of prices
    python benchmarks/bench_determinism.py --replays 1000 [...]                                     # and the replays

The table has a row for each way, in turns with the step as it is; `price` is what the step takes longer than that way,
with its standard error over the rounds. The last two show what others' own switches would cost on top:

    as it is               fixed orders of sums everywhere (docs/reference/determinism.md)
    sums by key left out   key lists only: the ordered reduction of partial gradients by key is not done at all, so that
                           nothing less ordered can save more. Its gradients are wrong, and only timed
    embedding by index     megatron-core's `deterministic_mode` of the embedding, instead of torch's sorted sums
    torch's switch         torch.use_deterministic_algorithms(True)

Another attention is another config: gsa.dense_attention=cudnn adds with atomics (standard models and dense phases).
Bar: no way saves more than 5%.

A replay takes the step's forward and backward passes again, on the same text with the same weights and averages, and
compares hashes of the loss and of every gradient, behind their reduction. Exit code 1 where one differs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import mean, median, stdev
from typing import Any
from unittest.mock import patch

import harness
import torch

from gsa_kernels.attention import triton_gathered_backward
from gsa_kernels.indexer_loss import triton_gathered_launch
from gsa_train.distributed.parallel import shutdown_parallel
from whole_steps.step_bench import OurTrainee, add_model, over_ranks, random_batches, start_model, time_steps

BY_KEY = (triton_gathered_backward, triton_gathered_launch)
"""Modules that add partial gradients by key."""
PART_WORDS = 1 << 24
"""Of a tensor that is hashed: a gradient takes 16 bytes a word meanwhile."""


@contextlib.contextmanager
def sums_by_key_left_out(trainee: OurTrainee) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in BY_KEY:
            stack.enter_context(patch.object(module, "add_partials_by_key", lambda *_: None))
            stack.enter_context(patch.object(module, "find_key_hits", lambda *_: None))
        yield


@contextlib.contextmanager
def embedding_by_index(trainee: OurTrainee) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for chunk in trainee.model.chunks:
            for module in chunk.modules():
                if hasattr(module, "deterministic_mode"):
                    stack.enter_context(patch.object(module, "deterministic_mode", True))
        yield


@contextlib.contextmanager
def torchs_switch(trainee: OurTrainee) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


WAYS: dict[str, Callable[[OurTrainee], AbstractContextManager[None]]] = {
    "as it is": lambda trainee: nullcontext(),
    "sums by key left out": sums_by_key_left_out,
    "embedding by index": embedding_by_index,
    "torch's switch": torchs_switch,
}


def prices(
    trainee: OurTrainee, batches: list[Any], steps: int, rounds: int
) -> Iterator[dict[str, harness.Cell]]:
    """A row for each way, after a step of each to compile."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            with way(trainee):
                taken = time_steps(lambda: trainee.step(batches), steps, trainee.parallel.device)
            if number:
                slowest = max(each[0] for each in over_ranks([median(taken)], trainee.parallel))
                times[name].append(slowest)
    usual = times["as it is"]
    for name, own in times.items():
        ratios = [a / b - 1 for a, b in zip(usual, own, strict=True)]
        error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        yield {"way": name, "step_ms": 1e3 * median(own), "price": mean(ratios), "error": error}


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """0-d int64 that any changed bit changes, and that no order of sums does: integers wrap around."""
    sums = []
    for number, part in enumerate(tensor.detach().contiguous().view(-1).view(torch.int16).split(PART_WORDS)):
        places = torch.arange(len(part), device=part.device) + number * PART_WORDS
        sums.append((part.long() * (2 * places + 1)).sum())
    return torch.stack(sums).sum()


class Replays:
    """Of one step of a model, whose weights and averages stay as they are."""

    def __init__(self, trainee: OurTrainee, batches: list[Any]) -> None:
        trainee.lr = 0.0
        self._trainee, self._batches = trainee, batches
        self._kept = [(each, each.clone()) for chunk in trainee.model.chunks for each in chunk.buffers()]
        self._gradients: list[torch.Tensor] = []

    def hashes(self) -> torch.Tensor:
        """int64: of the loss, and of every gradient of this rank."""
        for buffer, kept in self._kept:
            buffer.copy_(kept)
        self._trainee.step(self._batches, hold_update=self._hash_gradients)
        return torch.stack([hash_of(self._trainee.result.loss_sum.float()), *self._gradients])

    def _hash_gradients(self) -> None:
        parameters = [each for chunk in self._trainee.model.chunks for each in chunk.parameters()]
        self._gradients = [hash_of(each.main_grad) for each in parameters if each.requires_grad]


def count_different(trainee: OurTrainee, batches: list[Any], count: int) -> int:
    """Replays of which a hash is not the first one's, on any rank."""
    replays = Replays(trainee, batches)
    first = replays.hashes()
    differ = torch.zeros((), dtype=torch.float64, device=first.device)
    for _ in range(count):
        differ += (replays.hashes() != first).any()
    return int(max(each[0] for each in over_ranks([float(differ)], trainee.parallel)))


def main(argv: list[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    add_model(parser, harness.ROOT / "configs" / "gsa_1.7b.yaml")
    parser.add_argument("--steps", type=int, default=4, help="of a way in a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--replays", type=int, default=0, metavar="N")
    arguments = parser.parse_intermixed_args(argv)
    harness.require_cuda()
    config, parallel = start_model(arguments)
    report = harness.Report("bench_determinism", arguments) if parallel.is_main else None
    trainee = OurTrainee(config, config.phases[-1], parallel)
    batches = random_batches(config, parallel)
    for row in prices(trainee, batches, arguments.steps, arguments.rounds):
        if report is not None:
            report.row(**row)
            if row["way"] == "sums by key left out":
                report.bar(
                    "price of sums in a fixed order, at most", float(row["price"] or 0.0), at_most=0.05
                )
    if arguments.replays:
        different = count_different(trainee, batches, arguments.replays)
        if report is not None:
            report.row(replays=arguments.replays, different=different)
            if different:
                report.fail(f"{different} of {arguments.replays} replays differ")
    trainee.close()
    code = report.finish() if report is not None else 0
    shutdown_parallel()
    return code


if __name__ == "__main__":
    sys.exit(main())
