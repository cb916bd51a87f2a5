"""Tests counts and reports of best_fit packing; test_data_oracle.py compares its blocks with an oracle."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import verify
from data_corpus import read_run

from gsa_data import BlockStream, Manifest, StreamConfig, Tokenizer
from gsa_data.best_fit import best_fit, packing_shares
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER, LANE_START, Cursor
from gsa_data.stream import StateMismatch

EOS = 2
CONFIG = StreamConfig(
    seq_len_tokens=48, num_lanes=12, seed=7, prefetch_blocks=24, packing="best_fit", packing_pool_documents=6
)


def unequal_documents(seed: int, longest: int) -> Iterator[list[int]]:
    """Yield documents endlessly, whose tokens other than EOS occur in only one document."""
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


def test_the_report_of_verify(corpus, tokenizer, capsys):
    """Two lanes of 100 documents at 64 tokens are compared with blocks taken one by one."""
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
            # A label belongs to its input's block; a first token is with what follows it.
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
    assert (
        verify.main([corpus.root, *arguments[:-1], "64"]) == 0
    )  # no query of 64 tokens has more causal keys
    assert (
        "WARNING by concatenate (0.0%) and best_fit, pool of 5 (0.0%) fewer than" in capsys.readouterr().out
    )
    assert verify.main([corpus.root, *arguments, "--pool", "0"]) == 2


@pytest.mark.timeout(60)  # it once took documents from the empty lane forever
def test_the_report_of_verify_on_a_corpus_of_fewer_documents_than_lanes() -> None:
    with_empty, alone = (verify.best_fitted(lanes, 64, 4) for lanes in ([[70, 5], [], [9]], [[70, 5], [9]]))
    assert with_empty == alone
    assert verify.concatenated([[70, 5], [], [9]], 64) == verify.concatenated([[70, 5], [9]], 64)


def test_documents_that_fit_stay_whole_and_longer_ones_leave_a_rest() -> None:
    lanes = [[65, 66, 200], [3]]
    assert verify.best_fit_parts(lanes, 64).tolist() == [65, 64, 2, 64, 64, 64, 8, 3]
    assert verify.concatenated_parts([[65, 66], [3]], 64).tolist() == [64, 1, 63, 3, 3]
    assert verify.sparse_share(np.array([65, 64, 2]), 60) == 9 / 131


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
