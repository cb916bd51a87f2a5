"""Tests which shards a folder contains: links, unreadable folders, other kinds of files, duplicate text."""

import gzip
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from data_corpus import document, line

from gsa_data import corpus
from gsa_data.corpus import open_corpus
from gsa_data.faults import DataFault, Reading
from gsa_data.shards import Manifest

TEXT = b"".join(line(document(number)) + b"\n" for number in range(40))
OTHER = b"".join(line(document(number)) + b"\n" for number in range(40, 90))


def write(path: Path, content: bytes = TEXT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def names(root: Path, on_bad_shard: Any = "fail") -> list[str]:
    corpus = open_corpus(str(root), reading=Reading(on_bad_shard))
    assert isinstance(corpus, Manifest)
    return [name for name, _ in corpus.shards]


def test_links_are_followed(tmp_path: Path) -> None:
    """huggingface_hub stores downloads as a folder of links."""
    write(tmp_path / "blobs" / "1", TEXT)
    write(tmp_path / "blobs" / "2", OTHER)
    write(tmp_path / "copied" / "a.jsonl", TEXT)
    write(tmp_path / "copied" / "chunk" / "b.jsonl", OTHER)
    linked, chunk = tmp_path / "linked", tmp_path / "chunk"
    linked.mkdir()
    chunk.mkdir()
    (linked / "a.jsonl").symlink_to("../blobs/1")
    (chunk / "b.jsonl").symlink_to(tmp_path / "blobs" / "2")
    (linked / "chunk").symlink_to(chunk)
    (tmp_path / "root").symlink_to(linked)
    for root in (linked, tmp_path / "root"):
        assert open_corpus(str(root)) == Manifest(str(root), open_corpus(str(tmp_path / "copied")).shards)


@pytest.mark.parametrize(("target", "message"), [("nowhere", "No such file"), ("..", "folder above it")])
def test_links_that_lead_nowhere_or_round_are_named(tmp_path: Path, target: str, message: str) -> None:
    write(tmp_path / "chunk" / "a.jsonl")
    (tmp_path / "chunk" / "b.jsonl").symlink_to(target)
    with pytest.raises(DataFault, match=rf"{message}.*chunk/b\.jsonl"):
        open_corpus(str(tmp_path))


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    write(tmp_path / "chunk1" / "a.jsonl")
    write(tmp_path / "chunk2" / "a.jsonl", OTHER)
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("chunk2"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    assert len(names(tmp_path)) == 2
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataFault, match=r"Permission denied.*chunk2"):
        open_corpus(str(tmp_path))


def test_neither_a_pipe_nor_a_file_in_place_of_a_folder_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    with pytest.raises(DataFault, match=r"a\.jsonl' is a file; give the folder it lies in"):
        open_corpus(str(tmp_path / "a.jsonl"))
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataFault, match=r"b.jsonl' has the name of a shard, and is a pipe, .*; remove it"):
        names(tmp_path)


def test_unusual_names(tmp_path: Path) -> None:
    found = sorted([".hidden.jsonl", "a b/part[0] ?*.jsonl", "a b/#%20é.jsonl"])
    for number, name in enumerate(found):
        write(tmp_path / "with space" / name, TEXT + OTHER[: OTHER.index(b"\n") * (number + 1)])
    assert names(tmp_path / "with space") == found


@pytest.mark.parametrize("name", [b"a::b.jsonl", b"caf\xe9.jsonl"])
def test_names_that_cannot_be_addressed(tmp_path: Path, name: bytes) -> None:
    write(Path(os.fsdecode(os.path.join(bytes(tmp_path), name))))
    with pytest.raises(DataFault, match="cannot be addressed; rename it"):
        open_corpus(str(tmp_path))


def test_the_log_says_what_is_read_and_what_not(tmp_path, caplog, monkeypatch):
    shards = "a.jsonl", "b.c/b.jsonl.zst", "b.c/v1.2.jsonl.gz"
    for name in (*shards, "README", "x.json.gz", "b.c/y.v2.json.gz", "z.txt"):
        write(tmp_path / name, TEXT + name.encode())
    (tmp_path / "link.txt").symlink_to("nowhere")
    caplog.set_level(logging.INFO, corpus.logger.name)
    assert len(names(tmp_path)) == len(shards)
    kinds = "1 *.jsonl, 1 *.jsonl.gz, 1 *.jsonl.zst"
    assert f"{tmp_path} holds text: {kinds}, 2.738e-05 GB together" in caplog.text
    assert "; not read: 1 *.README, 2 *.json.gz, 2 *.txt" in caplog.text
    assert "better split" not in caplog.text
    monkeypatch.setattr(corpus, "LARGE_SHARD_BYTES", len(TEXT))
    names(tmp_path)
    assert "holds a whole shard, so better split b.c/v1.2.jsonl.gz" in caplog.text


# Text that is there twice


@pytest.mark.parametrize(
    ("kept", "left_out"),
    [("a.jsonl", "a.jsonl.zst"), ("a.jsonl", "a.jsonl.gz"), ("a.jsonl.gz", "a.jsonl.zst")],
)
def test_a_shard_beside_its_packed_form_is_a_copy(tmp_path: Path, kept: str, left_out: str) -> None:
    """`zstd -d` and `gunzip -k` leave both files, so every document would come twice per epoch."""
    pack = {"jsonl": bytes, "zst": zstandard.compress, "gz": gzip.compress}
    for name in (kept, left_out):
        write(tmp_path / "chunk" / name, pack[name.rpartition(".")[2]](TEXT))
    write(tmp_path / "chunk" / "b.jsonl", OTHER)
    write(tmp_path / "chunk" / "b.jsonl.zst", zstandard.compress(TEXT + OTHER))  # it begins differently
    with pytest.raises(DataFault, match=rf"chunk/{left_out} is a copy of chunk/{kept} .*on_bad_shard=skip"):
        open_corpus(str(tmp_path))
    assert names(tmp_path, "skip") == [f"chunk/{kept}", "chunk/b.jsonl", "chunk/b.jsonl.zst"]


# Indexed datasets and text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("a.bin a.idx b.jsonl", r"both indexed datasets \(a\.idx\) and text \(b\.jsonl\)"),
        ("b.jsonl wiki/a.bin wiki/a.idx", r"both indexed datasets \(wiki/a\.idx\) and text \(b\.jsonl\)"),
        ("wiki/en/a.bin wiki/en/a.idx", r"wiki/en/a\.idx lies too deep; put .* one sub-folder for each"),
        ("wiki/a.bin wiki/a.idx wiki/b.bin", r"wiki/b\.idx is missing"),
    ],
)
def test_indexed_datasets_are_not_read_in_part(tmp_path: Path, files: str, message: str) -> None:
    for name in files.split():
        write(tmp_path / name)
    with pytest.raises(DataFault, match=message):
        open_corpus(str(tmp_path))


def test_an_idx_without_bin_is_no_dataset(tmp_path: Path) -> None:
    write(tmp_path / "chunk" / "a.jsonl")
    write(tmp_path / "chunk" / "a.idx")
    assert names(tmp_path) == ["chunk/a.jsonl"]
