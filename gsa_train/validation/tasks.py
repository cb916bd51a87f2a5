"""Compute log-likelihoods of continuations for tasks between training steps, with the training model's forward pass.

Requests are packed into sequences of the training length. Each request is a document that sees no other document. As in
validation, data-parallel replicas share the sequences, and every rank takes part. The scores do not depend on the
number of ranks. The training state does not change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gsa_data.marks import INSIDE
from gsa_data.pack import FILLER
from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config
from gsa_train.config.batch_ramp import sequences_before
from gsa_train.data.batches import MicroBatch, check_same, gather_outcomes, to_micro_batch
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.step import owners_losses
from gsa_train.validation.loop_tasks import PreparedTask, TaskError, prepare_tasks
from gsa_train.validation.perplexity import ROUND_MICRO_BATCHES, schedule_group
from gsa_train.validation.requests import Request

NOBODY = -1
FORWARD_SHARE = 1 / 3
"""Assumed share of the forward pass in a step's time, until tasks are timed: the backward pass takes about twice as
long."""
COMPILATION_SECONDS = 10.0
"""Assumed time to compile kernels at the first scoring on a GPU: tasks need other kernels than training if training
attends across documents."""


def shared_tasks(config: Config, tokenizer: Tokenizer, parallel: Parallel) -> list[PreparedTask]:
    """Prepare `evaluate.tasks` on every rank. Collective.

    Raises, on every rank:
        TaskError: some rank cannot read or score the tasks.
        DataFault: ranks have different requests.
    """
    tasks: list[PreparedTask] = []
    outcome: TaskError | dict[str, str]
    evaluate, length = config.evaluate, config.train.seq_len_tokens
    try:
        tasks = prepare_tasks(evaluate.tasks, tokenizer, length, evaluate.tasks_max_questions)
        outcome = {f"requests of {task.name}": _fingerprint(task) for task in tasks}
    except TaskError as error:
        outcome = error
    check_same(gather_outcomes(outcome, parallel), "evaluate.tasks")
    return tasks


def _fingerprint(task: PreparedTask) -> str:
    digest = hashlib.sha256()
    for tokens, scored in task.requests:
        digest.update(np.array([len(tokens), scored]).tobytes())
        digest.update(tokens.tobytes())
    return digest.hexdigest()


def score_tasks(
    model: Model,
    tasks: Sequence[PreparedTask],
    eos_id: int,
    config: Config,
    parallel: Parallel,
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Returns a dict `eval_<score>` -> task -> value, the same on every rank. Collective.

    Args:
        before_each: called on every rank before each part of at most `ROUND_MICRO_BATCHES`; may raise to end it.
    """
    record: dict[str, dict[str, float]] = {}
    for task in tasks:
        found = log_likelihoods(model, task.requests, eos_id, config, parallel, before_each)
        for score, value in task.scores(found).items():
            record.setdefault(f"eval_{score}", {})[task.name] = value
    return record


def log_likelihoods(
    model: Model,
    requests: Sequence[Request],
    eos_id: int,
    config: Config,
    parallel: Parallel,
    before_each: Callable[[], None] = lambda: None,
) -> list[float]:
    """Returns the nats of each request's continuation, on every rank. Collective."""
    group = schedule_group(config, parallel)
    most = max(ROUND_MICRO_BATCHES // group, 1) * group
    losses = torch.zeros(len(requests), dtype=torch.float64, device=parallel.device)
    packed = pack_requests(requests, eos_id, config.train.seq_len_tokens)
    batches = _deal(packed, eos_id, config, parallel)
    for first in range(0, len(batches), most):
        before_each()
        losses += owners_losses(model, batches[first : first + most], len(requests), config, parallel)
    dist.all_reduce(losses)
    return (-losses).tolist()


@dataclass(frozen=True)
class PackedRequests:
    """Requests in sequences of the training length L."""

    blocks: NDArray[np.int32]
    """[n, L + 1]"""
    owners: NDArray[np.int64]
    """[n, L], for each label the number of the request to whose continuation the label belongs, or NOBODY"""


def pack_requests(requests: Sequence[Request], eos_id: int, seq_len_tokens: int) -> PackedRequests:
    """Pack requests into sequences, the longest request first. An EOS follows each request (if the sequence has room),
    so that the next request is another document."""
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    blocks: list[NDArray[np.int32]] = []
    owners: list[NDArray[np.int64]] = []
    start = seq_len_tokens + 1
    for number in order:
        tokens, scored = requests[number]
        if start + len(tokens) > seq_len_tokens + 1:
            blocks.append(np.full(seq_len_tokens + 1, FILLER, np.int32))
            owners.append(np.full(seq_len_tokens, NOBODY))
            start = 0
        end = start + len(tokens)
        blocks[-1][start:end] = np.where(tokens == eos_id, tokens | INSIDE, tokens)  # it ends no document
        owners[-1][end - 1 - scored : end - 1] = number
        blocks[-1][end : end + 1] = eos_id
        start = end + 1
    return PackedRequests(np.stack(blocks), np.stack(owners))


def _deal(
    packed: PackedRequests, eos_id: int, config: Config, parallel: Parallel
) -> list[tuple[MicroBatch, torch.Tensor]]:
    """Returns this replica's micro-batches, and for each label the request that owns the label. Padding, owned by
    NOBODY, gives all replicas the same number of micro-batches, all of the training size."""
    size, length = config.train.micro_batch_size, packed.owners.shape[1]
    missing = -len(packed.blocks) % (size * parallel.data_size * schedule_group(config, parallel))
    blocks = np.concatenate([packed.blocks, np.repeat(packed.blocks[:1], missing, axis=0)])
    owners = np.concatenate([packed.owners, np.full((missing, length), NOBODY)])
    mine = slice(parallel.data_rank, None, parallel.data_size)
    return [
        (to_micro_batch(part, eos_id, attend_across_documents=False), numbers)
        for part, numbers in zip(
            torch.from_numpy(blocks[mine]).to(parallel.device).split(size),
            torch.from_numpy(owners[mine]).to(parallel.device).split(size),
            strict=True,
        )
    ]


@dataclass
class TaskClock:
    """Measures the time spent on tasks in the run, over all starts. Checkpoints save it."""

    train_seconds: float = 0.0
    """Time of logged steps, without validation, tasks and saves."""
    train_steps: int = 0
    task_seconds: float = 0.0
    newest_seconds: float = 0.0
    """Time of the last scoring of all tasks; 0: never."""

    def of_main_rank(self, device: torch.device) -> TaskClock:
        """Returns the main rank's clock, for a checkpoint: ranks measure slightly different times. Collective."""
        values = torch.tensor(astuple(self), dtype=torch.float64, device=device)
        dist.broadcast(values, src=0)
        train_seconds, train_steps, *of_tasks = values.tolist()
        return TaskClock(train_seconds, int(train_steps), *of_tasks)

    def expected_seconds(self, tasks: Sequence[PreparedTask], config: Config, parallel: Parallel) -> float:
        """Returns the expected seconds to score all tasks, from the last scoring or else from the time of
        training steps. Before any training step the result is inf."""
        if self.newest_seconds:
            return self.newest_seconds
        if not self.train_steps:
            return math.inf
        length, train = config.train.seq_len_tokens, config.train
        tokens = sum(len(request.tokens) + 1 for task in tasks for request in task.requests)
        sequence_seconds = self.train_seconds / sequences_before(train, self.train_steps)
        compilation_seconds = COMPILATION_SECONDS if parallel.device.type == "cuda" else 0.0
        return compilation_seconds + FORWARD_SHARE * sequence_seconds * tokens / length

    def has_room(self, expected_seconds: float, max_percent: float) -> bool:
        """Whether tasks stay within their share of the total time of steps and tasks. At 100 they always do."""
        if max_percent >= 100:
            return True
        room_seconds = self.train_seconds * max_percent / (100 - max_percent)
        return self.task_seconds + expected_seconds <= room_seconds
