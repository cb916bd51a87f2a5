"""How fast text becomes blocks of tokens: per second of CPU time over all processes, and per second of the clock.

    python data/bench_reading.py --data data/sample/train --tokenizer data/sample/tokenizer.model

    loop      decompress, parse and encode every document in a plain loop: what streaming cannot do without
    stream    the same shards through BlockStream (shuffled, packed, with a state), at each number of --workers
    mapped    the same blocks from the folder that `prepare.py tokens` writes, here into a temporary folder

Each is run --rounds times in turn, as machines have better and worse moments; the median counts, of the speeds
and of their ratios to the loop of the same round.
Opening, checksums and what a worker has read ahead are in the time. The bars: streaming (with 0 and 1 workers) 0.85
of the loop, mapped (with 0 workers) 50 million tokens; the exit code is 1 below one of them. Speed by the clock says
something where cores are idle only, so it has no bar, and the machine's load stands beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson
import psutil
import zstandard
from prepare_tokens import prepare_tokens

from gsa_data import BlockStream, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import Corpus
from gsa_data.faults import DataFault, Reading

STREAMING_BAR = 0.85  # of the loop
MAPPED_BAR = 50e6  # tokens per CPU second
STEP_BLOCKS = 8  # a rank's blocks of one training step


@dataclass(frozen=True)
class Speed:
    per_cpu_second: float
    per_second: float


def loop(manifest: Manifest, tokenizer: Tokenizer) -> tuple[int, Speed]:
    """Tokens (each document with an EOS) of one pass over the shards, and their speed."""
    tokens = 0
    began, clock = time.process_time(), time.perf_counter()
    for relpath, _ in manifest.shards:
        if not relpath.endswith(".jsonl.zst"):
            raise DataFault(f"the loop reads *.jsonl.zst, not {relpath}; give a folder of such shards")
        packed = (Path(manifest.root) / relpath).read_bytes()
        text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
        for line in text.splitlines():
            tokens += len(tokenizer.encode(orjson.loads(line)["text"].encode())) + 1
    return tokens, Speed(tokens / (time.process_time() - began), tokens / (time.perf_counter() - clock))


def stream(corpus: Corpus, tokenizer: Tokenizer, config: StreamConfig, tokens: int) -> Speed:
    """Of about so many tokens taken from a stream, step by step."""
    steps = -(-tokens // (STEP_BLOCKS * config.seq_len_tokens))
    began, clock = cpu_seconds(), time.perf_counter()
    blocks = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
    for _ in range(steps):
        blocks.next_blocks(STEP_BLOCKS)
    spent, seconds = cpu_seconds() - began, time.perf_counter() - clock
    blocks.close()
    taken = steps * STEP_BLOCKS * config.seq_len_tokens
    return Speed(taken / spent, taken / seconds)


def cpu_seconds() -> float:
    """Of this process and of the workers that it has now; a clock tick (10 ms) exact."""
    times = [process.cpu_times() for process in psutil.Process().children()]
    return time.process_time() + sum(spent.user + spent.system for spent in times)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of *.jsonl.zst shards")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 1, 2], help="reader processes; 0 reads here"
    )
    parser.add_argument("--lanes", type=int, default=8, help="a multiple of each number of workers")
    parser.add_argument("--stream-epochs", type=int, default=1, help="passes over the corpus when streamed")
    parser.add_argument("--mapped-epochs", type=int, default=20, help="passes over the corpus when mapped")
    options = parser.parse_args(arguments)
    try:
        tokenizer, manifest = Tokenizer(options.tokenizer), build_manifest(options.data)
        with tempfile.TemporaryDirectory() as out:
            folder = prepare_tokens(options.data, tokenizer, Path(out), 1, Reading())
            rounds: list[dict[str, Speed]] = []
            for _ in range(options.rounds):
                corpus_tokens, speed = loop(manifest, tokenizer)
                found = {"loop": speed}
                for name, corpus, epochs in (
                    ("stream", manifest, options.stream_epochs),
                    ("mapped", folder, options.mapped_epochs),
                ):
                    for workers in options.workers:
                        config = StreamConfig(options.seq_len, options.lanes, seed=0, num_workers=workers)
                        speed = stream(corpus, tokenizer, config, corpus_tokens * epochs)
                        found[f"{name}, {workers} workers"] = speed
                print("  ".join(f"{name}: {each.per_cpu_second / 1e6:.3f}" for name, each in found.items()))
                print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
                rounds.append(found)
    except (DataFault, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1

    print(f"\n{'':20} {'tokens per CPU s':>18} {'of the loop':>12} {'tokens per s':>14}")
    below = []
    for name in rounds[0]:
        speed = median(found[name].per_cpu_second for found in rounds)
        of_loop = median(found[name].per_cpu_second / found["loop"].per_cpu_second for found in rounds)
        by_clock = median(found[name].per_second for found in rounds)
        print(f"{name:20} {speed:18,.0f} {of_loop:12.2f} {by_clock:14,.0f}")
        if name in ("stream, 0 workers", "stream, 1 workers") and of_loop < STREAMING_BAR:
            below.append(f"{name}: {of_loop:.2f} of the loop, {STREAMING_BAR} wanted")
        if name == "mapped, 0 workers" and speed < MAPPED_BAR:
            below.append(f"{name}: {speed:,.0f} tokens per CPU second, {MAPPED_BAR:,.0f} wanted")
    for line in below:
        print(f"BELOW THE BAR {line}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
