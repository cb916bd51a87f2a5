"""best_fit packing against an oracle on lists, and as a part of the stream."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import verify
from data_corpus import Run, read_run

from gsa_data import BlockStream, Manifest, StreamConfig, Tokenizer
from gsa_data.best_fit import MIN_POOL_BLOCKS, best_fit, packing_shares
from gsa_data.faults import Reading
from gsa_data.lanes import LaneReader
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER, LANE_START, Cursor
from gsa_data.prepare_tokens import prepare_tokens
from gsa_data.reader import TextReader
from gsa_data.stream import StateMismatch

EOS = 2
CONFIG = StreamConfig(
    seq_len_tokens=48, num_lanes=12, seed=7, prefetch_blocks=24, packing="best_fit", packing_pool_documents=6
)
WEIGHTED = replace(CONFIG, source_weights={"Synthetic": 1.6})


def oracle(documents: Iterator[list[int]], seq_len: int, pool_documents: int) -> Iterator[list[int]]:
    pool: list[list[int]] = []
    room = seq_len + 1
    for number in itertools.count(1):
        while len(pool) < min(number, pool_documents) or sum(map(len, pool)) < MIN_POOL_BLOCKS * room:
            pool.append(next(documents))
        too_long = [text for text in pool if len(text) > room]
        if too_long:
            place = pool.index(too_long[0])
            yield pool[place][:room]
            pool[place] = pool[place][seq_len:]
            continue
        block = pool.pop(0)
        while fitting := [text for text in pool if len(text) <= room - len(block)]:
            best = max(fitting, key=len)  # the first of equal ones
            pool.remove(best)
            block = block + best
        yield block + [FILLER] * (room - len(block))


def unequal_documents(seed: int, longest: int) -> Iterator[list[int]]:
    """Endless; every token but the EOS is of one document only, so that no two are equal."""
    rng = random.Random(seed)
    number = 100
    while True:
        length = rng.randrange(1, longest)
        yield [*range(number, number + length), EOS]
        number += length


def packed(seed: int, longest: int, seq_len: int, pool: int, count: int) -> list[tuple[list[int], Any]]:
    pieces = (
        (Cursor(0, 0, place, 0), np.array(text, np.int32))
        for place, text in enumerate(unequal_documents(seed, longest))
    )
    blocks = best_fit(pieces, LANE_START, [], 0, seq_len, pool)
    return [(block.tokens.tolist(), block) for block, _ in zip(blocks, range(count), strict=False)]


@pytest.mark.parametrize(
    ("seq_len", "longest", "pool"), [(16, 12, 1), (40, 30, 8), (64, 300, 20), (400, 40, 3)]
)
def test_blocks_are_the_oracles(seq_len: int, longest: int, pool: int) -> None:
    found = packed(5, longest, seq_len, pool, 80)
    expected = oracle(unequal_documents(5, longest), seq_len, pool)
    assert [block for block, _ in found] == [next(expected) for _ in found]

    # Nothing lost, nothing twice, nothing cut that fits.
    texts = unequal_documents(5, longest)
    last = found[-1][1]
    read = [next(texts) for _ in range(last.next_cursor.document + 1)]
    waiting = {row[2]: row[3] for row in last.pool.tolist()}
    pairs = [pair for block, _ in found for pair in itertools.pairwise(block)]
    labels = Counter(label for before, label in pairs if before != EOS)  # those that are scored
    inputs = Counter(token for block, _ in found for token in block[:-1])
    at = {token: (block, place) for block, _ in found for place, token in enumerate(block) if token != EOS}
    for place, text in enumerate(read):
        end = waiting.get(place, len(text))
        if len(text) <= seq_len + 1:
            assert end in (0, len(text))
            if end:
                block, begin = at[text[0]]
                assert block[begin : begin + len(text)] == text
        else:  # an input once each, as far as it has left the pool
            assert all(inputs[token] == 1 for token in text[: min(end, len(text) - 1)])
        assert all(labels[token] == 1 for token in text[1 : end + 1] if token != EOS)
        assert labels[text[0]] == 0
        assert all(inputs[token] + labels[token] == 0 for token in text[end + 1 : -1])
    for block, each in found:
        first = block.index(FILLER) if FILLER in block else len(block)
        assert set(block[first:]) <= {FILLER}
        assert first == len(block) or block[first - 1] == EOS
        assert each.tokens.dtype == np.int32
        assert len(each.tokens) == seq_len + 1


def test_statistics_are_counted() -> None:
    found = packed(5, 300, 64, 20, 400)
    counters: Counter[str] = Counter()
    for _, block in found:
        counters.update(block.counters)
    filler = sum(block[1:].count(FILLER) for block, _ in found)
    begun = [block for block, _ in found]
    shares = packing_shares(counters)
    assert shares["filler_share"] == filler / (400 * 64)
    texts = unequal_documents(5, 300)
    read = [next(texts) for _ in range(found[-1][1].next_cursor.document + 1)]
    first_tokens = {token for block in begun for token in block}
    placed = [text for text in read if text[0] in first_tokens]
    assert counters["packed_documents"] == len(placed)
    assert shares["cut_share"] == sum(len(text) > 65 for text in placed) / len(placed)
    ends = sum(block[1:].count(EOS) for block in begun)
    assert counters["packed_pieces"] == ends + sum(block[-1] not in (EOS, FILLER) for block in begun)
    assert packing_shares({})["filler_share"] is None


def test_the_report_of_verify(
    corpus: Manifest, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lanes of 100 documents at 64 tokens, against blocks taken one by one."""
    arguments = ["--tokenizer", tokenizer.path, "--seq-len", "64", "--num-lanes", "2", "--pool", "5"]
    arguments += ["--k-base", "16"]
    assert verify.main([corpus.root, *arguments]) == 0
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(concatenate|best_fit, pool of 5) +(.*)$", printed, re.MULTILINE))

    lanes = verify.lane_lengths(corpus, tokenizer, 2)
    assert sum(map(len, lanes)) == 200
    cut = parts = blocks = 0
    for lengths in lanes:
        owners = [number for number, length in enumerate(lengths) for _ in range(length)]
        parts_of: dict[int, set[int]] = {}
        for place, (before, owner) in enumerate(itertools.pairwise(owners)):
            # A label is of the block in which its input stands; a first token is with what follows it.
            if before == owner or owners.count(owner) == 1:
                parts_of.setdefault(owner, set()).add(place // 64)
        cut += sum(len(part) > 1 for part in parts_of.values())
        parts, blocks = parts + sum(map(len, parts_of.values())), blocks + len(owners) / 64
    sparse = queries = 0
    for lengths in lanes:
        visible = 0
        owners = [number for number, length in enumerate(lengths) for _ in range(length)]
        for place, owner in enumerate(owners):
            visible = 1 if place % 64 == 0 or owners[place - 1] != owner else visible + 1
            sparse, queries = sparse + (visible > 16), queries + 1
    shares = [f"{cut / 200:.1%}", f"{parts / blocks:.2f}", f"{sparse / queries:.1%}"]
    assert rows["concatenate"].split() == ["0.00%", *shares]
    assert rows["best_fit, pool of 5"]
    assert "more than k_base = 16 keys; 75.0% across documents" in printed
    assert ("WARNING" in printed) == (sparse / queries < 0.5)
    assert verify.main([corpus.root, *arguments[:-1], "64"]) == 0  # no query of 64 tokens sees more
    assert (
        "WARNING by concatenate (0.0%) and best_fit, pool of 5 (0.0%) fewer than" in capsys.readouterr().out
    )
    assert verify.main([corpus.root, *arguments, "--pool", "0"]) == 2


@pytest.mark.timeout(60)  # it took documents from the empty lane for ever
def test_the_report_of_verify_on_a_corpus_of_fewer_documents_than_lanes() -> None:
    with_empty, alone = (verify.best_fitted(lanes, 64, 4) for lanes in ([[70, 5], [], [9]], [[70, 5], [9]]))
    assert with_empty == alone
    assert verify.concatenated([[70, 5], [], [9]], 64) == verify.concatenated([[70, 5], [9]], 64)


def test_documents_that_fit_stay_whole_and_longer_ones_leave_a_rest() -> None:
    lanes = [[65, 66, 200], [3]]
    assert verify.best_fit_parts(lanes, 64).tolist() == [65, 64, 2, 64, 64, 64, 8, 3]
    assert verify.concatenated_parts([[65, 66], [3]], 64).tolist() == [64, 1, 63, 3, 3]
    assert verify.sparse_share(np.array([65, 64, 2]), 60) == 9 / 131


# As a part of the stream


@pytest.fixture(scope="module")
def reference(corpus: Manifest, tokenizer: Tokenizer) -> Run:
    return read_run(corpus, tokenizer, WEIGHTED, steps=20, global_batch_size=24)


def test_lanes_are_packed_by_themselves(corpus: Manifest, tokenizer: Tokenizer, reference: Run) -> None:
    reader = LaneReader(TextReader(corpus, tokenizer, Reading()), 12, 7, True, WEIGHTED.source_weights)
    for lane in range(12):
        texts = (tokens.tolist() for _, tokens in reader.pieces(lane))
        blocks = oracle(texts, 48, 6)
        mine = [reference.samples[i] for i in sorted(reference.samples) if i % 12 == lane]
        assert len(mine) == 40
        assert mine == [next(blocks) for _ in mine]


@pytest.mark.parametrize(
    ("mapped", "world_size", "num_workers"), [(False, 4, 3), (True, 2, 1), (True, 4, 0), (False, 2, 0)]
)
def test_ranks_workers_and_tokens_change_nothing(
    corpus: Manifest,
    tokenizer: Tokenizer,
    tmp_path: Path,
    reference: Run,
    mapped: bool,
    world_size: int,
    num_workers: int,
) -> None:
    source = prepare_tokens(corpus.root, tokenizer, tmp_path, 1, Reading()) if mapped else corpus
    config = replace(WEIGHTED, num_workers=num_workers)
    run = read_run(source, tokenizer, config, world_size, steps=20, global_batch_size=24)
    assert run.samples == reference.samples
    assert run.state() == reference.state()


def test_resume_at_every_block(corpus: Manifest, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """From text to tokens and back, one block at a time; longer documents than blocks are in it."""
    mapped = prepare_tokens(corpus.root, tokenizer, tmp_path, 1, Reading())
    config = replace(
        CONFIG, num_lanes=2, seq_len_tokens=40, packing_pool_documents=12, source_weights={"Synthetic": 0.4}
    )
    whole = read_run(corpus, tokenizer, config, steps=20, global_batch_size=8)
    state, samples = None, {}
    for number in range(160):
        run = Run((corpus, mapped)[number % 2], tokenizer, config, 1, state)
        run.step(1)
        state = eval(repr(run.state()), {"__builtins__": {}})
        samples.update(run.samples)
    assert samples == whole.samples
    assert state == whole.state()
    assert state["counters"]["packed_cut_documents"] > 0
    assert state["counters"]["packed_filler_labels"] > 0
    assert max(cursor[0] for cursor in state["cursors"]) >= 1  # over the end of an epoch


def test_position_off_by_one_gives_other_blocks(corpus: Manifest, tokenizer: Tokenizer) -> None:
    whole = read_run(corpus, tokenizer, CONFIG, steps=16, global_batch_size=12)
    state = read_run(corpus, tokenizer, CONFIG, steps=4, global_batch_size=12).state()
    for damage in ("cursor", "pool", "order"):
        damaged = copy.deepcopy(state)
        if damage == "cursor":
            damaged["cursors"][3][4] -= 1  # the last document again
        elif damage == "pool":
            damaged["pools"][3].pop(2)
        else:
            damaged["pools"][3].reverse()
        run = read_run(corpus, tokenizer, CONFIG, steps=12, global_batch_size=12, state=damaged)
        assert any(run.samples[i] != whole.samples[i] for i in run.samples if i % 12 == 3)
        assert all(run.samples[i] == whole.samples[i] for i in run.samples if i % 12 != 3)


def test_change_of_sequence_length_loses_nothing(corpus: Manifest, tokenizer: Tokenizer) -> None:
    """Each document is input once, as far as it has left the pool, whatever lengths it was packed at."""
    state, blocks = None, []
    for seq_len in (48, 20, 90):
        config = replace(CONFIG, seq_len_tokens=seq_len, num_lanes=2)
        run = read_run(corpus, tokenizer, config, steps=3, global_batch_size=8, state=state)
        blocks += [run.samples[i] for i in sorted(run.samples)]
        state = run.state()
    assert state is not None
    reader = LaneReader(TextReader(corpus, tokenizer, Reading()), 2, CONFIG.seed, True)
    expected: Counter[int] = Counter()
    for lane, (end, pool) in enumerate(zip(state["cursors"], state["pools"], strict=True)):
        offset_of = {tuple(row[:3]): row[3] for row in pool}
        for cursor, tokens in reader.pieces(lane):
            if cursor[:3] > tuple(end[:3]):
                break
            expected.update(tokens[: offset_of.get(cursor[:3], len(tokens))].tolist())
    inputs = Counter(token for block in blocks for token in block[:-1])
    inputs.update(
        block[-1] for block in blocks if block[-1] == tokenizer.eos_id
    )  # a document's end is no input
    del inputs[FILLER]
    assert inputs == expected


# What is refused


def test_packing_is_fixed_for_a_run(corpus: Manifest, tokenizer: Tokenizer) -> None:
    plain = replace(CONFIG, packing="concatenate")
    state = read_run(corpus, tokenizer, plain, steps=1).state()
    with pytest.raises(
        StateMismatch, match="packing=concatenate, but this run has packing=best_fit; set packing=con"
    ):
        BlockStream(corpus, tokenizer, CONFIG, 0, 1, state)
    BlockStream(corpus, tokenizer, replace(plain, packing_pool_documents=9), 0, 1, state)  # unused there
    state = read_run(corpus, tokenizer, CONFIG, steps=1).state()
    with pytest.raises(
        StateMismatch, match="packing_pool_documents=6, but this run has packing_pool_documents=7"
    ):
        BlockStream(corpus, tokenizer, replace(CONFIG, packing_pool_documents=7), 0, 1, state)
    with pytest.raises(ValueError, match="packing='worst_fit'"):
        replace(CONFIG, packing="worst_fit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packing_pool_documents=0"):
        replace(CONFIG, packing_pool_documents=0)


def test_ngrams_leave_filler_out() -> None:
    block = np.array([[5, 6, EOS, 7, EOS, FILLER, FILLER]], np.int32)
    inputs, labels = scored_pairs(block, EOS, False)
    assert list(zip(inputs.tolist(), labels.tolist(), strict=True)) == [(5, 6), (6, EOS), (7, EOS)]
    inputs, labels = scored_pairs(block, EOS, True)
    assert list(zip(inputs.tolist(), labels.tolist(), strict=True)) == [(5, 6), (6, EOS), (EOS, 7), (7, EOS)]
