"""Checks that readers use bounded memory: reads much text to its end and prints the resident memory on the way.

    python benchmarks/bench_memory.py --gigabytes 10 [--kind tokens] [--workers 1] [--scratch DIR]

    text      shards of text, tokenized as they are read
    tokens    memory-mapped files from `prepare.py tokens`; resident pages of these files count, too

The text repeats the documents of --data. Each shard has its own order of the documents, so no two shards are equal. The
text is first written to a temporary folder, which takes about 0.35 bytes per byte of text, or 0.65 as tokens.

The memory of this process and its workers is read after each step. The peak of the second half may exceed the peak of
the first half by the text of two shards, because lanes hold larger parts at once by chance. Above this, the exit code
is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil
import zstandard

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_data import BlockStream, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import Corpus
from gsa_data.documents import Document, read_documents
from gsa_data.faults import DataFault, Reading
from gsa_data.reader import EncodedDocument, LineSources
from gsa_data.source_weights import NO_SOURCE
from gsa_data.token_files import TokenFolder, identity_of
from gsa_data.token_writer import write_shard

BAR_SHARDS = 2
"""Allowed growth in shards of text. A large shard that a lane opens late, and memory that the allocator keeps, add up
to about one. Shards that are never released would add up to all shards of the second half."""
NUM_LANES = 8
STEP_BLOCKS = 8
SAMPLES = 200
"""Points of the curve that are kept, evenly over the text."""


@dataclass(frozen=True)
class Sample:
    text_bytes: int
    """Text read until this sample."""
    resident_bytes: int
    """Largest value since the previous sample."""


def read_sample(data: str) -> list[Document]:
    manifest = build_manifest(data)
    found = [
        item for path, _ in manifest.shards for item in read_documents(manifest, path, Reading(), Counter())
    ]
    return [item for item in found if isinstance(item, Document)]


def shard_orders(
    sizes_bytes: list[int], shard_bytes: int, total_bytes: int
) -> Iterator[tuple[str, list[int]]]:
    """Yield path and documents (by number) of each shard; all shards together have at least `total_bytes` of text."""
    done = shard = 0
    while done < total_bytes:
        order: list[int] = []
        size, random = 0, np.random.RandomState(shard)
        while size < shard_bytes:
            for number in random.permutation(len(sizes_bytes)).tolist():
                order.append(number)
                size += sizes_bytes[number]
                if size >= shard_bytes:
                    break
        yield f"chunk{shard // 100 + 1}/example_train_{shard % 100}.jsonl.zst", order
        done, shard = done + size, shard + 1


def write_text(documents: list[Document], orders: Iterator[tuple[str, list[int]]], out: Path) -> Manifest:
    lines = [
        orjson.dumps({"text": each.text_utf8.decode(), "meta": {"redpajama_set_name": each.source}}) + b"\n"
        for each in documents
    ]
    for relpath, order in orders:
        path = out / relpath
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            zstandard.ZstdCompressor(level=1).compress(b"".join(lines[number] for number in order))
        )
    return build_manifest(str(out))


class _EncodedLines(list[EncodedDocument]):
    """Implements `ShardLines` for documents that are already encoded."""

    def sources(self) -> LineSources:
        names = sorted({line.source for line in self})
        return LineSources(names, np.array([names.index(line.source) for line in self]))


def write_tokens(
    documents: list[Document], tokenizer: Tokenizer, orders: Iterator[tuple[str, list[int]]], out: Path
) -> TokenFolder:
    """Write the files that `prepare.py tokens` would make of such shards, but tokenize each document only once."""
    eos = np.int32(tokenizer.eos_id)
    encoded = [
        EncodedDocument(
            np.append(tokenizer.encode(each.text_utf8), eos), len(each.text_utf8), each.source or NO_SOURCE
        )
        for each in documents
    ]
    all_orders = list(orders)
    manifest = Manifest(str(out), tuple(sorted((path, len(order)) for path, order in all_orders)))
    identity = identity_of(manifest, tokenizer, Reading())
    records = {}
    for path, order in all_orders:
        lines = _EncodedLines([encoded[number] for number in order])
        records[path] = write_shard(out, path, lines, Counter(shards_read=1), identity)
    return TokenFolder(out, identity, manifest, records)


def resident_bytes(workers: list[psutil.Process]) -> int:
    """Sum the memory of this process and its workers; shared pages count for each process."""
    return sum(process.memory_info().rss for process in (psutil.Process(), *workers))


def read_to_the_end(stream: BlockStream, text_bytes: int, report_bytes: int) -> list[Sample]:
    """Return the curve of the resident memory over `text_bytes` of text; print a line every `report_bytes`."""
    curve: list[Sample] = []
    every, largest, next_report, began = text_bytes / SAMPLES, 0, report_bytes, time.monotonic()
    stream.next_blocks(STEP_BLOCKS)
    workers = psutil.Process().children()  # listed once, because this takes longer than a step
    while (read := stream.counters.get("text_bytes", 0)) < text_bytes:
        stream.next_blocks(STEP_BLOCKS)
        largest = max(largest, resident_bytes(workers))
        if read >= every * (len(curve) + 1):
            curve.append(Sample(read, largest))
            largest = 0
        if read >= next_report:
            recent = max(sample.resident_bytes for sample in curve[-SAMPLES // 10 :])
            seconds = time.monotonic() - began
            print(f"{read / 1e9:6.2f} GB  {recent / 1e6:7.0f} MB  {seconds:6.0f} s", flush=True)
            next_report += report_bytes
    return curve


def growth_bytes(curve: list[Sample]) -> int:
    """Return the peak of the second half minus the peak of the first."""
    half = len(curve) // 2
    first, second = (max(each.resident_bytes for each in part) for part in (curve[:half], curve[half:]))
    return second - first


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10.0, help="text to read")
    parser.add_argument("--kind", choices=["text", "tokens"], default="text")
    parser.add_argument("--workers", type=int, default=0, help="reader processes; 0 reads in this one")
    parser.add_argument(
        "--shard-megabytes", type=float, default=40.0, help="text of a shard; SlimPajama's have 40"
    )
    parser.add_argument("--data", default="data/sample/train", help="folder of shards to make the text of")
    parser.add_argument("--tokenizer", default="data/sample/tokenizer.model")
    parser.add_argument("--scratch", help="where the temporary folder is made")
    options = parser.parse_args(arguments)
    total_bytes, shard_bytes = int(options.gigabytes * 1e9), int(options.shard_megabytes * 1e6)
    try:
        tokenizer = Tokenizer(options.tokenizer)
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            print(f"writing {options.gigabytes:g} GB of text into {scratch} first", flush=True)
            corpus = _write(options.data, options.kind, tokenizer, shard_bytes, total_bytes, Path(scratch))
            config = StreamConfig(4096, NUM_LANES, seed=0, num_workers=options.workers)
            stream = BlockStream(corpus, tokenizer, config, rank=0, world_size=1)
            print(
                f"   read  resident  elapsed   ({resident_bytes([]) / 1e6:.0f} MB before reading)", flush=True
            )
            curve = read_to_the_end(stream, total_bytes, total_bytes // 40 or 1)
            stream.close()
    except (DataFault, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    growth = growth_bytes(curve)
    bar = BAR_SHARDS * shard_bytes
    print(f"peak of the second half - peak of the first: {growth / 1e6:.1f} MB (bar {bar / 1e6:.0f})")
    return int(growth > bar)


def _write(
    data: str, kind: str, tokenizer: Tokenizer, shard_bytes: int, total_bytes: int, out: Path
) -> Corpus:
    """Write the corpus in a separate function, so that its memory is free when reading begins."""
    documents = read_sample(data)
    orders = shard_orders([len(each.text_utf8) for each in documents], shard_bytes, total_bytes)
    if kind == "text":
        return write_text(documents, orders, out)
    return write_tokens(documents, tokenizer, orders, out)


if __name__ == "__main__":
    sys.exit(main())
