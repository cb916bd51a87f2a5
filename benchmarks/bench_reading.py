"""How fast text becomes blocks of tokens: per second of CPU time over all processes, and per second of the clock.

    python benchmarks/bench_reading.py --data data/sample/train --tokenizer data/sample/tokenizer.model [--json FILE]

    loop      decompress, parse and encode every document in a plain loop: what streaming cannot do without
    stream    the same shards through BlockStream (shuffled, packed, with a state), at each number of --workers
    mapped    the same blocks from the folder that `prepare.py tokens` writes, here into a temporary folder

A token costs more CPU time where more cores are busy (shared caches, two threads on a core, lower clocks), so streams
with N workers are compared with N loops side by side. A stream is timed after what it read ahead at its start: a run
starts once, and as much is read ahead when the time ends. Opening shards and checksums are in it.
All are run --rounds times in turn, as machines have better and worse moments; the median counts, of the speeds and
of their ratios in the same round. The bars: streaming 0.85 of the loops at any number of workers, mapped (with 0
workers) 50 million tokens; the exit code is 1 below one of them. Speed by the clock, and the scaling (its share of N
times that of one worker), say something where cores are idle only, so they have no bar, and the machine's load stands
beside them.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import orjson
import psutil
import zstandard

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_data import BlockStream, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import Corpus
from gsa_data.faults import DataFault, Reading
from gsa_data.prepare_tokens import prepare_tokens
from gsa_data.token_files import TokenFolder

STREAMING_BAR = 0.85  # of the loops
MAPPED_BAR = 50e6  # tokens per CPU second
STEP_BLOCKS = 8  # a rank's blocks of one training step


@dataclass(frozen=True)
class Speed:
    per_cpu_second: float
    per_second: float


@dataclass(frozen=True)
class Figures:
    """Of one reader, medians over the rounds."""

    per_cpu_second: float
    of_loop: float
    """Tokens per CPU second, of those of as many loops in the same round."""
    per_second: float
    scaling: float | None
    """Tokens per second, of N times those of one worker or loop in the same round; None where one was not timed."""


def loops(manifest: Manifest, tokenizer: Tokenizer, processes: int) -> Speed:
    """Of plain loops side by side, over about one pass together; each begins at its own share of the shards."""
    shards = [relpath for relpath, _ in manifest.shards]
    for relpath in shards:
        if not relpath.endswith(".jsonl.zst"):
            raise DataFault(f"the loop reads *.jsonl.zst, not {relpath}; give a folder of such shards")
    share = -(-len(shards) // processes)
    all_are_there = multiprocessing.Barrier(processes).wait
    with ProcessPoolExecutor(processes, initializer=all_are_there) as pool:
        firsts = [number * len(shards) // processes for number in range(processes)]
        parts = [(shards[first:] + shards[:first])[:share] for first in firsts]
        found = list(pool.map(loop, [manifest.root] * processes, parts, [tokenizer] * processes))
    tokens, cpu_seconds = (sum(column) for column in list(zip(*found, strict=True))[:2])
    return Speed(tokens / cpu_seconds, sum(tokens / seconds for tokens, _, seconds in found))


def loop(root: str, shards: list[str], tokenizer: Tokenizer) -> tuple[int, float, float]:
    """Tokens (each document with an EOS), CPU seconds and seconds of one pass over the shards."""
    tokens = 0
    gc.collect()
    began, clock = time.process_time(), time.perf_counter()
    for relpath in shards:
        packed = (Path(root) / relpath).read_bytes()
        text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
        for line in text.splitlines():
            tokens += len(tokenizer.encode(orjson.loads(line)["text"].encode())) + 1
    return tokens, time.process_time() - began, time.perf_counter() - clock


def stream(corpus: Corpus, tokenizer: Tokenizer, config: StreamConfig, tokens: int) -> Speed:
    """Of about so many tokens taken from a stream, step by step, once its workers read ahead."""
    steps = -(-tokens // (STEP_BLOCKS * config.seq_len_tokens))
    blocks = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
    blocks.next_blocks(2 * config.prefetch_blocks)
    gc.collect()  # else a full collection of all that was imported falls into one time or another
    began, clock = cpu_seconds(), time.perf_counter()
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


def one_round(
    manifest: Manifest, folder: TokenFolder, tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, Speed]:
    """By the name of the reader; loops and streams with as many processes one after the other."""
    found: dict[str, Speed] = {}
    corpus_tokens = sum(record.tokens for record in folder.records.values())
    for workers in options.workers:
        config = StreamConfig(options.seq_len, options.lanes, seed=0, num_workers=workers)
        if loop_name(workers) not in found:
            found[loop_name(workers)] = loops(manifest, tokenizer, max(1, workers))
        streamed = stream(manifest, tokenizer, config, corpus_tokens * options.stream_epochs)
        found[f"stream, {workers} workers"] = streamed
        mapped = stream(folder, tokenizer, config, corpus_tokens * options.mapped_epochs)
        found[f"mapped, {workers} workers"] = mapped
    return found


def loop_name(workers: int) -> str:
    return f"loop, {max(1, workers)} side by side"


def figures(rounds: list[dict[str, Speed]]) -> dict[str, Figures]:
    """By the name of the reader."""
    result = {}
    for name in rounds[0]:
        kind, number = name.split(", ")
        workers = int(number.split()[0])
        one = loop_name(1) if kind == "loop" else f"{kind}, 1 workers"
        scaling = None
        if workers and one in rounds[0]:
            scaling = median(found[name].per_second / (workers * found[one].per_second) for found in rounds)
        of_loop = (found[name].per_cpu_second / found[loop_name(workers)].per_cpu_second for found in rounds)
        result[name] = Figures(
            median(found[name].per_cpu_second for found in rounds),
            median(of_loop),
            median(found[name].per_second for found in rounds),
            scaling,
        )
    return result


def below_the_bars(found: dict[str, Figures]) -> list[str]:
    below = []
    for name, each in found.items():
        if name.startswith("stream") and each.of_loop < STREAMING_BAR:
            below.append(f"{name}: {each.of_loop:.2f} of the loop, {STREAMING_BAR} wanted")
        if name == "mapped, 0 workers" and each.per_cpu_second < MAPPED_BAR:
            below.append(
                f"{name}: {each.per_cpu_second:,.0f} tokens per CPU second, {MAPPED_BAR:,.0f} wanted"
            )
    return below


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
    parser.add_argument(
        "--lanes", type=int, default=8, help="else than a multiple of the workers, they share lanes"
    )
    parser.add_argument("--stream-epochs", type=int, default=1, help="passes over the corpus when streamed")
    parser.add_argument("--mapped-epochs", type=int, default=20, help="passes over the corpus when mapped")
    parser.add_argument("--json", type=Path, help="write all rounds and the medians into this file")
    options = parser.parse_args(arguments)
    try:
        tokenizer, manifest = Tokenizer(options.tokenizer), build_manifest(options.data)
        with tempfile.TemporaryDirectory() as out:
            folder = prepare_tokens(options.data, tokenizer, Path(out), 1, Reading())
            rounds: list[dict[str, Speed]] = []
            loads: list[float] = []
            for _ in range(options.rounds):
                found = one_round(manifest, folder, tokenizer, options)
                print("  ".join(f"{name}: {each.per_cpu_second / 1e6:.3f}" for name, each in found.items()))
                rounds.append(found)
                loads.append(os.getloadavg()[0])
                print(f"load {loads[-1]:.1f} on {os.cpu_count()} cores", flush=True)
    except (DataFault, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1

    result = figures(rounds)
    below = below_the_bars(result)
    print(f"\n{'':20} {'tokens per CPU s':>18} {'of the loop':>12} {'tokens per s':>14} {'scaling':>8}")
    for name, each in result.items():
        scaling = "" if each.scaling is None else f"{each.scaling:.2f}"
        print(
            f"{name:20} {each.per_cpu_second:18,.0f} {each.of_loop:12.2f} {each.per_second:14,.0f} {scaling:>8}"
        )
    for line in below:
        print(f"BELOW THE BAR {line}")
    if options.json:
        content = {
            "cores": os.cpu_count(),
            "loads": loads,
            "medians": {name: asdict(each) for name, each in result.items()},
            "rounds": [{name: asdict(speed) for name, speed in found.items()} for found in rounds],
            "below_the_bars": below,
        }
        options.json.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
