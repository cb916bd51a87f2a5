"""Compute unigram and bigram baselines from the tokens that a model was trained on.

Both baselines score the same (input, label) pairs as the model. In the training text, c counts tokens and pairs, N is
the number of labels, and T(h) is the number of different labels that follow input h. V is the vocabulary size:

    P(w)   = (c(w) + 1) / (N + V)                          unigram, add-one
    P(w|h) = (c(h,w) + T(h) P(w)) / (c(h) + T(h))          bigram; P(w|h) = P(w) if c(h) = 0

The bigram is the interpolated Witten-Bell estimate: method C of Witten and Bell 1991, "The zero-frequency problem", in
the form of Chen and Goodman 1998, "An empirical study of smoothing techniques for language modeling".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gsa_data.marks import TOKEN_ID, UNSCORED
from gsa_data.pack import Tokens

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

MERGE_ENTRIES = 1 << 22  # this number of bigrams (64 MiB) is merged at once


@dataclass(frozen=True)
class NgramModel:
    """Holds the counts of the training pairs. Keys of bigrams, input * vocab_size + label, are sorted."""

    vocab_size: int
    eos_id: int
    attend_across_documents: bool
    unigram_counts: Int64s
    """[vocab_size] counts of each token as label: c(w)"""
    bigram_keys: Int64s
    bigram_counts: Int64s
    input_counts: Int64s
    """[vocab_size] counts of each token as input: c(h)"""
    input_kinds: Int64s
    """[vocab_size] numbers of different labels after each input: T(h)"""

    def unigram_perplexity(self, blocks: Iterable[Tokens]) -> float:
        """exp of the mean negative log-likelihood over the scored labels of [n, L + 1] blocks."""
        return self._perplexity(blocks, bigram=False)

    def bigram_perplexity(self, blocks: Iterable[Tokens]) -> float:
        """exp of the mean negative log-likelihood over the scored labels of [n, L + 1] blocks."""
        return self._perplexity(blocks, bigram=True)

    def unigram(self, labels: Int64s) -> Float64s:
        """Returns P(label), elementwise."""
        probability: Float64s = (self.unigram_counts[labels] + 1) / (
            self.unigram_counts.sum() + self.vocab_size
        )
        return probability

    def bigram(self, inputs: Int64s, labels: Int64s) -> Float64s:
        """Returns P(label | input), elementwise."""
        keys = inputs * self.vocab_size + labels
        places = np.searchsorted(self.bigram_keys, keys)
        places[places == len(self.bigram_keys)] = 0
        pair_counts = np.where(self.bigram_keys[places] == keys, self.bigram_counts[places], 0)
        seen, kinds = self.input_counts[inputs], self.input_kinds[inputs]
        unigram = self.unigram(labels)
        interpolated = (pair_counts + kinds * unigram) / np.maximum(seen + kinds, 1)
        return np.where(seen > 0, interpolated, unigram)

    def _perplexity(self, blocks: Iterable[Tokens], bigram: bool) -> float:
        total_nll, total_labels = 0.0, 0
        for block in blocks:
            inputs, labels = scored_pairs(block, self.eos_id, self.attend_across_documents)
            probability = self.bigram(inputs, labels) if bigram else self.unigram(labels)
            total_nll -= float(np.log(probability).sum())
            total_labels += len(labels)
        if total_labels == 0:
            raise ValueError(
                "perplexity of 0 labels is undefined; give at least one block with scored labels"
            )
        return math.exp(total_nll / total_labels)


def scored_pairs(blocks: Tokens, eos_id: int, attend_across_documents: bool) -> tuple[Int64s, Int64s]:
    """Returns the flattened inputs and labels of [n, L + 1] blocks where the label is scored."""
    wide: Int64s = blocks.astype(np.int64)  # input * vocab_size + label overflows int32
    inputs, labels = wide[:, :-1].reshape(-1), wide[:, 1:].reshape(-1)
    scored = (labels & UNSCORED) == 0  # also excludes FILLER
    if not attend_across_documents:
        scored &= (inputs & ~UNSCORED) != eos_id
    return inputs[scored] & TOKEN_ID, labels[scored] & TOKEN_ID


def fit_ngrams(
    blocks: Iterable[Tokens], vocab_size: int, eos_id: int, attend_across_documents: bool
) -> NgramModel:
    """Count the scored pairs of a stream of int32 [n, L + 1] blocks. The memory grows with the number of different
    bigrams, but not with the length of the stream.

    Raises ValueError for a token outside the vocabulary, and if there is no label.
    """
    unigram_counts = np.zeros(vocab_size, np.int64)
    input_counts = np.zeros(vocab_size, np.int64)
    merged = (np.empty(0, np.int64), np.empty(0, np.int64))
    chunks: list[tuple[Int64s, Int64s]] = []
    waiting_entries = 0
    for block in blocks:
        inputs, labels = scored_pairs(block, eos_id, attend_across_documents)
        if len(labels) == 0:
            continue
        largest = max(int(inputs.max()), int(labels.max()))
        if largest >= vocab_size:
            raise ValueError(f"vocab_size={vocab_size} is too small for token {largest}; use the tokenizer's")
        unigram_counts += np.bincount(labels, minlength=vocab_size)
        input_counts += np.bincount(inputs, minlength=vocab_size)
        chunks.append(np.unique(inputs * vocab_size + labels, return_counts=True))
        waiting_entries += len(chunks[-1][0])
        if waiting_entries > MERGE_ENTRIES:
            merged, chunks, waiting_entries = _merge([merged, *chunks]), [], 0
    bigram_keys, bigram_counts = _merge([merged, *chunks])
    if len(bigram_keys) == 0:
        raise ValueError("no training labels to count; give at least one block with scored labels")
    input_kinds = np.bincount(bigram_keys // vocab_size, minlength=vocab_size).astype(np.int64)
    return NgramModel(
        vocab_size,
        eos_id,
        attend_across_documents,
        unigram_counts,
        bigram_keys,
        bigram_counts,
        input_counts,
        input_kinds,
    )


def _merge(chunks: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """Sum the counts of equal keys, and return the sorted keys and the counts."""
    keys, places = np.unique(np.concatenate([keys for keys, _ in chunks]), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    np.add.at(counts, places, np.concatenate([counts for _, counts in chunks]))
    return keys, counts
