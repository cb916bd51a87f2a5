import math
from collections import Counter

import numpy as np
import pytest

import gsa_data.ngram
from gsa_data.ngram import fit_ngrams

EOS, VOCAB = 2, 11
RNG = np.random.default_rng(0)
# The text is skewed, so that bigrams help; token 10 never occurs in training.
TRAIN = RNG.choice(10, size=(30, 8), p=RNG.dirichlet(np.ones(10))).astype(np.int32)
TEST = RNG.integers(0, VOCAB, size=(6, 8)).astype(np.int32)


def pairs(blocks: np.ndarray, attend: bool) -> list[tuple[int, int]]:
    return [
        (row[place], row[place + 1])
        for row in blocks.tolist()
        for place in range(len(row) - 1)
        if attend or row[place] != EOS
    ]


@pytest.mark.parametrize("merge_entries", [1, 10**9])
@pytest.mark.parametrize("attend", [True, False])
def test_against_brute_force(attend: bool, merge_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsa_data.ngram, "MERGE_ENTRIES", merge_entries)
    train = pairs(TRAIN, attend)
    labels, inputs = Counter(w for _, w in train), Counter(h for h, _ in train)
    bigrams = Counter(train)

    def unigram(w: int) -> float:
        return (labels[w] + 1) / (len(train) + VOCAB)

    def bigram(h: int, w: int) -> float:
        kinds = sum(pair[0] == h for pair in bigrams)
        return (bigrams[h, w] + kinds * unigram(w)) / (inputs[h] + kinds) if inputs[h] else unigram(w)

    model = fit_ngrams((TRAIN[i : i + 4] for i in range(0, 30, 4)), VOCAB, EOS, attend)
    for h in range(VOCAB):
        assert math.isclose(sum(bigram(h, w) for w in range(VOCAB)), 1)
        found = model.bigram(np.full(VOCAB, h), np.arange(VOCAB))
        assert np.allclose(found, [bigram(h, w) for w in range(VOCAB)], 1e-12)
    test = pairs(TEST, attend)
    expected_unigram = math.exp(-sum(math.log(unigram(w)) for _, w in test) / len(test))
    expected_bigram = math.exp(-sum(math.log(bigram(h, w)) for h, w in test) / len(test))
    assert math.isclose(model.unigram_perplexity([TEST[:2], TEST[2:]]), expected_unigram, rel_tol=1e-12)
    assert math.isclose(model.bigram_perplexity([TEST[:2], TEST[2:]]), expected_bigram, rel_tol=1e-12)


def test_a_large_vocabulary_does_not_overflow() -> None:
    model = fit_ngrams([np.array([[99_999, 99_998, 5]], np.int32)], 100_000, EOS, True)
    assert model.bigram_keys.tolist() == [99_998 * 100_000 + 5, 99_999 * 100_000 + 99_998]  # above 2**31


def test_what_cannot_be_fitted_or_scored() -> None:
    with pytest.raises(ValueError, match="vocab_size=5 is too small"):
        fit_ngrams([TRAIN], 5, EOS, True)
    with pytest.raises(ValueError, match="no training labels"):
        fit_ngrams([np.full((2, 4), EOS, np.int32)], VOCAB, EOS, attend_across_documents=False)
    with pytest.raises(ValueError, match="0 labels"):
        fit_ngrams([TRAIN], VOCAB, EOS, True).unigram_perplexity([])
