"""Tests source weights: counts and errors; test_data_oracle.py compares the order with an oracle."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from data_corpus import document, line, read_run, write_shard
from test_data_indexed import write_indexed

from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.lanes import LaneReader
from gsa_data.prepare_tokens import prepare_tokens
from gsa_data.shards import build_manifest
from gsa_data.source_weights import NO_SOURCE, tokens_by_source
from gsa_data.stream import BlockStream
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=12, seed=9, prefetch_blocks=24)


def with_weights(corpus: Any, tokenizer: Tokenizer, **weights: float) -> BlockStream:
    return BlockStream(corpus, tokenizer, replace(CONFIG, source_weights=weights), 0, 1)


def test_sources_without_documents(corpus, tokenizer, tmp_path):
    nothing = {"Synthetic": 0.0, NO_SOURCE: 0.0}
    with pytest.raises(DataFault, match=r"no usable document in 80 epochs of .* with source_weights"):
        with_weights(corpus, tokenizer, **nothing).next_blocks(1)
    with pytest.raises(DataFault, match=r"no usable document in 100 epochs of .* larger weights"):
        with_weights(corpus, tokenizer, **dict.fromkeys(nothing, 1e-9)).next_blocks(1)
    for shard in range(120):  # more than chance leaves out
        write_shard(tmp_path / f"s{shard}.jsonl.zst", [line(document(shard))])
    one_lane = replace(CONFIG, num_lanes=1, source_weights=nothing)
    with pytest.raises(DataFault, match=r"no usable document in 4 epochs of .* with source_weights"):
        BlockStream(build_manifest(str(tmp_path)), tokenizer, one_lane, 0, 1).next_blocks(1)


def test_the_source_of_a_dataset_is_its_sub_folder(corpus, tokenizer, tmp_path):
    """The same text is prepared twice, and another program wrote two more datasets."""
    for name in ("wiki", "again"):
        prepare_tokens(corpus.root, tokenizer, tmp_path / name, 1, Reading())
    (tmp_path / "books").mkdir()
    for path, token in ((tmp_path / "books", 5), (tmp_path, 6)):
        write_indexed(path, "a", [np.array([token, tokenizer.eos_id])] * 600)
    folder, weights = open_corpus(str(tmp_path)), {"wiki": 0.5, "books": 1.5, "again": 0.0}
    lane = LaneReader(
        shard_reader(folder, tokenizer, Reading(), weights), StreamConfig(32, 1, 7, source_weights=weights)
    )
    documents = Counter(tuple(tokens) for _, tokens in islice(lane.pieces(0), 200 + 2 * 900 + 2 * 600))
    assert [documents.pop((token, tokenizer.eos_id)) for token in (5, 6)] == [1800, 1200]  # in two epochs
    assert (len(documents), set(documents.values())) == (200, {1})
    by_source = {"books": 3600, NO_SOURCE: 2400, "wiki": sum(map(len, documents))}
    assert tokens_by_source(lane.counters) == by_source
    for name in ("Web", "a"):
        with pytest.raises(
            DataFault, match=f"names {name}, but the sources .* are again, books, unknown, wiki;"
        ):
            with_weights(folder, tokenizer, wiki=0.5, **{name: 1.0})
    next((tmp_path / "wiki").glob("*.json")).unlink()
    with pytest.raises(DataFault, match=r"/wiki' holds 4 prepared datasets of a text with 5 shards"):
        open_corpus(str(tmp_path))


def test_sub_folders_mix_evenly_and_a_resume_is_exact(tokenizer, tmp_path):
    """The mixture would be uneven if a lane read a large part of one dataset at a time."""
    for name, token, count in (("a", 5, 80_000), ("b", 6, 20_000)):
        (tmp_path / name).mkdir()
        write_indexed(tmp_path / name, "text", [np.array([token, tokenizer.eos_id])] * count)
    corpus, config = (
        open_corpus(str(tmp_path)),
        replace(CONFIG, seq_len_tokens=128, num_lanes=4, source_weights={"a": 0.5}),
    )
    whole = read_run(corpus, tokenizer, config, steps=10)
    counts = Counter(token for sample in whole.samples.values() for token in sample)
    assert counts[6] / (counts[5] + counts[6]) == pytest.approx(5 / 15, abs=0.05)
    first = read_run(corpus, tokenizer, config, world_size=2, steps=2)
    workers = replace(config, num_workers=2)
    last = read_run(corpus, tokenizer, workers, world_size=4, steps=8, state=first.state())
    assert first.samples | last.samples == whole.samples
    assert last.state() == whole.state()
