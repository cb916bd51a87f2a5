"""Tests order and resume of a stream with reader processes; test_data_oracle.py compares random runs with an oracle."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_corpus import Run, line, read_run, write_shard

from gsa_data.faults import DataFault
from gsa_data.lanes import LaneReader
from gsa_data.pack import Cursor
from gsa_data.reader import TextReader
from gsa_data.shards import Manifest, build_manifest
from gsa_data.stream import BlockStream, StateMismatch, merge_states, replay_blocks
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)


@pytest.fixture(scope="module")
def reference(corpus: Manifest, tokenizer: Tokenizer) -> Run:
    """Run 12 steps of 16 samples without interruption on one rank."""
    return read_run(corpus, tokenizer, CONFIG, steps=12)


def lane_reader(manifest: Manifest, tokenizer: Tokenizer, config: StreamConfig) -> LaneReader:
    reader = TextReader(manifest, tokenizer, config.reading)
    return LaneReader(reader, config)


# The order


def test_the_checksum_of_a_step_names_its_text_and_order(corpus: Manifest, tokenizer: Tokenizer) -> None:
    def checksums(world_size: int = 1, **changes: Any) -> list[int]:
        run = Run(corpus, tokenizer, replace(CONFIG, **changes), world_size)
        found = []
        for _ in range(3):
            run.step(16, micro_batch_size=16 // world_size)
            found.append(sum(stream.checksum() for stream in run.streams))
        run.close()
        return found

    expected = checksums()
    assert len(set(expected)) == 3
    assert checksums(4) == checksums(2, num_workers=2) == expected
    assert not set(checksums(seed=8)) & set(expected)

    stream = BlockStream(corpus, tokenizer, CONFIG, 0, 1)
    assert stream.checksum() == 0
    blocks = stream.next_blocks(16)
    whole = blocks.copy()
    blocks[3, 5] += 1
    assert stream.checksum() != expected[0]
    blocks[:] = whole
    blocks[[3, 9]] = blocks[[9, 3]]
    assert stream.checksum() != expected[0]
    blocks[:] = whole
    assert stream.checksum() == expected[0]


def test_order_is_fixed_for_ever(corpus: Manifest, tokenizer: Tokenizer) -> None:
    """A saved run must resume on other machines and versions; a change here needs a new ORDER_VERSION."""
    units = lane_reader(corpus, tokenizer, CONFIG).units(epoch=3)
    assert len(units) == 5 * 7
    assert [tuple(unit) for unit in units[:3]] == [(f"chunk1/s{shard}.jsonl.zst", 1) for shard in (4, 0, 1)]
    pieces = lane_reader(corpus, tokenizer, CONFIG).pieces(0, Cursor(3, 0, 0, 0))
    first = [tokenizer.decode(tokens[:-1]).split(">")[0] for _, tokens in itertools.islice(pieces, 5)]
    assert ",".join(first) == "<175,<168,<189,<161,<196"


def test_lanes_of_a_small_corpus_are_about_equally_long(sample_folder: Path, tokenizer: Tokenizer) -> None:
    manifest = build_manifest(str(sample_folder / "train"))
    units = lane_reader(manifest, tokenizer, CONFIG).units(0)
    lengths = [len(units[lane :: CONFIG.num_lanes]) for lane in range(CONFIG.num_lanes)]
    assert min(lengths) >= 0.8 * max(lengths)


# Resume


@pytest.mark.parametrize(
    "runs",
    [
        # Fields of each run: ranks, workers, steps, samples per step.
        *[[(1, 0, 5, 16), (1, 0, 7, 16)], [(2, 2, 5, 16), (4, 1, 7, 16)], [(4, 1, 5, 16), (2, 0, 7, 16)]],
        *[[(1, 0, 5, 16), (4, 2, 7, 16)], [(8, 1, 5, 16), (1, 2, 7, 16)]],
        [(3, 2, 4, 18), (7, 0, 5, 14), (5, 1, 5, 10)],  # readers share lanes
    ],
    ids=str,
)
def test_resume_with_other_ranks_and_workers(corpus, tokenizer, reference, runs):
    samples: dict[int, list[int]] = {}
    state = None
    for ranks, workers, steps, size in runs:
        run = Run(corpus, tokenizer, replace(CONFIG, num_workers=workers), ranks, state)
        for _ in range(steps):
            run.step(size)
        state = copy.deepcopy(run.state())
        samples |= run.samples
        run.step(size)  # these are trained but never saved, because the run dies
        run.close()
    assert samples == reference.samples
    assert state == reference.state()  # counters count nothing twice


def test_a_shared_lane_needs_the_rank_that_had_its_last_block(corpus: Manifest, tokenizer: Tokenizer) -> None:
    run = Run(corpus, tokenizer, CONFIG, world_size=3)
    run.step(24)
    states = [stream.local_state() for stream in run.streams]
    for missing in range(3):
        with pytest.raises(ValueError, match=r"[56] of 8 lanes present; pass the states of all ranks"):
            merge_states(states[:missing] + states[missing + 1 :])
    assert merge_states(states[::-1]) == merge_states(states)
    run.streams[1].next_blocks(1)
    with pytest.raises(ValueError, match=r"disagree on consumed_samples \(24 and 27\)"):
        run.state()


# What is refused


def test_a_rank_is_below_the_number_of_ranks(corpus: Manifest, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="rank=2"):
        BlockStream(corpus, tokenizer, CONFIG, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("seq_len_tokens", 0), ("num_lanes", 0), ("prefetch_blocks", 0), ("num_workers", -1)],
        *[("packing", "worst_fit"), ("packing_pool_documents", 0)],
        *[("source_weights", {"Web": weight}) for weight in (-0.1, math.nan, math.inf, 100.5)],
    ],
)
def test_config_errors_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: value})


def test_lane_without_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_shard(tmp_path / "s0.jsonl.zst", [line("the only one"), line(" ")])
    stream = BlockStream(build_manifest(str(tmp_path)), tokenizer, CONFIG, 0, 1)
    with pytest.raises(DataFault, match=r"lane \d of 8 found no usable document.*fewer lanes"):
        stream.next_blocks(8)


# Around the stream


def test_leaves_the_random_state_alone_and_measures_waiting(corpus: Manifest, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    np.random.seed(0)
    before_numpy = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    for num_workers in (0, 1):
        stream = BlockStream(corpus, tokenizer, replace(CONFIG, num_workers=num_workers), 0, 1)
        blocks = stream.next_blocks(3)
        assert blocks.shape == (3, 33)
        assert blocks.dtype == np.int32
        assert stream.wait_seconds > 0
        stream.close()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == before_numpy  # type: ignore[index, union-attr]


def test_replay_gives_the_consumed_samples(corpus: Manifest, tokenizer: Tokenizer, reference: Run) -> None:
    chunks = list(replay_blocks(corpus, tokenizer, CONFIG, reference.state()))
    assert [len(chunk) for chunk in chunks] == [64, 64, 64]
    assert np.concatenate(chunks).tolist() == [reference.samples[sample] for sample in range(192)]
    end = read_run(corpus, tokenizer, CONFIG, steps=5).state()
    assert [len(chunk) for chunk in replay_blocks(corpus, tokenizer, CONFIG, end)] == [64, 16]


def test_replay_of_another_text_than_was_consumed_is_noticed(corpus, tokenizer, reference):
    """The run had other source weights, or another length, before a resume."""
    for change in ({"source_weights": {"Synthetic": 0.5}}, {"seq_len_tokens": 48}):
        config = replace(CONFIG, **change)  # type: ignore[arg-type]
        with pytest.raises(StateMismatch, match="the 192 sequences of the run are not what its config makes"):
            list(replay_blocks(corpus, tokenizer, config, reference.state()))
