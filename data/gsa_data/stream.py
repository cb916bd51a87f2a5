"""Read blocks of tokens for one data-parallel rank. The order of the blocks of all ranks together does not depend on
the number of ranks or workers.

The lanes (lanes.py) are `num_lanes` fixed token streams. Global sample i comes from lane i % num_lanes, as
block i // num_lanes. Of D data-parallel ranks, rank r takes samples with i % D == r. If num_lanes is not a multiple of
D, ranks share lanes.

Each block carries the position at which the next block of its lane begins. A position contains a cursor and, with
best_fit packing, also the lane's pool of waiting documents. A saved state has each lane's position after the lane's
last returned block, so prefetched blocks do not change the state. Data flows through these classes:

    ShardReader -> LaneReader -> pack or best_fit -> RankSamples (in the workers) -> DataLoader -> BlockStream
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gsa_data.best_fit import pool_of
from gsa_data.chat import CHAT_VERSION, ChatFolder
from gsa_data.corpus import Corpus, shard_reader
from gsa_data.lanes import ORDER_VERSION
from gsa_data.pack import LANE_START, Cursor, Tokens
from gsa_data.rank_samples import START, Block, Position, RankSamples, blocks_in_order, last_sample
from gsa_data.stream_config import StreamConfig as StreamConfig
from gsa_data.tokenize import Tokenizer


class StateMismatch(ValueError):
    """A saved position does not fit. The message says what differs and what to do."""

    def __init__(self, message: str, other_data: bool = False) -> None:
        """`other_data`: the position belongs to other text or another order, so the run may start its text again."""
        super().__init__(message)
        self.other_data = other_data


class BlockStream:
    """Streams the blocks of one data-parallel rank endlessly, from the start or from a merged state.

    Raises StateMismatch if `state` was saved with another corpus, tokenizer, order or packing. Raises DataFault if
    `source_weights` names a source that the tokens do not have. `next_blocks` raises DataFault for faults of the text.

    Args:
        carried_counters: counters to continue if a run starts again on other data; cannot be combined with `state`
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
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.wait_seconds = 0.0
        reader = shard_reader(corpus, tokenizer, config.reading, config.source_weights)
        self._identity: dict[str, Any] = {
            "order_version": ORDER_VERSION,
            "manifest_fingerprint": reader.manifest.fingerprint,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "num_lanes": config.num_lanes,
            "seed": config.seed,
            "shuffle_documents": config.shuffle_documents,
            "packing": config.packing,
        }
        if isinstance(corpus, ChatFolder):
            self._identity["chat_version"] = CHAT_VERSION
            self._identity["chat_template_fingerprint"] = corpus.template.fingerprint
        if config.packing == "best_fit":
            self._identity["packing_pool_documents"] = config.packing_pool_documents
        self._start_samples = 0
        self._taken = 0  # blocks this rank has handed out
        self._counters: Counter[str] = Counter()
        positions = [START] * config.num_lanes
        if state is not None:
            _check_state(state, self._identity, tokenizer)
            self._start_samples = state["consumed_samples"]
            positions = [
                Position(Cursor(*cursor), pool_of(pool))
                for cursor, pool in zip(state["cursors"], state["pools"], strict=True)
            ]
            carried_counters = state["counters"]
        if rank == 0:  # the counters are summed over the ranks
            self._counters.update(carried_counters or {})
            if state is None and reader.manifest.duplicates:
                self._counters["shards_duplicate"] += len(reader.manifest.duplicates)
        every = math.gcd(world_size, config.num_lanes)
        lanes = range(rank % every, config.num_lanes, every)
        self._last_samples = {lane: last_sample(lane, self._start_samples, len(positions)) for lane in lanes}
        self._positions = {lane: positions[lane] for lane in lanes}
        self._last_blocks: Tokens | None = None
        samples = RankSamples(reader, config, self._start_samples, rank, world_size, positions)
        self._first_sample = samples.first_sample
        self._open = partial(blocks_in_order, samples, config)
        self._blocks: Generator[Block, None, None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the workers before the first `next_blocks`, which would otherwise start them.

        Raises:
            DataFault: the workers cannot be started
        """
        if self._is_closed:
            raise ValueError("this BlockStream is closed; build a new one from its state")
        self._blocks = self._blocks or self._open()

    def next_blocks(self, count: int) -> Tokens:
        """Returns the rank's next `count` blocks, int32 [count, seq_len_tokens + 1]. Padding of best_fit is
        pack.FILLER. Tokens of conversations have loss-mask bits (marks.py)."""
        began = time.perf_counter()
        self.start()
        assert self._blocks is not None
        blocks = [next(self._blocks) for _ in range(count)]
        self.wait_seconds += time.perf_counter() - began
        for block in blocks:
            lane = block.sample % self.config.num_lanes
            self._last_samples[lane] = block.sample
            self._positions[lane] = block.next_position
            self._counters.update(block.counters)
        self._taken += count
        self._last_blocks = np.stack([block.tokens for block in blocks])
        return self._last_blocks

    @property
    def identity(self) -> dict[str, Any]:
        """Returns the values, equal on all ranks, that fix the order of blocks, except the weights of sources."""
        return dict(self._identity)

    @property
    def counters(self) -> dict[str, int]:
        """Returns this rank's counters up to the returned blocks. Rank 0 includes the saved counters."""
        return dict(self._counters)

    @property
    def readers_per_lane(self) -> int:
        """Returns how many readers build the blocks of each lane: 1 if num_lanes is a multiple of the number of
        readers."""
        readers = self.world_size * max(1, self.config.num_workers)
        return readers // math.gcd(readers, self.config.num_lanes)

    def checksum(self) -> int:
        """Returns the sum of the CRC-32 of the newest returned blocks, seeded with their global sample numbers.

        Added up over all ranks, the checksums identify the blocks of a step and their order. This sum is the same for
        any number of ranks and workers.
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
        """Returns the global samples since the start of the run, if all ranks have taken the same number."""
        return self._start_samples + self._taken * self.world_size

    def local_state(self) -> dict[str, Any]:
        """Returns this rank's part of the state, which `merge_states` merges over all data-parallel ranks."""
        return {
            **self._identity,
            "seq_len_tokens": self.config.seq_len_tokens,
            "source_weights": dict(self.config.source_weights),
            "consumed_samples": self.consumed_samples,
            "last_samples": dict(self._last_samples),
            "cursors": {lane: list(position.cursor) for lane, position in self._positions.items()},
            "pools": {lane: position.pool.tolist() for lane, position in self._positions.items()},
            "counters": dict(self._counters),
        }

    def close(self) -> None:
        """Stop the workers. The state stays readable."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks, self._is_closed = None, True


def merge_states(local_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the `local_state()` of all data-parallel ranks into one state of plain values.

    The state has these keys:
        order_version, manifest_fingerprint, tokenizer_fingerprint, num_lanes, seed, shuffle_documents, packing
        packing_pool_documents, only with best_fit
        chat_version and chat_template_fingerprint, only for conversations
        seq_len_tokens, source_weights, consumed_samples, counters
        cursors: [num_lanes][epoch, unit, document, token_offset, copy, lines]
        pools: [num_lanes][waiting documents][fields of a cursor]

    If several ranks share a lane, the lane's position comes from the rank that returned the lane's newest block. Raises
    ValueError if ranks are missing or disagree.
    """
    of_one_rank = ("last_samples", "cursors", "pools", "counters")
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
        for lane, sample in local["last_samples"].items():
            if sample == last_sample(lane, merged["consumed_samples"], merged["num_lanes"]):
                cursors[lane], pools[lane] = local["cursors"][lane], local["pools"][lane]
        counters.update(local["counters"])
    if len(cursors) != merged["num_lanes"]:
        raise ValueError(
            f"data state: {len(cursors)} of {merged['num_lanes']} lanes present; pass the states of all ranks"
        )
    of_lanes = {
        name: [of[lane] for lane in sorted(of)] for name, of in (("cursors", cursors), ("pools", pools))
    }
    return {**merged, **of_lanes, "counters": dict(counters)}


def whole_epochs(state: dict[str, Any]) -> int:
    """Returns the number of epochs that every lane of a merged state has completed."""
    return int(min(cursor[0] for cursor in state["cursors"]))


def replay_blocks(
    corpus: Corpus, tokenizer: Tokenizer, config: StreamConfig, end: Mapping[str, Any]
) -> Iterator[Tokens]:
    """Replays the samples that all data-parallel ranks of a run have read, as int32 [n, seq_len_tokens + 1] arrays with
    n <= 64. The replay begins at the start of the run. It stops at `end`, a state that `merge_states` returned.

    Raises StateMismatch after the last sample if the replay does not end at the positions in `end`. This happens if the
    source weights or the sequence length changed when the run was resumed.
    """
    stream = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
    count = end["consumed_samples"]
    try:
        for done in range(0, count, 64):
            yield stream.next_blocks(min(64, count - done))
        again = merge_states([stream.local_state()])
        if any(again[name] != end[name] for name in ("cursors", "pools")):
            raise StateMismatch(
                f"the {count} sequences of the run are not what its config makes of the text from the start"
            )
    finally:
        stream.close()


def _check_state(state: dict[str, Any], identity: dict[str, Any], tokenizer: Tokenizer) -> None:
    remedies = {
        "order_version": "resume with the version of gsa_data that saved it",
        "manifest_fingerprint": "point the data folder at the files of the saved run",
        "tokenizer_fingerprint": tokenizer.differs_from(state["tokenizer_fingerprint"]),
        "chat_version": "conversations had other tokens then, so resume with the version of gsa_data that saved it",
        "chat_template_fingerprint": "use the chat template, and the special tokens, of the saved run",
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
