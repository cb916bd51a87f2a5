"""How fast text becomes blocks of tokens: tokens per second of CPU time, over all processes.

    python data/bench_reading.py --data data/sample/train --tokenizer data/sample/tokenizer.model

    loop      decompress, parse and encode every document in a plain loop: what streaming cannot do without
    stream    the same shards through BlockStream (shuffled, packed, with a state), with 0 workers and with 1
    mapped    the same blocks from the folder that `prepare.py tokens` writes, here into a temporary folder

Each is run --rounds times in turn, as machines have better and worse moments; the median counts, of the speeds
and of their ratios to the loop of the same round.
Opening, checksums and what a worker has read ahead are in the time. The bars: streaming 0.85 of the loop,
mapped (with 0 workers) 50 million tokens; the exit code is 1 below one of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
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
NUM_LANES = 8
STEP_BLOCKS = 8  # a rank's blocks of one training step


def loop(manifest: Manifest, tokenizer: Tokenizer) -> tuple[int, float]:
    """Tokens (each document with an EOS) and CPU seconds of one pass over the shards."""
    tokens = 0
    began = time.process_time()
    for relpath, _ in manifest.shards:
        if not relpath.endswith(".jsonl.zst"):
            raise DataFault(f"the loop reads *.jsonl.zst, not {relpath}; give a folder of such shards")
        packed = (Path(manifest.root) / relpath).read_bytes()
        text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
        for line in text.splitlines():
            tokens += len(tokenizer.encode(orjson.loads(line)["text"].encode())) + 1
    return tokens, time.process_time() - began


def stream(corpus: Corpus, tokenizer: Tokenizer, config: StreamConfig, tokens: int) -> tuple[int, float]:
    """Tokens and CPU seconds of about so many tokens taken from a stream, step by step."""
    steps = -(-tokens // (STEP_BLOCKS * config.seq_len_tokens))
    began = cpu_seconds()
    blocks = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
    for _ in range(steps):
        blocks.next_blocks(STEP_BLOCKS)
    spent = cpu_seconds() - began
    blocks.close()
    return steps * STEP_BLOCKS * config.seq_len_tokens, spent


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
    parser.add_argument("--mapped-epochs", type=int, default=20, help="passes over the corpus when mapped")
    options = parser.parse_args(arguments)
    try:
        tokenizer, manifest = Tokenizer(options.tokenizer), build_manifest(options.data)
        with tempfile.TemporaryDirectory() as out:
            folder = prepare_tokens(options.data, tokenizer, Path(out), 1, Reading())
            rounds: list[dict[str, float]] = []
            for _ in range(options.rounds):
                corpus_tokens, spent = loop(manifest, tokenizer)
                found = {"loop": corpus_tokens / spent}
                for name, corpus, epochs in (
                    ("stream", manifest, 1),
                    ("mapped", folder, options.mapped_epochs),
                ):
                    for workers in (0, 1):
                        config = StreamConfig(options.seq_len, NUM_LANES, seed=0, num_workers=workers)
                        tokens, spent = stream(corpus, tokenizer, config, corpus_tokens * epochs)
                        found[f"{name}, {workers} workers"] = tokens / spent
                print("  ".join(f"{name}: {speed / 1e6:.3f}" for name, speed in found.items()), flush=True)
                rounds.append(found)
    except (DataFault, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1

    print(f"\n{'':20} {'tokens per CPU s':>18} {'of the loop':>12}")
    below = []
    for name in rounds[0]:
        speed = median(found[name] for found in rounds)
        of_loop = median(found[name] / found["loop"] for found in rounds)
        print(f"{name:20} {speed:18,.0f} {of_loop:12.2f}")
        if name.startswith("stream") and of_loop < STREAMING_BAR:
            below.append(f"{name}: {of_loop:.2f} of the loop, {STREAMING_BAR} wanted")
        if name == "mapped, 0 workers" and speed < MAPPED_BAR:
            below.append(f"{name}: {speed:,.0f} tokens per CPU second, {MAPPED_BAR:,.0f} wanted")
    for line in below:
        print(f"BELOW THE BAR {line}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
