"""Compute the batch size of a step from `train.batch_ramp` and the step number alone, so that a resumed run repeats it.

Steps count from 0 at the start of the run. Steps of `train.iterations_to_skip` count, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gsa_train.config.sections import Config
    from gsa_train.config.train import TrainConfig


def _stages(train: TrainConfig) -> Iterator[tuple[int, int, int]]:
    """For each stage, yield the index of its first step, the number of sequences in all earlier steps, and the number
    of sequences per step. A stage ends with the step that reaches the stage's `until_tokens`."""
    step = sequences = 0
    for stage in train.batch_ramp:
        yield step, sequences, stage.global_batch_size
        left = max(0, stage.until_tokens - sequences * train.seq_len_tokens)
        steps = -(-left // (stage.global_batch_size * train.seq_len_tokens))
        step, sequences = step + steps, sequences + steps * stage.global_batch_size
    yield step, sequences, train.global_batch_size


def batch_size(train: TrainConfig, step: int) -> int:
    """Return the sequences of the step that follows `step` steps."""
    return [size for first, _, size in _stages(train) if first <= step][-1]


def sequences_before(train: TrainConfig, step: int) -> int:
    """Return the sequences of the first `step` steps."""
    first, before, size = [stage for stage in _stages(train) if stage[0] <= step][-1]
    return before + (step - first) * size


def tokens_before(train: TrainConfig, step: int) -> int:
    return sequences_before(train, step) * train.seq_len_tokens


def tokens_of_phases(config: Config) -> list[int]:
    """Return the tokens that each phase trains on."""
    ends, step = [0], 0
    for phase in config.phases:
        step += phase.steps
        ends.append(tokens_before(config.train, step))
    return [end - start for start, end in pairwise(ends)]


def batch_in_words(train: TrainConfig) -> str:
    """Return `64`, or `16 up to 1,000,000 tokens, then 64`."""
    stages = [f"{stage.global_batch_size} up to {stage.until_tokens:,} tokens" for stage in train.batch_ramp]
    return ", ".join([*stages, f"then {train.global_batch_size}" if stages else str(train.global_batch_size)])


def check_batch_ramp(config: Config) -> Iterator[str]:
    before, last = 0, config.train.global_batch_size
    for index, stage in enumerate(config.train.batch_ramp):
        field = f"train.batch_ramp.{index}"
        if stage.until_tokens <= before:
            wrong = f"not above {before}, where the stage begins"
            remedy = "give the tokens since the start of the run, rising from stage to stage"
            yield config.problem(f"{field}.until_tokens", wrong, remedy)
        if stage.global_batch_size > last:
            wrong = f"above train.global_batch_size = {last}, the batch after the ramp"
            yield config.problem(f"{field}.global_batch_size", wrong, "give at most that")
        before = stage.until_tokens
