"""Tests a network share whose server is gone, so that no call returns. Each access must give up after a time limit, try
again, and then report the failure.

The limits use a clock that advances only in a hang (data_clock.py). A call without a limit raises `Hangs`.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from data_clock import Clock, stopped_clock
from data_corpus import document, write_corpus
from fsspec.implementations.memory import MemoryFileSystem
from test_data_indexed import write_indexed

from gsa_data import fetch
from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.fetch import Pulse, ReadError, in_time
from gsa_data.shards import Manifest
from gsa_data.tokenize import Tokenizer, TokenizerError

QUICK = Reading(retries=1, backoff_seconds=0.0, timeout_seconds=0.2)
SILENCE = r"no answer within 0\.2 s"


class Server:
    """Serves SilentFileSystem: the next `hangs` calls of one method never return."""

    def __init__(self, clock: Clock) -> None:
        self.method, self.hangs, self.connections = "", 0, 0
        self.clock = clock

    def silence(self, method: str, hangs: int) -> None:
        self.method, self.hangs = method, hangs

    def answer(self, method: str) -> None:
        if method == self.method and self.hangs > 0:
            self.hangs -= 1
            self.clock.stand_still()

    def before(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answered(*arguments: Any, **options: Any) -> Any:
            self.answer(method)
            return function(*arguments, **options)

        return answered


class SilentFileSystem(MemoryFileSystem):
    protocol = "silent"
    store: dict[str, Any] = {}  # noqa: RUF012 - as MemoryFileSystem has them
    pseudo_dirs = [""]  # noqa: RUF012
    server: Server

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.server.answer("connect")
        self.server.connections += 1
        super().__init__(*arguments, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("silent://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        # Tests let listings with and without sizes hang separately.
        method = "ls of a folder below" if "chunk" in path else "ls with sizes"
        self.server.answer(method if detail else "ls")
        return super().ls(path, detail=detail, **options)

    def cat_ranges(self, *arguments: Any, **options: Any) -> Any:
        self.server.answer("cat_ranges")
        return super().cat_ranges(*arguments, **options)

    def _open(self, *arguments: Any, **options: Any) -> Any:
        self.server.answer("open")
        return super()._open(*arguments, **options)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    SilentFileSystem.clear_instance_cache()
    SilentFileSystem.server = Server(stopped_clock(monkeypatch))
    return SilentFileSystem.server


@pytest.fixture
def share(server: Server, tmp_path: Path, tokenizer: Tokenizer) -> str:
    """Create two shards of one size, which are compared, and a tokenizer."""
    write_corpus(tmp_path, num_shards=1, documents_per_shard=20)
    shard = (tmp_path / "chunk1" / "s0.jsonl.zst").read_bytes()
    for name, content in (("s0", shard), ("s1", b"\0" * len(shard))):
        fsspec.filesystem("silent").pipe(f"/text/chunk1/{name}.jsonl.zst", content)
    fsspec.filesystem("silent").pipe("/t.model", Path(tokenizer.path).read_bytes())
    return "silent://text"


def open_text(address: str) -> Manifest:
    corpus = open_corpus(address, reading=QUICK)
    assert isinstance(corpus, Manifest)
    return corpus


@pytest.mark.parametrize("method", ["ls", "ls with sizes", "ls of a folder below", "cat_ranges", "connect"])
def test_a_connection_that_never_comes_or_a_listing_that_never_ends(share, server, method, caplog):
    what, failed = ("connection to", "connected to") if method == "connect" else ("data folder", "read")
    server.silence(method, hangs=1)
    assert len(open_text(share).shards) == 2
    assert server.hangs == 0
    assert caplog.messages == [f"{what} 'silent://text': no answer within 0.2 s; retry 1 of 1 in 0 s"]
    SilentFileSystem.clear_instance_cache()
    server.silence(method, hangs=2)
    message = rf"'silent://text' cannot be {failed} .*{SILENCE}.*its server answers"
    with pytest.raises(DataFault, match=message):
        open_corpus(share, reading=QUICK)


@pytest.mark.parametrize("method", ["connect", "open"])
def test_a_tokenizer_that_cannot_be_opened(share, server, tokenizer, method):
    SilentFileSystem.clear_instance_cache()
    server.silence(method, hangs=1)
    assert Tokenizer("silent://t.model", reading=QUICK).fingerprint == tokenizer.fingerprint
    SilentFileSystem.clear_instance_cache()
    server.silence(method, hangs=2)
    with pytest.raises(TokenizerError, match=rf"cannot be read .*{SILENCE}"):
        Tokenizer("silent://t.model", reading=QUICK)


def test_one_connection_is_kept(share, server, tokenizer, monkeypatch):
    """Reads share a connection, although every read has its own thread."""
    monkeypatch.undo()  # the clock
    before = server.connections
    manifest, counters = open_text(share), Counter[str]()
    reader = shard_reader(manifest, tokenizer, QUICK)
    assert len(reader.open(manifest.shards[0][0], 0, 1, counters)) == 20
    Tokenizer("silent://t.model", reading=QUICK)
    assert server.connections == before + 1


def test_a_library_s_error_of_a_connection_may_pass(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = type("SSHException", (Exception,), {"__module__": "paramiko.ssh_exception"})("no banner")
    monkeypatch.setattr(SilentFileSystem, "__init__", Mock(side_effect=error))
    with pytest.raises(DataFault, match=r"cannot be connected to .*SSHException\('no banner'\)"):
        open_corpus(share, reading=QUICK)


@pytest.mark.parametrize("function", ["stat", "memmap"])
def test_mapped_files_that_cannot_be_opened(server, tokenizer, tmp_path, monkeypatch, function):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_indexed(folder, "a", [tokenizer.encode(document(number)) for number in range(20)])
    owner = Path if function == "stat" else np
    monkeypatch.setattr(owner, function, server.before(function, getattr(owner, function)))

    def open_shard(hangs: int, counters: Counter[str]) -> int:
        corpus = open_corpus(str(folder), reading=QUICK)
        assert not isinstance(corpus, Manifest)
        server.silence(function, hangs)
        return len(shard_reader(corpus, tokenizer, QUICK).open(corpus.manifest.shards[0][0], 0, 1, counters))

    counters: Counter[str] = Counter()
    assert open_shard(1, counters) == 20
    assert (server.hangs, counters["read_retries"]) == (0, 1)
    with pytest.raises(DataFault, match=rf"cannot be read .*{SILENCE}"):
        open_shard(2, counters)
    if function == "stat":
        server.silence("stat", hangs=2)
        with pytest.raises(DataFault, match=rf"data folder .* cannot be read .*{SILENCE}"):
            open_corpus(str(folder), reading=QUICK)


@pytest.mark.parametrize("beats", [True, False])
def test_what_shows_signs_of_life_may_take_long(beats, server, monkeypatch):
    """The action takes 1.8 s, and its pulse beats every 0.15 s, or never."""
    pulse, left, outcome = Pulse(), iter(range(12)), Future[str]()

    def wait(outcomes: Any, timeout: float) -> None:
        server.clock.now += 0.15
        if beats:
            pulse.beat()
        if next(left, None) is None:
            outcome.set_result("done")

    monkeypatch.setattr(fetch, "in_background", lambda action: outcome)
    monkeypatch.setattr(fetch, "wait", wait)
    if beats:
        assert in_time(lambda: "done", 0.2, pulse) == "done"
        return
    with pytest.raises(ReadError, match="no answer within"):
        in_time(lambda: "done", 0.2, pulse)


def test_a_remote_folder_that_cannot_be_listed_is_not_passed_over(share, monkeypatch):
    fsspec.filesystem("silent").pipe("/text/chunk2/a.jsonl", b"{}")
    assert len(open_text(share).shards) == 3
    whole_ls = SilentFileSystem.ls

    def refused(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if "chunk1" in path:
            raise PermissionError(13, "Permission denied", path)
        return whole_ls(self, path, *arguments, **options)

    monkeypatch.setattr(SilentFileSystem, "ls", refused)
    with pytest.raises(DataFault, match=r"Permission denied.*chunk1"):
        open_corpus(share, reading=QUICK)
