"""Reader processes of a stream, and faults in the shards that it reads."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_corpus import Run, document, line, mismatches, read_run, write_corpus, write_shard

from gsa_data import BlockStream, DataFault, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.faults import Reading
from gsa_data.rank_samples import group_blocks_of

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)


@pytest.mark.parametrize(
    ("seq_len_tokens", "num_workers", "prefetch_blocks", "blocks"),
    [
        (4096, 0, 64, 1),
        (4096, 2, 64, 16),
        (4096, 8, 64, 8),
        (131072, 2, 64, 1),
        (32, 2, 24, 12),
        (32, 8, 4, 1),
    ],
)
def test_workers_send_about_64k_tokens_at_once(
    seq_len_tokens: int, num_workers: int, prefetch_blocks: int, blocks: int
) -> None:
    """But no more blocks than they may read ahead, and without workers none is read before it is asked for."""
    config = StreamConfig(seq_len_tokens, 8, 0, num_workers=num_workers, prefetch_blocks=prefetch_blocks)
    assert group_blocks_of(config) == blocks


def test_started_workers_read_before_anyone_asks_and_hand_out_the_same(
    corpus: Manifest, tokenizer: Tokenizer
) -> None:
    """One that nobody has asked for text is closed with its workers."""
    config = replace(CONFIG, num_workers=1)
    before = workers()  # of other tests, some of which kill their readers
    streams = [BlockStream(corpus, tokenizer, config, rank=0, world_size=1) for _ in range(3)]
    assert workers() <= before
    for stream in streams[:2]:
        stream.start()
        stream.start()
    assert len(workers() - before) == 2
    asked = [stream.next_blocks(8) for stream in streams[1:]]
    assert (asked[0] == asked[1]).all()
    for stream in streams:
        stream.close()
    assert workers() <= before
    with pytest.raises(ValueError, match="closed"):
        streams[0].start()


def workers() -> set[int | None]:
    """Their process ids."""
    return {child.pid for child in multiprocessing.active_children()}


def test_closed_stream(corpus: Manifest, tokenizer: Tokenizer) -> None:
    stream = BlockStream(corpus, tokenizer, replace(CONFIG, num_workers=1), 0, 1)
    stream.next_blocks(2)
    stream.close()
    stream.close()
    assert stream.consumed_samples == 2
    with pytest.raises(ValueError, match="closed"):
        stream.next_blocks(1)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.ENOSPC, "make room in /dev/shm (a container's: --shm-size=1g), or set data.num_workers=0"),
        (errno.EMFILE, "look at `ulimit -a`, or set data.num_workers=0"),
    ],
)
def test_readers_that_cannot_be_started_are_said_in_a_line(
    corpus: Manifest, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: int, remedy: str
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)  # a file in /dev/shm
    stream = BlockStream(corpus, tokenizer, replace(CONFIG, num_workers=1), 0, 1)
    with pytest.raises(DataFault) as caught:
        stream.next_blocks(2)
    reason = f"data readers cannot be started ([Errno {error}] {os.strerror(error)})"
    assert str(caught.value) == f"{reason}; {remedy}"


KILLED = """
import array, fcntl, os, sys, termios, time
from gsa_data import BlockStream, StreamConfig, Tokenizer, build_manifest
sample = sys.argv[1]
# A group is 64K tokens, of which a pipe holds a part, so that each reader is left in the middle of one.
config = StreamConfig(seq_len_tokens=8192, num_lanes=2, seed=1, num_workers=2, prefetch_blocks=64)
stream = BlockStream(build_manifest(f"{sample}/train"), Tokenizer(f"{sample}/tokenizer.model"), config, 0, 1)
stream.next_blocks(1)

def waits_in_a_pipe(descriptor):
    count = array.array("i", [0])
    try:
        fcntl.ioctl(int(descriptor), termios.FIONREAD, count)
    except OSError:  # no pipe
        return False
    return count[0] > 1000

while not any(map(waits_in_a_pipe, os.listdir("/proc/self/fd"))):
    time.sleep(0.05)
os.write(1, b"ready\\n")
sys.stdin.read()
"""


def test_readers_end_with_a_training_process_that_is_killed() -> None:
    sample = str(Path(__file__).parents[3] / "data" / "sample")
    process = psutil.Popen(
        [sys.executable, "-c", KILLED, sample], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    readers = process.children()
    assert len(readers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(readers, timeout=100)
    for reader in alive:
        reader.kill()
    assert alive == []


# Faults in the data


@pytest.fixture
def faulty(tmp_path: Path) -> Manifest:
    """Four shards of 100 good documents; one has 2 bad lines and 2 empty ones, one is truncated."""
    write_corpus(tmp_path, num_shards=4, documents_per_shard=100)
    good = [line(document(number)) for number in range(100)]
    bad = [b'{"text": "cut', b'{"text": "\xff"}', line(""), b""]
    write_shard(tmp_path / "chunk1" / "s0.jsonl.zst", good + bad)
    truncated = tmp_path / "chunk1" / "s1.jsonl.zst"
    truncated.write_bytes(truncated.read_bytes()[:-20])
    return build_manifest(str(tmp_path))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_faults_stop_the_run_by_default(faulty: Manifest, tokenizer: Tokenizer, num_workers: int) -> None:
    stream = BlockStream(faulty, tokenizer, replace(CONFIG, num_workers=num_workers), 0, 1)
    with pytest.raises(
        DataFault, match=r"s1\.jsonl\.zst is truncated|s0\.jsonl\.zst: 2 of 104 lines are bad"
    ):
        stream.next_blocks(800)


def test_faults_are_counted_when_allowed(faulty: Manifest, tokenizer: Tokenizer) -> None:
    config = replace(CONFIG, reading=Reading("skip", max_bad_line_fraction=0.02))
    # Until every lane is in its second epoch: all faults were met, some twice.
    run = Run(faulty, tokenizer, config, world_size=2)
    while min(cursor[0] for cursor in run.state()["cursors"]) < 1:
        run.step(16)
    counters = run.state()["counters"]
    names = ("bad_json", "bad_utf8", "empty_text", "shards_damaged")
    assert [1 <= counters[name] <= 4 for name in names] == [True] * 4
    assert "bad_lines" not in counters

    whole = read_run(faulty, tokenizer, config, steps=20)
    first = read_run(faulty, tokenizer, config, world_size=4, steps=9)
    resumed = read_run(faulty, tokenizer, config, world_size=2, steps=11, state=first.state())
    assert mismatches(resumed, whole) == 0
    assert resumed.state() == whole.state()


def test_missing_shard_can_be_skipped(corpus: Manifest, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_corpus(tmp_path, num_shards=5, documents_per_shard=40)
    manifest = build_manifest(str(tmp_path))
    (tmp_path / "chunk1" / "s2.jsonl.zst").unlink()
    with pytest.raises(DataFault, match=r"s2\.jsonl\.zst is missing"):
        read_run(manifest, tokenizer, CONFIG, steps=40)
    state = read_run(manifest, tokenizer, replace(CONFIG, reading=Reading("skip")), steps=40).state()
    assert state["counters"]["shards_missing"] >= 1
