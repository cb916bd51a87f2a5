"""Read the fixed text on which a model is scored: the first sequences of a split. On request, documents are also
grouped by source.

A dataset written by `prepare.py tokens` gives the same sequences as the original text, but holds only tokens. For both,
bits per byte therefore uses the bytes of the decoded tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa_data.corpus import Corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.marks import TOKEN_ID, UNSCORED
from gsa_data.pack import LANE_START, Tokens, pack
from gsa_data.reader import EncodedDocument, ShardLines
from gsa_data.tokenize import Tokenizer

MOST_THREADS = 16
DOCUMENTS_AT_ONCE = 128
"""The largest number of documents tokenized at once. The first batches are smaller, because a short set needs less."""


class TooLittleText(DataFault):
    """The split is readable, but has nothing to score at this length. A retry cannot help."""


@dataclass(frozen=True)
class ScoredText:
    """Holds sequences for a model to score, and the amount of text in their scored labels."""

    blocks: Tokens
    """int32 [n, L + 1]; tokens of conversations have marks (marks.py)"""
    lengths: NDArray[np.int64]
    """[n], the number of text labels in each sequence. The rest is padding, which is not scored."""
    scored_tokens: int
    """Number of scored labels, with EOS"""
    text_bytes: int
    """UTF-8 bytes of the scored text, without EOS and without the space that a tokenizer adds before a document"""


@dataclass(frozen=True)
class ValidationSet:
    name: str
    text: ScoredText
    by_source: dict[str, ScoredText]
    """The same documents by source, sorted by name; empty unless requested"""


class SourcedDocument(NamedTuple):
    source: str
    tokens: Tokens  # with the EOS


def read_validation_set(
    name: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    seq_len_tokens: int,
    max_blocks: int,
    reading: Reading,
    attend_across_documents: bool,
    split_by_source: bool,
) -> ValidationSet:
    """Read the first `max_blocks` sequences of a split (fewer if it is smaller), also grouped by source.

    To group by source, the documents of each source are concatenated, and the last sequence of each source is padded,
    so that no text is lost. If documents do not attend to each other, the sources together have as many scored tokens
    as the ungrouped sequences. A source without scored tokens is left out.

    Raises TooLittleText if the split is shorter than one sequence or has nothing to score, and DataFault if it cannot
    be read.
    """
    read: list[SourcedDocument] = []

    def documents() -> Iterator[Tokens]:
        for document in validation_documents(corpus, tokenizer, reading):
            if split_by_source:
                read.append(document)
            yield document.tokens

    root = str(corpus.root)
    blocks = _first_blocks(documents(), root, seq_len_tokens, max_blocks)
    lengths = np.full(len(blocks), seq_len_tokens)
    text = _scored_text(blocks, lengths, tokenizer, attend_across_documents)
    if text.scored_tokens == 0:
        raise TooLittleText(
            f"split {root!r}: no token of its first {len(blocks)} sequences of seq_len_tokens = {seq_len_tokens} "
            "can be scored; use another split, more of its sequences, or a larger seq_len_tokens"
        )

    by_source: dict[str, ScoredText] = {}
    tokens_left = len(blocks) * seq_len_tokens + 1
    tokens_of: dict[str, list[Tokens]] = {}
    for document in read:
        tokens_of.setdefault(document.source, []).append(document.tokens[:tokens_left])
        tokens_left = max(0, tokens_left - len(document.tokens))
    for source, parts in sorted(tokens_of.items()):
        filled, lengths = _fill_up(np.concatenate(parts), seq_len_tokens, tokenizer.eos_id)
        scored = _scored_text(filled, lengths, tokenizer, attend_across_documents)
        if scored.scored_tokens > 0:
            by_source[source] = scored
    return ValidationSet(name, text, by_source)


def validation_documents(corpus: Corpus, tokenizer: Tokenizer, reading: Reading) -> Iterator[SourcedDocument]:
    """Yields the tokenized documents of a split, with their EOS, in the order of shards and lines. If a shard is bad,
    the function raises DataFault, regardless of on_bad_shard."""
    reader = shard_reader(corpus, tokenizer, reading.for_validation())
    for relpath, _ in reader.manifest.shards:
        for line in _tokenized(reader.open(relpath, 0, 1, Counter())):
            if not isinstance(line, str):
                yield SourcedDocument(line.source, line.tokens.astype(np.int32))


def _tokenized(lines: ShardLines) -> Iterator[EncodedDocument | str]:
    """Yields a shard's lines in order, tokenized by several threads. The tokenizer libraries release the GIL."""
    first = 0
    while first < len(lines):
        count = min(max(first, MOST_THREADS), DOCUMENTS_AT_ONCE)
        places = range(first, min(first + count, len(lines)))
        # Each window of lines has its own pool, because the caller may fork between two documents, when no thread may
        # run.
        with ThreadPoolExecutor(min(MOST_THREADS, len(places))) as pool:
            found = [pool.submit(lines.__getitem__, place) for place in places]
        yield from (line.result() for line in found)
        first = places.stop


def is_scored(
    blocks: Tokens, lengths: NDArray[np.int64], eos_id: int, attend_across_documents: bool
) -> NDArray[np.bool_]:
    """Returns whether each label of [n, L + 1] blocks is scored, [n, L]. For text, the rule is pack.loss_mask. In
    conversations only the assistant's labels are scored. Padding is not scored."""
    inputs = blocks[:, :-1] & ~UNSCORED
    is_text: NDArray[np.bool_] = np.arange(inputs.shape[1]) < lengths[:, None]
    is_text &= (blocks[:, 1:] & UNSCORED) == 0
    return is_text if attend_across_documents else is_text & (inputs != eos_id)


def _first_blocks(documents: Iterable[Tokens], root: str, seq_len_tokens: int, max_blocks: int) -> Tokens:
    if max_blocks < 1:
        raise ValueError(f"max_blocks={max_blocks} must be at least 1")
    packed = pack(((LANE_START, tokens) for tokens in documents), seq_len_tokens)
    blocks = [block for block, _ in islice(packed, max_blocks)]
    if not blocks:
        raise TooLittleText(
            f"split {root!r} is shorter than one block of {seq_len_tokens + 1} tokens; "
            "use a larger split or shorter sequences (seq_len_tokens; in evaluate.py --context-length)"
        )
    return np.stack(blocks)


def _fill_up(stream: Tokens, seq_len_tokens: int, eos_id: int) -> tuple[Tokens, NDArray[np.int64]]:
    """Returns a whole stream as blocks [n, seq_len_tokens + 1] with stride seq_len_tokens, and each block's number of
    labels."""
    labels = len(stream) - 1
    starts = np.arange(0, labels, seq_len_tokens)
    missing = -labels % seq_len_tokens
    filled = np.append(stream, np.full(missing, eos_id, np.int32))
    blocks = filled[starts[:, None] + np.arange(seq_len_tokens + 1)]
    return blocks, np.minimum(labels - starts, seq_len_tokens)


def _scored_text(
    blocks: Tokens, lengths: NDArray[np.int64], tokenizer: Tokenizer, attend_across_documents: bool
) -> ScoredText:
    scored = is_scored(blocks, lengths, tokenizer.eos_id, attend_across_documents)
    labels = blocks[:, 1:][scored] & TOKEN_ID
    is_word = labels != tokenizer.eos_id
    is_first = (blocks[:, :-1][scored] & ~UNSCORED) == tokenizer.eos_id
    text_bytes = int(tokenizer.token_bytes[labels[is_word]].sum(dtype=np.int64))
    text_bytes -= tokenizer.front_bytes * int((is_first & is_word).sum())
    return ScoredText(blocks, lengths, len(labels), text_bytes)
