"""Blocks of tokens for one data-parallel rank, in an order that survives any change of ranks and workers.

Global sample i is block i // num_lanes of lane i % num_lanes, and rank r of D takes the samples with
i % D == r. Each block travels with the position of its lane's next block: a cursor and, with best_fit packing, the
documents that wait in the lane's pool. The main process keeps the positions after the blocks that were handed out, so
what workers have read ahead never enters a saved state:

    ShardReader -> LaneReader -> pack or best_fit -> _RankSamples (in the workers) -> DataLoader -> BlockStream
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gsa_data.best_fit import EMPTY_POOL, Pool, best_fit
from gsa_data.corpus import Corpus, check_sources, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.lanes import ORDER_VERSION, LaneReader
from gsa_data.pack import LANE_START, Cursor, Tokens, pack
from gsa_data.reader import ShardReader
from gsa_data.source_weights import check_weights
from gsa_data.tokenize import Tokenizer

# What passes between a worker and the main process costs 0.2 ms of CPU an item and 0.3 ms for the copies of 32K tokens,
# which take 22 ms to read. So short blocks go in groups of this many tokens; long ones need not wait for each other.
TOKENS_PER_GROUP = 1 << 16

# A reader that is silent for this much longer than its longest read, with all retries, hangs.
HANG_SECONDS = 60.0


class StateMismatch(ValueError):
    """A saved position that does not fit; says what differs and what to do."""

    def __init__(self, message: str, other_data: bool = False) -> None:
        """`other_data`: the position is of other text or of another order, so a run can go on from its start."""
        super().__init__(message)
        self.other_data = other_data


@dataclass(frozen=True)
class StreamConfig:
    """What fixes the order of the blocks (the first seven fields), and how they are read."""

    seq_len_tokens: int
    """A block has seq_len_tokens + 1 tokens. May change between a save and a resume: no token is lost."""
    num_lanes: int
    """Fixed for the run; a multiple of data-parallel ranks x workers, at every number of ranks ever used.
    More lanes mix more documents into a batch. With few shards keep it small (8)."""
    seed: int
    shuffle_documents: bool = True
    """Permute the documents inside each shard (shards themselves are always permuted)."""
    source_weights: Mapping[str, float] = field(default_factory=dict)
    """How often a document of a source comes in an epoch (source_weights.py); 1 for sources without a weight. May
    change between a save and a resume: what is before the saved position stays as it was read, what is behind it
    follows the new weights."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Blocks cut from documents in a row, or filled with whole documents (best_fit.py)."""
    packing_pool_documents: int = 128
    """Documents of a lane among which best_fit chooses; each resume reads them again."""
    reading: Reading = field(default_factory=Reading)
    """What is done about bad shards and lines."""
    num_workers: int = 0
    """Reader processes per rank; 0 reads in the training process."""
    prefetch_blocks: int = 64
    """Blocks each rank reads ahead when it has workers. Let it cover the time to open a shard (about 1 s)."""

    def __post_init__(self) -> None:
        for name in ("seq_len_tokens", "num_lanes", "packing_pool_documents", "prefetch_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be 0 (read in this process) or more")
        if self.packing not in ("concatenate", "best_fit"):
            raise ValueError(f"packing={self.packing!r} must be 'concatenate' or 'best_fit'")
        check_weights(self.source_weights)


class BlockStream:
    """The endless blocks of one data-parallel rank, from the start or from a merged state.

    Raises ValueError when num_lanes does not divide among ranks and workers, StateMismatch when `state` was saved with
    another corpus, tokenizer, order or packing, and DataFault when the corpus does not know its sources or not those
    that have weights. Data faults surface from `next_blocks` as DataFault.

    Args:
        carried_counters: counters of a run that starts anew on other data, to go on with. Not beside `state`.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        config: StreamConfig,
        rank: int,
        world_size: int,
        state: dict[str, Any] | None = None,
        carried_counters: Mapping[str, int] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
        readers = world_size * max(1, config.num_workers)
        if config.num_lanes % readers:
            raise ValueError(
                f"num_lanes={config.num_lanes} must be a multiple of {readers} (data-parallel ranks "
                f"{world_size} x workers {max(1, config.num_workers)}); change num_workers, or start a new "
                f"run with num_lanes={-(-config.num_lanes // readers) * readers}"
            )
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.wait_seconds = 0.0
        reader = shard_reader(corpus, tokenizer, config.reading)
        check_sources(corpus, config.source_weights)
        self._identity: dict[str, Any] = {
            "order_version": ORDER_VERSION,
            "manifest_fingerprint": reader.manifest.fingerprint,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "num_lanes": config.num_lanes,
            "seed": config.seed,
            "shuffle_documents": config.shuffle_documents,
            "packing": config.packing,
        }
        if config.packing == "best_fit":
            self._identity["packing_pool_documents"] = config.packing_pool_documents
        self._start_samples = 0
        self._taken = 0  # blocks this rank has handed out
        self._counters: Counter[str] = Counter()
        positions = [_START] * config.num_lanes
        if state is not None:
            _check_state(state, self._identity)
            self._start_samples = state["consumed_samples"]
            pools = state.get("pools") or [[]] * config.num_lanes
            positions = [
                _Position(Cursor(*cursor), np.array(pool, np.int64).reshape(-1, EMPTY_POOL.shape[1]))
                for cursor, pool in zip(state["cursors"], pools, strict=True)
            ]
            carried_counters = state["counters"]
        if rank == 0:  # the sum over the ranks carries them on once
            self._counters.update(carried_counters or {})
            if state is None and reader.manifest.duplicates:
                self._counters["shards_duplicate"] += len(reader.manifest.duplicates)
        self._positions = {lane: positions[lane] for lane in range(rank, config.num_lanes, world_size)}
        first_sample = self._start_samples + (rank - self._start_samples) % world_size
        self._first_sample = first_sample
        self._last_blocks: Tokens | None = None
        samples = _RankSamples(reader, config, first_sample, world_size, positions)
        self._blocks: Generator[_Block, None, None] | None = _blocks_in_order(samples, config)

    def next_blocks(self, count: int) -> Tokens:
        """The rank's next `count` blocks: int32 [count, seq_len_tokens + 1], where best_fit leaves pack.FILLER."""
        if self._blocks is None:
            raise ValueError("this BlockStream is closed; build a new one from its state")
        began = time.perf_counter()
        blocks = [next(self._blocks) for _ in range(count)]
        self.wait_seconds += time.perf_counter() - began
        for block in blocks:
            self._positions[block.lane] = block.next_position
            self._counters.update(block.counters)
        self._taken += count
        self._last_blocks = np.stack([block.tokens for block in blocks])
        return self._last_blocks

    @property
    def identity(self) -> dict[str, Any]:
        """What fixes the order of the run's blocks, but for the weights of sources; the same on every rank."""
        return dict(self._identity)

    @property
    def counters(self) -> dict[str, int]:
        """What was read and left out up to the blocks handed out: this rank's share, rank 0's with what was saved."""
        return dict(self._counters)

    def checksum(self) -> int:
        """Of the blocks last handed out: the sum of each one's CRC-32, begun with the number of its global sample.

        Summed over the ranks it names the text of a step and its order, whatever the ranks and workers.
        """
        if self._last_blocks is None:
            return 0
        first = self._first_sample + (self._taken - len(self._last_blocks)) * self.world_size
        return sum(
            zlib.crc32(block.tobytes(), (first + place * self.world_size) % 2**32)
            for place, block in enumerate(self._last_blocks)
        )

    @property
    def consumed_samples(self) -> int:
        """Global samples consumed since the start of the run, when every rank has taken as many as this."""
        return self._start_samples + self._taken * self.world_size

    def local_state(self) -> dict[str, Any]:
        """This rank's share of the state; gather it from all data-parallel ranks and merge."""
        return {
            **self._identity,
            "seq_len_tokens": self.config.seq_len_tokens,
            "source_weights": dict(self.config.source_weights),
            "consumed_samples": self.consumed_samples,
            "cursors": {lane: list(position.cursor) for lane, position in self._positions.items()},
            "pools": {lane: position.pool.tolist() for lane, position in self._positions.items()},
            "counters": dict(self._counters),
        }

    def close(self) -> None:
        """Stop the workers. The state stays readable."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = None


def merge_states(local_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of plain values from the `local_state()` of every data-parallel rank.

    Keys: order_version, manifest_fingerprint, tokenizer_fingerprint, num_lanes, seed, shuffle_documents, packing,
    packing_pool_documents (of best_fit), seq_len_tokens, source_weights, consumed_samples, counters, cursors
    ([num_lanes][epoch, unit, document, token_offset, copy]), pools ([num_lanes][waiting documents][the same five]).
    Raises ValueError when ranks are missing or disagree.
    """
    of_one_rank = ("cursors", "pools", "counters")
    merged = {key: value for key, value in local_states[0].items() if key not in of_one_rank}
    cursors: dict[int, list[int]] = {}
    pools: dict[int, list[list[int]]] = {}
    counters: Counter[str] = Counter()
    for local in local_states:
        for key, value in merged.items():
            if local[key] != value:
                raise ValueError(
                    f"data state: ranks disagree on {key} ({value} and {local[key]}); save only when every "
                    "rank has taken the same number of blocks"
                )
        cursors.update(local["cursors"])
        pools.update(local["pools"])
        counters.update(local["counters"])
    if sorted(cursors) != list(range(merged["num_lanes"])):
        raise ValueError(
            f"data state: {len(cursors)} of {merged['num_lanes']} lanes present; pass the states of all ranks"
        )
    of_lanes = {
        "cursors": [cursors[lane] for lane in range(merged["num_lanes"])],
        "pools": [pools[lane] for lane in range(merged["num_lanes"])],
    }
    return {**merged, **of_lanes, "counters": dict(counters)}


def whole_epochs(state: dict[str, Any]) -> int:
    """How often every lane of a merged state has read all of its documents."""
    return int(min(cursor[0] for cursor in state["cursors"]))


def replay_blocks(corpus: Corpus, tokenizer: Tokenizer, config: StreamConfig, count: int) -> Iterator[Tokens]:
    """The first `count` global samples of a run again, as int32 [n, seq_len_tokens + 1] arrays, n <= 64."""
    stream = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
    try:
        for done in range(0, count, 64):
            yield stream.next_blocks(min(64, count - done))
    finally:
        stream.close()


def _check_state(state: dict[str, Any], identity: dict[str, Any]) -> None:
    state = {"packing": "concatenate", **state}  # the only way when states did not say it
    remedies = {
        "order_version": "resume with the version of gsa_data that saved it",
        "manifest_fingerprint": "point the data folder at the files of the saved run",
        "tokenizer_fingerprint": "use the tokenizer file of the saved run",
    }
    differences = [
        f"data state was saved with {name}={state[name]}, but this run has {name}={value}; "
        f"{remedies.get(name, f'set {name}={state[name]}')}, or start a new run"
        for name, value in identity.items()
        if name in state and state[name] != value
    ]
    if differences:
        same_tokenizer = state["tokenizer_fingerprint"] == identity["tokenizer_fingerprint"]
        raise StateMismatch("\n".join(differences), other_data=same_tokenizer)
    for lane, cursor in enumerate(state["cursors"]):
        if (Cursor(*cursor) != LANE_START) != (lane < state["consumed_samples"]):
            raise StateMismatch(
                f"data state is damaged: lane {lane} has cursor {cursor} after consumed_samples="
                f"{state['consumed_samples']}; resume from another checkpoint"
            )


class _Position(NamedTuple):
    """Of one lane: where its next block begins (concatenate), or what is read next and what waits (best_fit)."""

    cursor: Cursor
    pool: Pool


_START = _Position(LANE_START, EMPTY_POOL)


class _Block(NamedTuple):
    lane: int
    tokens: Tokens
    next_position: _Position
    counters: dict[str, int]  # what was counted between this block and the one before


class _RankSamples(IterableDataset[list[_Block]]):
    """One rank's samples. Worker w of W yields every W-th of them from the w-th on, in groups."""

    def __init__(
        self,
        reader: ShardReader,
        config: StreamConfig,
        first_sample: int,
        world_size: int,
        positions: list[_Position],
    ) -> None:
        self.reader = reader
        self.config = config
        self.first_sample = first_sample
        self.world_size = world_size
        self.positions = positions

    def __iter__(self) -> Iterator[list[_Block]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        config = self.config
        reader = LaneReader(
            self.reader, config.num_lanes, config.seed, config.shuffle_documents, config.source_weights
        )
        lanes: dict[int, Iterator[tuple[Tokens, _Position]]] = {}
        sample = self.first_sample + worker_id * self.world_size
        group_blocks = _group_blocks(config)
        while True:
            group = []
            for _ in range(group_blocks):
                lane = sample % config.num_lanes
                if lane not in lanes:
                    number = sample // config.num_lanes
                    lanes[lane] = _lane_blocks(reader, lane, self.positions[lane], number, config)
                tokens, position = next(lanes[lane])
                group.append(_Block(lane, tokens, position, reader.take_counters()))
                sample += self.world_size * num_workers
            yield group


def _lane_blocks(
    reader: LaneReader, lane: int, start: _Position, number: int, config: StreamConfig
) -> Iterator[tuple[Tokens, _Position]]:
    """The blocks of one lane from its `number`-th on, each with the position after it."""
    if config.packing == "concatenate":
        for tokens, cursor in pack(reader.pieces(lane, start.cursor), config.seq_len_tokens):
            yield tokens, _Position(cursor, EMPTY_POOL)
        return
    documents = reader.pieces(lane, start.cursor, begun=False)
    waiting = reader.read_again(lane, (Cursor(*row) for row in start.pool.tolist()))
    length, pool = config.seq_len_tokens, config.packing_pool_documents
    for block in best_fit(documents, start.cursor, waiting, number, length, pool):
        reader.counters.update(block.counters)
        yield block.tokens, _Position(block.next_cursor, block.pool)


def _group_blocks(config: StreamConfig) -> int:
    if config.num_workers == 0:
        return 1  # nothing is read before it is asked for
    return max(
        1, min(TOKENS_PER_GROUP // config.seq_len_tokens, config.prefetch_blocks // config.num_workers)
    )


def _blocks_in_order(samples: _RankSamples, config: StreamConfig) -> Generator[_Block, None, None]:
    """Undo the dealing to the workers: the DataLoader returns one group of each worker in turn."""
    workers = config.num_workers
    if workers == 0:  # a DataLoader would take as long as all the rest of a block that is not tokenized
        for group in samples:
            yield from group
    group_blocks = _group_blocks(config)
    groups: Any = iter(
        DataLoader(
            samples,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=max(1, config.prefetch_blocks // (workers * group_blocks)),
            timeout=config.reading.longest_wait_seconds + HANG_SECONDS,
            collate_fn=_as_is,
            worker_init_fn=partial(_obey_only, os.getpid()),
            generator=torch.Generator(),  # else it draws from, and so shifts, the training process's RNG
        )
    )
    while True:
        round_of_groups = [_next_group(groups) for _ in range(workers)]
        for row in zip(*round_of_groups, strict=True):
            yield from row


def _next_group(groups: Any) -> list[_Block]:
    """One group; DataFault when a reader found a fault, died or hangs."""
    try:
        group: list[_Block] = next(groups)
    except DataFault as error:  # from a worker with a stack of calls around its message
        raise DataFault(str(error).rpartition(f"{DataFault.__name__}: ")[2].strip()) from error
    except RuntimeError as error:
        if not str(error).startswith("DataLoader "):
            raise
        for worker in groups._workers:  # one that hangs would keep this process from ending
            with contextlib.suppress(
                RuntimeError
            ):  # torch raises for a reader's death wherever that finds us
                worker.kill()
                worker.join(5)
        raise DataFault(
            f"a data reader died or hangs ({error}); look for a process killed for want of memory and for a file "
            "system that does not answer, then resume from the last checkpoint"
        ) from error
    return group


def _obey_only(trainer: int, _worker_id: int) -> None:
    """Torchrun and Slurm send SIGTERM to readers, too, while the training process still needs text to stop well.

    Only the SIGTERM of that process ends a reader; torch ends one whose training process is gone. By its id: with a
    fork server it is not the reader's parent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _as_is(group: list[_Block]) -> list[_Block]:
    """Keep numpy arrays: tensors would travel through /dev/shm, which containers keep small."""
    return group
