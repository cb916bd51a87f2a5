"""Tests masks of packed documents, and counts of packing; test_data_oracle.py compares blocks with an
oracle."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_corpus import read_run

from gsa_data.best_fit import best_fit, packing_shares
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER, LANE_START, Cursor, document_ids, document_starts, loss_mask
from gsa_data.shards import Manifest
from gsa_data.stream import BlockStream, StateMismatch
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer

EOS = 2
CONFIG = StreamConfig(
    seq_len_tokens=48, num_lanes=12, seed=7, prefetch_blocks=24, packing="best_fit", packing_pool_documents=6
)


@pytest.mark.parametrize("attend_across_documents", [True, False])
def test_documents_and_loss_mask_by_brute_force(attend_across_documents: bool) -> None:
    tokens = torch.randint(0, 5, (40, 23), generator=torch.Generator().manual_seed(0))
    tokens[0] = EOS
    ids, mask = document_ids(tokens, EOS), loss_mask(tokens, EOS, attend_across_documents)
    starts = document_starts(ids)
    assert (ids.dtype, mask.dtype, starts.dtype) == (torch.int32, torch.float32, torch.int32)
    assert torch.equal(document_starts(ids, query_start=3), starts[:, 3:])
    for row, row_ids, row_starts, row_mask in zip(tokens, ids, starts, mask, strict=True):
        document = start = 0
        for place, token in enumerate(row.tolist()):
            assert (row_ids[place], row_starts[place]) == (document, start)
            assert row_mask[place] == (0.0 if token == EOS and not attend_across_documents else 1.0)
            if token == EOS:
                document, start = document + 1, place + 1


def unequal_documents(seed: int, longest: int) -> Iterator[list[int]]:
    """Yield documents endlessly, whose tokens other than EOS occur in only one document."""
    rng = random.Random(seed)
    number = 100
    while True:
        length = rng.randrange(1, longest)
        yield [*range(number, number + length), EOS]
        number += length


def test_statistics_of_best_fit_are_counted() -> None:
    texts = list(zip(range(3000), unequal_documents(5, 300), strict=False))
    pieces = ((Cursor(0, 0, place, 0), np.array(text, np.int32)) for place, text in texts)
    made = best_fit(pieces, LANE_START, [], 0, 64, 20)
    found = [block for block, _ in zip(made, range(400), strict=False)]
    counters = sum((Counter(block.counters) for block in found), Counter[str]())
    blocks = [block.tokens.tolist() for block in found]
    shares = packing_shares(counters)
    assert shares["filler_share"] == sum(block[1:].count(FILLER) for block in blocks) / (400 * 64)
    seen = {token for block in blocks for token in block}
    placed = [text for _, text in texts if text[0] in seen]
    assert counters["packed_documents"] == len(placed)
    assert shares["cut_share"] == sum(len(text) > 65 for text in placed) / len(placed)
    ends = sum(block[1:].count(EOS) for block in blocks)
    assert counters["packed_pieces"] == ends + sum(block[-1] not in (EOS, FILLER) for block in blocks)
    assert packing_shares({})["filler_share"] is None


def test_packing_is_fixed_for_a_run(corpus: Manifest, tokenizer: Tokenizer) -> None:
    plain = replace(CONFIG, packing="concatenate")
    state = read_run(corpus, tokenizer, plain, steps=1).state()
    BlockStream(corpus, tokenizer, replace(plain, packing_pool_documents=9), 0, 1, state)  # unused there
    message = "packing=concatenate, but this run has packing=best_fit; set packing=con"
    with pytest.raises(StateMismatch, match=message):
        BlockStream(corpus, tokenizer, CONFIG, 0, 1, state)
    state = read_run(corpus, tokenizer, CONFIG, steps=1).state()
    message = "packing_pool_documents=6, but this run has packing_pool_documents=7"
    with pytest.raises(StateMismatch, match=message):
        BlockStream(corpus, tokenizer, replace(CONFIG, packing_pool_documents=7), 0, 1, state)


def test_ngrams_leave_filler_out() -> None:
    block = np.array([[5, 6, EOS, 7, EOS, FILLER, FILLER]], np.int32)
    for across, expected in (
        (False, [(5, 6), (6, EOS), (7, EOS)]),
        (True, [(5, 6), (6, EOS), (EOS, 7), (7, EOS)]),
    ):
        inputs, labels = scored_pairs(block, EOS, across)
        assert list(zip(inputs.tolist(), labels.tolist(), strict=True)) == expected
