"""Tests faults of a corpus. A few bad lines are left out. By default a bad shard stops a run. With on_bad_shard=skip,
the run skips and counts it. test_data_formats.py covers faults of gzip and Parquet files, and copied shards."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
import zstandard
from data_clock import Clock, stopped_clock
from data_corpus import Run, document, line, read_run, write_corpus, write_shard
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import DataLoader

from gsa_data import rank_samples
from gsa_data.documents import Document, read_documents
from gsa_data.faults import DataFault, Reading, skipped_totals, warn_once
from gsa_data.fetch import in_time
from gsa_data.shards import build_manifest
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer
from helpers.damage import empty

NAME = "chunk1/s1.jsonl.zst"
GOOD = [line(document(number)) for number in range(200)]
QUICK = Reading(retries=2, backoff_seconds=0.0)
SKIPPING = replace(QUICK, on_bad_shard="skip")
CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=4, seed=7, prefetch_blocks=8, reading=QUICK)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create three shards; the tests damage NAME."""
    write_corpus(tmp_path, num_shards=3, documents_per_shard=200)
    return tmp_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip_a_bit(path: Path) -> None:
    text = b"".join(text + b"\n" for text in GOOD)
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(text))
    packed[len(packed) // 2] ^= 0x10
    path.write_bytes(packed)


def with_bad_lines(path: Path) -> None:
    write_shard(path, GOOD + [b'{"text": "cut'] * 9)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # Fields: name: how to damage the shard, the error that stops a run, the counter of a run that skips.
    "truncated zstd": (truncate, r"s1\.jsonl\.zst is truncated or corrupt after \d+ bytes", "shards_damaged"),
    "bit flip": (flip_a_bit, r"s1\.jsonl\.zst is truncated or corrupt", "shards_damaged"),
    "empty file": (empty, "is truncated or corrupt", "shards_damaged"),
    "bad lines": (with_bad_lines, r"9 bad lines of 209 \(bad_json 9", "shards_bad_lines"),
    "gone after the start": (Path.unlink, r"s1\.jsonl\.zst is missing; restore it", "shards_missing"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_shard_stops_the_run_or_is_left_out(root: Path, tokenizer: Tokenizer, name: str) -> None:
    damage, message, counter = FAULTS[name]
    manifest = build_manifest(str(root))
    damage(root / NAME)
    if damage is not Path.unlink:
        manifest = build_manifest(str(root))
    with pytest.raises(DataFault, match=message):
        read_run(manifest, tokenizer, CONFIG, steps=40)
    counters = read_run(manifest, tokenizer, replace(CONFIG, reading=SKIPPING), steps=40).state()["counters"]
    assert counters[counter] >= 1
    assert skipped_totals(counters)["data_skipped_shards"] == counters[counter]
    assert "read_retries" not in counters  # waiting does not repair it


@pytest.mark.parametrize(
    ("bad", "counter"), [(b'{"text": "cut', "bad_json"), (line("x" * 5000), "huge_document")]
)
def test_a_bad_line_is_left_out_counted_and_logged(root, tokenizer, bad, counter, caplog):
    warn_once.cache_clear()
    write_shard(root / NAME, [*GOOD, bad])
    manifest, reading = build_manifest(str(root)), replace(QUICK, max_document_bytes=4999)
    parsed = read_documents(manifest, NAME, reading, Counter())
    assert parsed[-1] == counter
    assert all(isinstance(item, Document) for item in parsed[:-1])
    read_documents(manifest, NAME, reading, Counter())
    (message,) = caplog.messages  # once, however often the shard is read
    assert f"1 of 201 lines are left out ({counter} 1" in message

    config = replace(CONFIG, reading=reading)
    run = Run(manifest, tokenizer, config)
    while not run.state()["counters"].get(counter):
        run.step(16)
    resumed = read_run(manifest, tokenizer, config, steps=1, state=run.state())
    totals = skipped_totals(resumed.state()["counters"])
    assert totals["data_skipped_documents"] >= 1  # it continues after a resume
    assert totals["data_skipped_shards"] == 0


# Reads that fail or never end


def break_reads(monkeypatch: pytest.MonkeyPatch, plan: list[Any], clock: Clock | None = None) -> None:
    """Let the first reads of all files raise an error, end early, or never end."""
    whole_open = LocalFileSystem.open

    def open_broken(*arguments: Any, **options: Any) -> Any:
        file = whole_open(*arguments, **options)
        whole_read = file.read

        def read(count: int) -> bytes:
            fault = plan.pop(0) if plan else None
            if isinstance(fault, BaseException):
                raise fault
            if fault == "hangs" and clock is not None:
                clock.stand_still()
            return b"" if fault == "short" else bytes(whole_read(count))

        file.read = read
        return file

    monkeypatch.setattr(LocalFileSystem, "open", open_broken)


FAILURES = {
    "reset": ConnectionResetError("reset by peer"),
    "timeout": TimeoutError("timed out"),
    "fsspec timeout": FSTimeoutError(),
    "incomplete": IncompleteRead(b""),  # some libraries raise this, which is not an OSError
    "ended": EOFError("ended"),
    "short": "short",
    "hangs": "hangs",
}


@pytest.mark.parametrize("name", FAILURES)
def test_reads_that_fail_are_tried_again_and_then_reported(root, monkeypatch, name):
    fault = FAILURES[name]
    manifest, counters = build_manifest(str(root)), Counter[str]()
    expected = read_documents(manifest, NAME, QUICK, Counter())
    clock = stopped_clock(monkeypatch)
    break_reads(monkeypatch, [fault, fault], clock)
    assert read_documents(manifest, NAME, QUICK, counters) == expected
    assert counters == Counter(shards_read=1, read_retries=2)

    break_reads(monkeypatch, [fault] * 100, clock)
    with pytest.raises(DataFault, match=r"s1\.jsonl\.zst cannot be read after 2 retries"):
        read_documents(manifest, NAME, QUICK, counters)
    counters.clear()
    assert read_documents(manifest, NAME, SKIPPING, counters) == []
    assert counters == Counter(shards_unreadable=1, read_retries=2)
    assert clock.now == (8 * QUICK.timeout_seconds if fault == "hangs" else 0)


def test_other_errors_of_a_read_are_not_hidden(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = build_manifest(str(root))
    break_reads(monkeypatch, [ZeroDivisionError("a mistake in the program")])
    with pytest.raises(ZeroDivisionError):
        read_documents(manifest, NAME, QUICK, Counter())


def test_listing_is_tried_again_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = ConnectionResetError("reset")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=[reset, reset, *[DEFAULT] * 9], wraps=os.scandir))
    assert len(build_manifest(str(root), reading=QUICK).shards) == 3
    monkeypatch.setattr(os, "scandir", Mock(side_effect=reset))
    with pytest.raises(DataFault, match=r"cannot be read \(ConnectionResetError"):
        build_manifest(str(root), reading=QUICK)


def test_waits_are_bounded() -> None:
    assert Reading().waits_seconds == [0.5, 1, 2, 4, 8]
    assert Reading(retries=3, timeout_seconds=10).longest_wait_seconds == 43.5
    assert max(Reading(retries=5000).waits_seconds) == 60
    assert in_time(lambda: 7, 1.0) == 7


# Readers that die or hang


class Readers(NamedTuple):
    blocks: BlockStream
    workers: list[psutil.Process]
    iterator: Any
    """torch's iterator, which waits for them."""


@pytest.fixture
def readers(root: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readers]:
    iterators = []

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            iterators.append(super().__iter__())
            return iterators[-1]

    monkeypatch.setattr(rank_samples, "DataLoader", Loader)
    before = set(psutil.Process().children())
    blocks = BlockStream(build_manifest(str(root)), tokenizer, replace(CONFIG, num_workers=2), 0, 1)
    blocks.next_blocks(4)
    workers = [child for child in psutil.Process().children() if child not in before]
    assert len(workers) >= 2
    yield Readers(blocks, workers, *iterators)
    blocks.close()


@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_reader_that_dies_or_hangs_stops_the_run_soon(readers, kill_signal):
    assert readers.iterator._timeout == QUICK.longest_wait_seconds + rank_samples.HANG_SECONDS
    # torch's handler would raise an error at the first reader's death. It is off until all are dead or stopped.
    raises = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    for worker in readers.workers:
        os.kill(worker.pid, kill_signal)
    # /proc shows a zombie shortly before its signal is sent; this waits for both.
    for worker in readers.workers:
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    signal.signal(signal.SIGCHLD, raises)
    readers.iterator._timeout = 0.5  # not before they block, because working readers may be slow
    with pytest.raises(DataFault, match=r"a data reader died or hangs .*resume from the last checkpoint"):
        readers.blocks.next_blocks(400)
    _, alive = psutil.wait_procs(readers.workers, timeout=60)
    assert not alive  # a stopped process would keep this one from ending


def test_a_fault_in_a_reader_process_reads_as_in_this_one(root: Path, tokenizer: Tokenizer) -> None:
    truncate(root / NAME)
    manifest = build_manifest(str(root))
    messages = []
    for num_workers in (0, 1):
        with pytest.raises(DataFault) as raised:
            read_run(manifest, tokenizer, replace(CONFIG, num_workers=num_workers), steps=40)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("on_bad_shard", "ignore"), ("max_bad_line_fraction", 1.5), ("max_document_bytes", 0)],
        *[("retries", -1), ("timeout_seconds", 0.0)],
    ],
)
def test_wrong_policies_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Reading(**{field: value})
