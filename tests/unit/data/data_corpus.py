"""Creates small synthetic corpora, and simulates a whole run of several ranks in one process."""

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import zstandard

from gsa_data.reader import ShardLines, ShardReader
from gsa_data.shards import Manifest
from gsa_data.stream import BlockStream, merge_states
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

WORDS = ["gate", "sparse", "query", "key", "value", "head", "token", "lane", "shard", "seed", "rank", "model"]


def document(number: int) -> str:
    """Return a text of 1 to 60 words that starts with its number, so that all texts differ."""
    rng = random.Random(number)
    return f"<{number}> " + " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 60)))


def line(text: str, source: str = "Synthetic") -> bytes:
    return json.dumps({"text": text, "meta": {"redpajama_set_name": source}}).encode()


def write_shard(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(b"".join(text + b"\n" for text in lines)))


def write_corpus(root: Path, num_shards: int, documents_per_shard: int) -> None:
    for shard in range(num_shards):
        numbers = range(shard * documents_per_shard, (shard + 1) * documents_per_shard)
        write_shard(root / "chunk1" / f"s{shard}.jsonl.zst", [line(document(number)) for number in numbers])


def held_by_parts(reader: ShardReader, relpath: str, parts: int) -> tuple[list[ShardLines], int]:
    """Open a shard's parts one after another and keep them, as lanes do; also return their memory in bytes."""
    reader.open(relpath, 0, parts, Counter())  # work that is done once
    tracemalloc.start()
    opened = [reader.open(relpath, part, parts, Counter()) for part in range(parts)]
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return opened, held_bytes


class Run:
    """Holds all ranks of a run. `samples` maps the global sample number to the tokens of its block."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        config: StreamConfig,
        world_size: int = 1,
        state: dict[str, Any] | None = None,
    ) -> None:
        ranks = range(world_size)
        self.streams = [BlockStream(manifest, tokenizer, config, rank, len(ranks), state) for rank in ranks]
        self.samples: dict[int, list[int]] = {}

    def step(self, global_batch_size: int, micro_batch_size: int = 1) -> None:
        world_size = len(self.streams)
        done = self.streams[0].consumed_samples
        for rank, stream in enumerate(self.streams):
            assert stream.consumed_samples == done
            sample = done + (rank - done) % world_size
            for _ in range(global_batch_size // world_size // micro_batch_size):
                for block in stream.next_blocks(micro_batch_size):
                    assert sample not in self.samples
                    self.samples[sample] = block.tolist()
                    sample += world_size

    def state(self) -> dict[str, Any]:
        return merge_states([stream.local_state() for stream in self.streams])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def read_run(
    manifest: Manifest,
    tokenizer: Tokenizer,
    config: StreamConfig,
    world_size: int = 1,
    steps: int = 6,
    global_batch_size: int = 16,
    state: dict[str, Any] | None = None,
) -> Run:
    run = Run(manifest, tokenizer, config, world_size, state)
    for _ in range(steps):
        run.step(global_batch_size, micro_batch_size=2)
    run.close()
    return run
