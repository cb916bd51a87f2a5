"""Tests the reader processes of a stream."""

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

from gsa_data.faults import DataFault
from gsa_data.rank_samples import group_blocks_of
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)


def test_workers_send_about_64k_tokens_at_once() -> None:
    """Workers send no more blocks than they may read ahead. Without workers, blocks are read on demand."""
    for length, workers, prefetch_blocks, blocks in (
        (4096, 0, 64, 1), (4096, 2, 64, 16), (4096, 8, 64, 8), (131072, 2, 64, 1), (32, 2, 24, 12), (32, 8, 4, 1)
    ):  # fmt: skip
        config = StreamConfig(length, 8, 0, num_workers=workers, prefetch_blocks=prefetch_blocks)
        assert group_blocks_of(config) == blocks


def test_started_workers_read_before_anyone_asks_and_hand_out_the_same(corpus, tokenizer):
    """A stream that is never asked for text is closed with its workers."""
    config = replace(CONFIG, num_workers=1)
    before = workers()  # other tests' readers, which some tests kill
    streams = [BlockStream(corpus, tokenizer, config, rank=0, world_size=1) for _ in range(3)]
    assert workers() <= before
    for stream in streams[:2]:
        stream.start()
        stream.start()
    assert len(workers() - before) == 2
    asked = [stream.next_blocks(8) for stream in streams[1:]]
    assert (asked[0] == asked[1]).all()
    for stream in streams * 2:
        stream.close()
    assert workers() <= before
    assert streams[1].consumed_samples == 8
    for use in (streams[0].start, lambda: streams[1].next_blocks(1)):
        with pytest.raises(ValueError, match="closed"):
            use()


def workers() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.ENOSPC, "make room in /dev/shm (a container's: --shm-size=1g), or set data.num_workers=0"),
        (errno.EMFILE, "look at `ulimit -a`, or set data.num_workers=0"),
    ],
)
def test_readers_that_cannot_be_started_are_said_in_a_line(corpus, tokenizer, monkeypatch, error, remedy):
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
from gsa_data.shards import build_manifest
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer
sample = sys.argv[1]
# A group is 64K tokens, and a pipe holds a part of it, so that each reader is left in the middle of one.
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
    command = [sys.executable, "-c", KILLED, sample]
    with psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        readers = process.children()
        assert len(readers) == 2
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(readers, timeout=100)
    for reader in alive:
        reader.kill()
    assert alive == []
