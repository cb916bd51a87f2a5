"""Tests source weights: counts and errors; test_data_oracle.py compares the order with an oracle."""

import itertools
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpus import document, line, read_run, write_shard

from gsa_data import BlockStream, DataFault, Manifest, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import open_corpus
from gsa_data.indexed import HEADER, MAGIC
from gsa_data.source_weights import NO_SOURCE, tokens_by_source

L = 32
CONFIG = StreamConfig(
    L, num_lanes=12, seed=7, prefetch_blocks=24, source_weights={"Web": 0.3, "Books": 2.5, "Code": 0.0}
)
NUM_SHARDS, PER_SHARD = 4, 60


def source_of(number: int) -> str:
    """Return the source: half of the documents are Web, a sixth each is Books, Code and without a source."""
    return ("Web", "Books", "Web", "Code", "Web", "")[number % 6]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    root = tmp_path_factory.mktemp("mixed")
    for shard in range(NUM_SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        lines = [line(document(number), source_of(number)) for number in numbers]
        write_shard(root / f"s{shard}.jsonl.zst", lines)
    return build_manifest(str(root))


# What is refused


def with_weights(corpus: Any, tokenizer: Tokenizer, **weights: float) -> BlockStream:
    return BlockStream(corpus, tokenizer, replace(CONFIG, source_weights=weights), 0, 1)


def test_sources_without_documents(mixed, tokenizer, tmp_path):
    nothing = {"Web": 0.0, "Books": 0.0, "Code": 0.0, NO_SOURCE: 0.0}
    with pytest.raises(DataFault, match=r"no usable document in 100 epochs of .* with source_weights"):
        with_weights(mixed, tokenizer, **nothing).next_blocks(1)
    with pytest.raises(DataFault, match=r"no usable document in 100 epochs of .* larger weights"):
        with_weights(mixed, tokenizer, **dict.fromkeys(nothing, 1e-9)).next_blocks(1)
    for shard in range(120):  # more than chance leaves out
        write_shard(tmp_path / f"s{shard}.jsonl.zst", [line(document(shard), "Web")])
    one_lane = replace(CONFIG, num_lanes=1, source_weights=nothing)
    with pytest.raises(DataFault, match=r"no usable document in 4 epochs of .* with source_weights"):
        BlockStream(build_manifest(str(tmp_path)), tokenizer, one_lane, 0, 1).next_blocks(1)


def test_indexed_datasets_have_no_sources(tokenizer: Tokenizer, tmp_path: Path) -> None:
    index = HEADER.pack(MAGIC, 1, 8, 1, 2) + struct.pack("<iqqq", 3, 0, 0, 1)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(np.array([5, 6, tokenizer.eos_id], "<u2").tobytes())
    with pytest.raises(DataFault, match=r"megatron-core's datasets, which do not know the sources"):
        with_weights(open_corpus(str(tmp_path)), tokenizer, Web=0.5)
    run = read_run(open_corpus(str(tmp_path)), tokenizer, StreamConfig(L, num_lanes=1, seed=7), steps=1)
    assert set(itertools.chain(*run.samples.values())) == {5, 6, tokenizer.eos_id}
    assert set(tokens_by_source(run.state()["counters"])) == {NO_SOURCE}
