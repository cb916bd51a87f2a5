import shutil
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zstandard
from data_corpus import document, line, write_shard

from gsa_data.faults import DataFault, Reading
from gsa_data.shards import build_manifest, read_lines

FAIL, SKIP = Reading("fail"), Reading("skip")
LINES = [line(document(number)) for number in range(3000)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "chunk1" / "s0.jsonl.zst"
    write_shard(path, LINES)
    return path


def read(root: Path, reading: Reading = FAIL) -> tuple[list[bytes], Counter[str]]:
    counters: Counter[str] = Counter()
    return read_lines(build_manifest(str(root)), "chunk1/s0.jsonl.zst", reading, counters), counters


def test_manifest_is_sorted_and_moves_with_its_folder(tmp_path: Path) -> None:
    for name in ("b/s2", "a/s10", "a/s9"):
        write_shard(tmp_path / "one" / f"{name}.jsonl.zst", [line(name)])
    (tmp_path / "one" / "notes.txt").write_text("no shard")
    manifest = build_manifest(str(tmp_path / "one"))
    assert [path for path, _ in manifest.shards] == ["a/s10.jsonl.zst", "a/s9.jsonl.zst", "b/s2.jsonl.zst"]
    assert all((tmp_path / "one" / path).stat().st_size == size for path, size in manifest.shards)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert build_manifest(str(tmp_path / "two") + "/").fingerprint == manifest.fingerprint
    write_shard(tmp_path / "two" / "b/s2.jsonl.zst", [line("longer than before")])
    assert build_manifest(str(tmp_path / "two")).fingerprint != manifest.fingerprint


def test_manifest_names_a_missing_or_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataFault, match=r"nowhere.*does not exist"):
        build_manifest(str(tmp_path / "nowhere"))
    with pytest.raises(DataFault, match=rf"{tmp_path.name}.*no file that matches"):
        build_manifest(str(tmp_path))


def test_a_web_server_lists_names_without_sizes(shard: Path) -> None:
    pytest.importorskip("aiohttp")
    handler = partial(SilentHandler, directory=str(shard.parents[1]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        manifest = build_manifest(f"http://127.0.0.1:{server.server_port}/")
        assert manifest.shards == (("chunk1/s0.jsonl.zst", shard.stat().st_size),)
        assert read_lines(manifest, "chunk1/s0.jsonl.zst", FAIL, Counter()) == LINES
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_reads_all_lines_of_all_frames(shard: Path) -> None:
    """The last line may lack a newline. `zstd --long=31` writes windows of 2 GiB."""
    assert read(shard.parents[1]) == (LINES, Counter(shards_read=1))
    frames = [b"\n".join(LINES[:7]) + b"\n", b"\n".join(LINES[7:])]
    shard.write_bytes(b"".join(map(zstandard.compress, frames)))
    assert read(shard.parents[1])[0] == LINES
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    shard.write_bytes(packer.compress(b"\n".join(LINES)) + packer.flush())
    assert read(shard.parents[1])[0] == LINES


def test_truncated_shard_keeps_the_whole_lines_of_earlier_frames(shard: Path) -> None:
    first, second = b"\n".join(LINES[:100]) + b"\n" + LINES[100][:9], LINES[100][9:] + b"\n"
    shard.write_bytes(zstandard.compress(first) + zstandard.compress(second)[:-3])
    assert read(shard.parents[1], SKIP)[0] == LINES[:100]


def test_shard_that_changed_since_the_manifest(shard: Path) -> None:
    manifest = build_manifest(str(shard.parents[1]))
    write_shard(shard, LINES[:50])
    with pytest.raises(DataFault, match="the manifest says"):
        read_lines(manifest, "chunk1/s0.jsonl.zst", FAIL, Counter())
    assert read_lines(manifest, "chunk1/s0.jsonl.zst", SKIP, Counter()) == LINES[:50]
