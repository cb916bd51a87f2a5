"""Tests that a reader's memory does not grow with the text that it has read."""

import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

READ = """
import sys
import psutil
from gsa_data.shards import build_manifest
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

corpus, tokenizer, shards, workers = *sys.argv[1:3], *map(int, sys.argv[3:])
config = StreamConfig(4096, 8, seed=0, num_workers=workers)
stream = BlockStream(build_manifest(corpus), Tokenizer(tokenizer), config, rank=0, world_size=1)
peaks = [0, 0]
while (read := stream.counters.get("shards_read", 0)) < shards:
    stream.next_blocks(8)
    processes = [psutil.Process(), *psutil.Process().children()]
    half = int(read >= shards // 2)
    peaks[half] = max(peaks[half], sum(each.memory_info().rss for each in processes))
stream.close()
print(peaks[1] - peaks[0], stream.counters["text_bytes"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_resident_memory_stays_flat(workers: int, sample_folder: Path, tmp_path: Path) -> None:
    """A separate process reads, because this one has free memory that would hide a leak."""
    shards = 40
    (tmp_path / "chunk1").mkdir()
    (sample,) = sample_folder.glob("validation/*/*.zst")
    lines = zstandard.ZstdDecompressor().stream_reader(sample.read_bytes()).read().splitlines(True)
    for shard in range(shards):  # each with its own order, because equal shards are refused
        text = b"".join(lines[shard:] + lines[:shard])
        path = tmp_path / f"chunk1/example_train_{shard}.jsonl.zst"
        path.write_bytes(zstandard.ZstdCompressor(level=1).compress(text))
    command = [sys.executable, "-c", READ, tmp_path, sample_folder / "tokenizer.model", shards, workers]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    growth_bytes, text_bytes = map(int, done.stdout.split())
    # Shards that are never released would add up to half of the text.
    assert growth_bytes < text_bytes / 5, f"{growth_bytes} bytes after {text_bytes} bytes of text"
