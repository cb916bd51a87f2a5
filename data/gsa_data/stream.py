"""Blocks of tokens for one data-parallel rank, in an order that survives any change of ranks and workers.

Global sample i is block i // num_lanes of lane i % num_lanes, and rank r of D takes the samples with
i % D == r. Each block travels with the cursor of its lane's next block. The main process keeps the cursors of
the blocks that were handed out, so what workers have read ahead never enters a saved state:

    shards -> LaneReader -> pack -> _RankSamples (in the workers) -> DataLoader -> BlockStream (the state)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gsa_data.documents import Document, parse_lines
from gsa_data.lanes import ORDER_VERSION, LaneReader
from gsa_data.pack import LANE_START, Cursor, Tokens, pack
from gsa_data.shards import DataFault, Manifest, OnBadShard, read_lines
from gsa_data.tokenize import Tokenizer

# What passes between a worker and the main process costs about 0.8 ms an item, so blocks go in groups.
BLOCKS_PER_GROUP = 8


@dataclass(frozen=True)
class StreamConfig:
    """What fixes the order of the blocks (the first four fields), and how they are read."""

    seq_len_tokens: int
    """A block has seq_len_tokens + 1 tokens. May change between a save and a resume: no token is lost."""
    num_lanes: int
    """Fixed for the run; a multiple of data-parallel ranks x workers, at every number of ranks ever used.
    More lanes mix more documents into a batch. With few shards keep it small (8)."""
    seed: int
    shuffle_documents: bool = True
    """Permute the documents inside each shard (shards themselves are always permuted)."""
    on_bad_shard: OnBadShard = "fail"
    """A missing, unreadable or damaged shard stops the run ("fail") or is left out and counted ("skip")."""
    max_bad_line_fraction: float = 0.01
    """Bad lines are left out and counted; a shard with more than this share of them stops the run."""
    num_workers: int = 0
    """Reader processes per rank; 0 reads in the training process."""
    prefetch_blocks: int = 64
    """Blocks each rank reads ahead when it has workers. Let it cover the time to open a shard (about 1 s)."""

    def __post_init__(self) -> None:
        for field in ("seq_len_tokens", "num_lanes", "prefetch_blocks"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be 0 (read in this process) or more")
        if self.on_bad_shard not in ("fail", "skip"):
            raise ValueError(f"on_bad_shard={self.on_bad_shard!r} must be 'fail' or 'skip'")
        if not 0.0 <= self.max_bad_line_fraction <= 1.0:
            raise ValueError(f"max_bad_line_fraction={self.max_bad_line_fraction} must be between 0 and 1")


class BlockStream:
    """The endless blocks of one data-parallel rank, from the start or from a merged state.

    Raises ValueError when num_lanes does not divide among ranks and workers, or when `state` was saved with
    another corpus, tokenizer or order. Data faults surface from `next_blocks` as DataFault.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        config: StreamConfig,
        rank: int,
        world_size: int,
        state: dict[str, Any] | None = None,
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
        self._identity: dict[str, Any] = {
            "order_version": ORDER_VERSION,
            "manifest_fingerprint": manifest.fingerprint,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "num_lanes": config.num_lanes,
            "seed": config.seed,
            "shuffle_documents": config.shuffle_documents,
        }
        self._start_samples = 0
        self._taken = 0  # blocks this rank has handed out
        self._counters: Counter[str] = Counter()
        cursors = [LANE_START] * config.num_lanes
        if state is not None:
            _check_state(state, self._identity)
            self._start_samples = state["consumed_samples"]
            cursors = [Cursor(*cursor) for cursor in state["cursors"]]
            if rank == 0:  # the sum over the ranks carries them on once
                self._counters.update(state["counters"])
        self._cursors = {lane: cursors[lane] for lane in range(rank, config.num_lanes, world_size)}
        first_sample = self._start_samples + (rank - self._start_samples) % world_size
        samples = _RankSamples(manifest, tokenizer, config, first_sample, world_size, cursors)
        self._blocks: Generator[_Block, None, None] | None = _blocks_in_order(samples, config)

    def next_blocks(self, count: int) -> Tokens:
        """The rank's next `count` blocks: int32 [count, seq_len_tokens + 1]."""
        if self._blocks is None:
            raise ValueError("this BlockStream is closed; build a new one from its state")
        began = time.perf_counter()
        blocks = [next(self._blocks) for _ in range(count)]
        self.wait_seconds += time.perf_counter() - began
        for block in blocks:
            self._cursors[block.lane] = block.next_cursor
            self._counters.update(block.counters)
        self._taken += count
        return np.stack([block.tokens for block in blocks])

    @property
    def consumed_samples(self) -> int:
        """Global samples consumed since the start of the run, when every rank has taken as many as this."""
        return self._start_samples + self._taken * self.world_size

    def local_state(self) -> dict[str, Any]:
        """This rank's share of the state; gather it from all data-parallel ranks and merge."""
        return {
            **self._identity,
            "seq_len_tokens": self.config.seq_len_tokens,
            "consumed_samples": self.consumed_samples,
            "cursors": {lane: list(cursor) for lane, cursor in self._cursors.items()},
            "counters": dict(self._counters),
        }

    def close(self) -> None:
        """Stop the workers. The state stays readable."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = None


def merge_states(local_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of plain values from the `local_state()` of every data-parallel rank.

    Keys: order_version, manifest_fingerprint, tokenizer_fingerprint, num_lanes, seed, shuffle_documents,
    seq_len_tokens, consumed_samples, cursors ([num_lanes][epoch, unit, document, token_offset]), counters.
    Raises ValueError when ranks are missing or disagree.
    """
    merged = {key: value for key, value in local_states[0].items() if key not in ("cursors", "counters")}
    cursors: dict[int, list[int]] = {}
    counters: Counter[str] = Counter()
    for local in local_states:
        for key, value in merged.items():
            if local[key] != value:
                raise ValueError(
                    f"data state: ranks disagree on {key} ({value} and {local[key]}); save only when every "
                    "rank has taken the same number of blocks"
                )
        cursors.update(local["cursors"])
        counters.update(local["counters"])
    if sorted(cursors) != list(range(merged["num_lanes"])):
        raise ValueError(
            f"data state: {len(cursors)} of {merged['num_lanes']} lanes present; pass the states of all ranks"
        )
    cursor_list = [cursors[lane] for lane in range(merged["num_lanes"])]
    return {**merged, "cursors": cursor_list, "counters": dict(counters)}


def replay_blocks(
    manifest: Manifest, tokenizer: Tokenizer, config: StreamConfig, count: int
) -> Iterator[Tokens]:
    """The first `count` global samples of a run again, as int32 [n, seq_len_tokens + 1] arrays, n <= 64."""
    stream = BlockStream(manifest, tokenizer, config, rank=0, world_size=1)
    try:
        for done in range(0, count, 64):
            yield stream.next_blocks(min(64, count - done))
    finally:
        stream.close()


def validation_blocks(
    manifest: Manifest,
    tokenizer: Tokenizer,
    seq_len_tokens: int,
    max_blocks: int,
    max_bad_line_fraction: float = 0.01,
) -> Tokens:
    """The first `max_blocks` blocks of a split in plain order: int32 [n, seq_len_tokens + 1].

    Shards in sorted order, documents as they stand, any bad shard fails. n is smaller than max_blocks when
    the split is; a split too small for one block raises DataFault.
    """

    def pieces() -> Iterator[tuple[Cursor, Tokens]]:
        for relpath, _ in manifest.shards:
            lines = read_lines(manifest, relpath, "fail", Counter())
            for document in parse_lines(lines, max_bad_line_fraction, relpath):
                if isinstance(document, Document):
                    eos = np.int32(tokenizer.eos_id)
                    yield LANE_START, np.append(tokenizer.encode(document.text_utf8), eos)

    if max_blocks < 1:
        raise ValueError(f"max_blocks={max_blocks} must be at least 1")
    blocks: list[Tokens] = []
    for block, _ in pack(pieces(), seq_len_tokens):
        blocks.append(block)
        if len(blocks) == max_blocks:
            break
    if not blocks:
        raise DataFault(
            f"split {manifest.root!r} is shorter than one block of {seq_len_tokens + 1} tokens; "
            "use a larger split or a smaller seq_len_tokens"
        )
    return np.stack(blocks)


def _check_state(state: dict[str, Any], identity: dict[str, Any]) -> None:
    remedies = {
        "order_version": "resume with the version of gsa_data that saved it",
        "manifest_fingerprint": "point the data folder at the files of the saved run",
        "tokenizer_fingerprint": "use the tokenizer file of the saved run",
    }
    for field, value in identity.items():
        if state[field] != value:
            remedy = remedies.get(field, f"set {field}={state[field]}")
            raise ValueError(
                f"data state was saved with {field}={state[field]}, but this run has {field}={value}; "
                f"{remedy}, or start a new run"
            )
    for lane, cursor in enumerate(state["cursors"]):
        if (tuple(cursor) != LANE_START) != (lane < state["consumed_samples"]):
            raise ValueError(
                f"data state is damaged: lane {lane} has cursor {cursor} after consumed_samples="
                f"{state['consumed_samples']}; resume from another checkpoint"
            )


class _Block(NamedTuple):
    lane: int
    tokens: Tokens
    next_cursor: Cursor
    counters: dict[str, int]  # what was counted between this block and the one before


class _RankSamples(IterableDataset[list[_Block]]):
    """One rank's samples. Worker w of W yields every W-th of them from the w-th on, in groups."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        config: StreamConfig,
        first_sample: int,
        world_size: int,
        cursors: list[Cursor],
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.config = config
        self.first_sample = first_sample
        self.world_size = world_size
        self.cursors = cursors

    def __iter__(self) -> Iterator[list[_Block]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        config = self.config
        reader = LaneReader(
            self.manifest,
            self.tokenizer,
            config.num_lanes,
            config.seed,
            config.shuffle_documents,
            config.on_bad_shard,
            config.max_bad_line_fraction,
        )
        lanes: dict[int, Iterator[tuple[Tokens, Cursor]]] = {}
        sample = self.first_sample + worker_id * self.world_size
        group_blocks = _group_blocks(config)
        while True:
            group = []
            for _ in range(group_blocks):
                lane = sample % config.num_lanes
                if lane not in lanes:
                    lanes[lane] = pack(reader.pieces(lane, self.cursors[lane]), config.seq_len_tokens)
                tokens, cursor = next(lanes[lane])
                group.append(_Block(lane, tokens, cursor, reader.take_counters()))
                sample += self.world_size * num_workers
            yield group


def _group_blocks(config: StreamConfig) -> int:
    if config.num_workers == 0:
        return 1  # nothing is read before it is asked for
    return max(1, min(BLOCKS_PER_GROUP, config.prefetch_blocks // config.num_workers))


def _blocks_in_order(samples: _RankSamples, config: StreamConfig) -> Generator[_Block, None, None]:
    """Undo the dealing to the workers: the DataLoader returns one group of each worker in turn."""
    workers = config.num_workers
    group_blocks = _group_blocks(config)
    groups = iter(
        DataLoader(
            samples,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=max(1, config.prefetch_blocks // (workers * group_blocks)) if workers else None,
            collate_fn=_as_is,
            generator=torch.Generator(),  # else it draws from, and so shifts, the training process's RNG
        )
    )
    while True:
        round_of_groups = [next(groups) for _ in range(max(1, workers))]
        for row in zip(*round_of_groups, strict=True):
            yield from row


def _as_is(group: list[_Block]) -> list[_Block]:
    """Keep numpy arrays: tensors would travel through /dev/shm, which containers keep small."""
    return group
