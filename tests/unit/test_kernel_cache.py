"""Tests the cache of compiled kernels. Processes share it, its kernels are complete, and a full disk does not stop a
run."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton import knobs

from gsa_train.config import RunConfig
from gsa_train.run import triton_cache
from gsa_train.run.kernel_cache import kernel_cache_in_words, prepare_kernel_cache
from gsa_train.run.triton_cache import DurableCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"):
        monkeypatch.delenv(name, raising=False)
    found: dict[str, str] = {}
    prepare_kernel_cache(RunConfig(dir=str(tmp_path / "runs")), found)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "runs" / ".triton_cache"


def test_who_says_where_is_heard_and_named() -> None:
    environment = {"TRITON_CACHE_DIR": "/mine", "TRITON_CACHE_MANAGER": "my:own"}
    prepare_kernel_cache(RunConfig(kernel_cache_dir="/fields"), environment)
    assert environment == {"TRITON_CACHE_DIR": "/mine", "TRITON_CACHE_MANAGER": "my:own"}
    said = kernel_cache_in_words(RunConfig(kernel_cache_dir="/fields"), environment)
    assert said.startswith("/mine (TRITON_CACHE_DIR of the environment instead of run.kernel_cache_dir = ")
    of_field: dict[str, str] = {}
    prepare_kernel_cache(RunConfig(kernel_cache_dir="/fields"), of_field)
    assert of_field["TRITON_CACHE_DIR"] == "/fields"


def test_another_process_finds_what_one_has_compiled(folder: Path) -> None:
    assert knobs.cache.dir == str(folder)
    assert knobs.cache.manager_class is DurableCache
    written = DurableCache("k1")
    group = {name: written.put(content, name) for name, content in (("a.cubin", b"\0\1"), ("a.json", "{}"))}
    written.put_group("a.json", group)
    again = DurableCache("k1")
    assert again.get_group("a.json") == group
    assert Path(group["a.cubin"]).read_bytes() == b"\0\1"
    assert Path(group["a.cubin"]).parent == folder / "k1"
    said = kernel_cache_in_words(RunConfig(dir=str(folder.parent)), os.environ)
    assert said.endswith("1 entries of earlier starts")


def test_ranks_that_write_one_kernel_at_once_leave_it_whole(folder: Path) -> None:
    content = os.urandom(200_000)

    def write_and_read(_: int) -> bool:
        return Path(DurableCache("k2").put(content, "a.cubin")).read_bytes() == content

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write_and_read, range(64)))
    assert [path.name for path in (folder / "k2").iterdir()] == ["a.cubin"]


def test_a_full_disk_leaves_nothing_and_costs_nothing(folder, monkeypatch, caplog):
    cache = DurableCache("k3")
    cache.put(b"before", "a.ttir")
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            patch.undo()
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(triton_cache.os, "fsync", full)
        path = Path(cache.put(b"kernel", "a.cubin"))
    assert path.read_bytes() == b"kernel"
    assert folder not in path.parents
    assert [each.name for each in (folder / "k3").iterdir()] == ["a.ttir"]
    assert "No space left on device" in caplog.text
    shutil.rmtree(folder)
    folder.write_text("in the way")  # of the folder, too
    assert Path(DurableCache("k4").put("text", "a.ptx")).read_text() == "text"
