"""Make the blocks of one data-parallel rank, in the training process or in separate readers (see stream.py)."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gsa_data.best_fit import EMPTY_POOL, Pool, best_fit
from gsa_data.faults import DataFault
from gsa_data.lanes import LaneReader
from gsa_data.pack import LANE_START, Cursor, Tokens, pack
from gsa_data.reader import ShardReader
from gsa_data.stream_config import StreamConfig

# Passing an item from a worker to the main process has a fixed cost, so short blocks are sent in groups of about this
# number of tokens.
TOKENS_PER_GROUP = 1 << 16

# A reader counts as hanging if it sends nothing for the longest time of a read (with all retries) plus this time.
HANG_SECONDS = 60.0

# The interval at which a reader checks that its training process exists.
LOOK_SECONDS = 5.0


class Position(NamedTuple):
    """Holds where a lane's next block begins (concatenate), or the next document and the pool (best_fit)."""

    cursor: Cursor
    pool: Pool


START = Position(LANE_START, EMPTY_POOL)


class Block(NamedTuple):
    sample: int  # global number over all ranks
    tokens: Tokens
    next_position: Position
    counters: dict[str, int]  # counts between the previous block and this one


def last_sample(lane: int, consumed_samples: int, num_lanes: int) -> int:
    """Returns the lane's last consumed global sample, or a negative number if there is none."""
    return consumed_samples - 1 - (consumed_samples - 1 - lane) % num_lanes


class RankSamples(IterableDataset[list[Block]]):
    """Yields the samples of one rank. Worker w of W yields every W-th sample, starting at w, in groups.

    If num_lanes (the number of token streams) is not a multiple of ranks x workers, several workers share a lane. Each
    of them makes all blocks of the lane, because a block starts where the previous block ended. A worker drops the
    blocks of other workers and does not count them, so every block is returned once and counted once.
    """

    def __init__(
        self,
        reader: ShardReader,
        config: StreamConfig,
        consumed_samples: int,
        rank: int,
        world_size: int,
        positions: list[Position],
    ) -> None:
        """`positions` has the position of each lane after `consumed_samples` global samples."""
        self.reader = reader
        self.config = config
        self.consumed_samples = consumed_samples
        self.first_sample = consumed_samples + (rank - consumed_samples) % world_size
        self.world_size = world_size
        self.positions = positions

    def __iter__(self) -> Iterator[list[Block]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        config = self.config
        reader = LaneReader(self.reader, config)
        lanes: dict[int, Iterator[tuple[Tokens, Position]]] = {}
        next_samples: dict[int, int] = {}  # lane -> the sample that its iterator yields next
        sample = self.first_sample + worker_id * self.world_size
        group_blocks = group_blocks_of(config)
        while True:
            group = []
            for _ in range(group_blocks):
                lane = sample % config.num_lanes
                if lane not in lanes:
                    next_samples[lane] = (
                        last_sample(lane, self.consumed_samples, config.num_lanes) + config.num_lanes
                    )
                    number = next_samples[lane] // config.num_lanes
                    lanes[lane] = _lane_blocks(reader, lane, self.positions[lane], number, config)
                for _ in range(next_samples[lane], sample, config.num_lanes):
                    next(lanes[lane])
                    reader.take_counters()
                tokens, position = next(lanes[lane])
                next_samples[lane] = sample + config.num_lanes
                group.append(Block(sample, tokens, position, reader.take_counters()))
                sample += self.world_size * num_workers
            yield group


def _lane_blocks(
    reader: LaneReader, lane: int, start: Position, number: int, config: StreamConfig
) -> Iterator[tuple[Tokens, Position]]:
    """Yields the blocks of one lane from block `number` on, each with the position after the block."""
    if config.packing == "concatenate":
        for tokens, cursor in pack(reader.pieces(lane, start.cursor), config.seq_len_tokens):
            yield tokens, Position(cursor, EMPTY_POOL)
        return
    documents = reader.pieces(lane, start.cursor, begun=False)
    waiting = reader.read_again(lane, (Cursor(*row) for row in start.pool.tolist()))
    length, pool = config.seq_len_tokens, config.packing_pool_documents
    for block in best_fit(documents, start.cursor, waiting, number, length, pool):
        reader.counters.update(block.counters)
        yield block.tokens, Position(block.next_cursor, block.pool)


def group_blocks_of(config: StreamConfig) -> int:
    if config.num_workers == 0:
        return 1  # there is no prefetch
    return max(
        1, min(TOKENS_PER_GROUP // config.seq_len_tokens, config.prefetch_blocks // config.num_workers)
    )


def blocks_in_order(samples: RankSamples, config: StreamConfig) -> Generator[Block, None, None]:
    """Yields the rank's blocks in the order of their numbers. Workers start immediately and fill their queues."""
    if config.num_workers == 0:  # a DataLoader would cost as much time as a block of prepared tokens
        return (block for group in samples for block in group)
    return _undo_dealing(_start_workers(samples, config), config.num_workers)


def _start_workers(samples: RankSamples, config: StreamConfig) -> Any:
    workers = config.num_workers
    group_blocks = group_blocks_of(config)
    loader = DataLoader(
        samples,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=max(1, config.prefetch_blocks // (workers * group_blocks)),
        timeout=config.reading.longest_wait_seconds + HANG_SECONDS,
        collate_fn=_as_is,
        worker_init_fn=partial(_obey_only, os.getpid()),
        generator=torch.Generator(),  # otherwise the DataLoader draws from the training process's RNG
    )
    try:
        multiprocessing.Lock()  # test /dev/shm first, because torch prints a traceback if its lock fails
        return iter(loader)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        remedy = "make room in /dev/shm (a container's: --shm-size=1g)" if full else "look at `ulimit -a`"
        raise DataFault(
            f"data readers cannot be started ({error}); {remedy}, or set data.num_workers=0"
        ) from error


def _undo_dealing(groups: Any, workers: int) -> Generator[Block, None, None]:
    """Restore the order of blocks, because the DataLoader returns one group of each worker in turn."""
    while True:
        round_of_groups = [_next_group(groups) for _ in range(workers)]
        for row in zip(*round_of_groups, strict=True):
            yield from row


def _next_group(groups: Any) -> list[Block]:
    """Returns the next group. Raises DataFault if a reader found a fault, died or hangs."""
    try:
        group: list[Block] = next(groups)
    except DataFault as error:  # a worker's message has a traceback around it
        message = str(error).rpartition(f"{DataFault.__name__}: ")[2].strip()
        # Drop torch's frames, because one of them refers to the error. Only the garbage collector would free this
        # cycle. It would close the readers' queues too early, and torch would then wait 5 s for the readers.
        raise DataFault(message) from error.with_traceback(None)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader "):
            raise
        for worker in groups._workers:  # a hanging worker would keep this process from ending
            with contextlib.suppress(RuntimeError):  # torch raises at any place when a reader dies
                worker.kill()
                worker.join(5)
        raise DataFault(
            f"a data reader died or hangs ({error}); look for a process killed for want of memory and for a file "
            "system that does not answer, then resume from the last checkpoint"
        ) from error
    return group


def _obey_only(trainer: int, _worker_id: int) -> None:
    """End this reader only when the training process `trainer` sends SIGTERM or no longer exists.

    torchrun and Slurm send SIGTERM to readers too, but training needs the readers until it has stopped cleanly. A
    thread of the reader therefore ignores SIGTERM from other processes. The same thread checks whether the process
    `trainer` exists. The reader's parent is not checked, because with a fork server the parent is another process.

    When the parent is gone, torch ends only the reader's loop. Without this function, a reader whose output pipe is
    full would hang.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while (got := signal.sigtimedwait([signal.SIGTERM], LOOK_SECONDS)) is None or got.si_pid != trainer:
            try:
                os.kill(trainer, 0)  # only checks that the process exists
            except ProcessLookupError:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _as_is(group: list[Block]) -> list[Block]:
    """Keep numpy arrays, because tensors would travel through /dev/shm, which is small in containers."""
    return group
