"""Cut text into sequences for scoring a model: packed as in training, or each document separately in windows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gsa_data.corpus import open_corpus
from gsa_data.faults import DEFAULT_READING, Reading
from gsa_data.pack import Tokens
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import ScoredText, is_scored, read_validation_set, validation_documents
from gsa_train.validation.requests import Request


@dataclass(frozen=True)
class Piece:
    """One sequence of a forward pass."""

    tokens: Tokens
    """int32 [m + 1]: m inputs, and the labels, shifted by one."""
    scored: NDArray[np.bool_]
    """[m] whether each label is scored"""
    positions: NDArray[np.int64]
    """[m] position of each input in its document: positions restart at a new document."""


@dataclass(frozen=True)
class Text:
    pieces: list[Piece]
    text_bytes: int
    """UTF-8 bytes of the scored labels' text."""


@dataclass(frozen=True)
class TextOptions:
    context_length: int
    stride: int | None
    """None: documents are packed as in training. Otherwise a window of `context_length` tokens moves over each document
    in steps of `stride` tokens, and only tokens that no earlier window has are scored."""
    max_tokens: int | None
    attend_across_documents: bool
    text_field: str = "text"
    reading: Reading = DEFAULT_READING
    """Limits for reading, which decide what is left out. A run's validation sets have the run's limits."""


def read_text(place: str, tokenizer: Tokenizer, options: TextOptions) -> Text:
    """
    Args:
        place: folder or address that training can read.

    Raises:
        ValueError, DataFault: the place cannot be read.
    """
    corpus = open_corpus(place, options.text_field, options.reading)
    if options.stride is None:
        most = -(-options.max_tokens // options.context_length) if options.max_tokens else sys.maxsize
        found = read_validation_set(
            "",
            corpus,
            tokenizer,
            options.context_length,
            most,
            options.reading,
            options.attend_across_documents,
            split_by_source=False,
        )
        return Text(packed(found.text, tokenizer.eos_id, options), found.text.text_bytes)
    pieces: list[Piece] = []
    text_bytes = tokens = 0
    front_bytes = tokenizer.front_bytes
    for document in validation_documents(corpus, tokenizer, options.reading):
        inside = document.tokens[:-1]
        if options.max_tokens:
            inside = inside[: options.max_tokens - tokens]
        pieces += windows(inside, tokenizer.eos_id, options.context_length, options.stride)
        text_bytes += int(tokenizer.token_bytes[inside].sum(dtype=np.int64))
        text_bytes -= front_bytes if len(inside) else 0
        tokens += len(inside)
        if tokens == options.max_tokens:
            break
    if not pieces:
        raise ValueError(f"{place}: no token to score")
    return Text(pieces, text_bytes)


def words_of(place: str, tokenizer: Tokenizer, count: int, text_field: str, reading: Reading) -> list[str]:
    """Returns the first `count` words (separated by white space) of a text, or all words of a shorter text.

    Raises:
        ValueError, DataFault: the place cannot be read, or has no words.
    """
    found: list[str] = []
    for document in validation_documents(open_corpus(place, text_field, reading), tokenizer, reading):
        found += tokenizer.decode(document.tokens[:-1]).split()
        if len(found) >= count:
            break
    if not found:
        raise ValueError(f"{place}: no word in it")
    return found[:count]


def packed(text: ScoredText, eos_id: int, options: TextOptions) -> list[Piece]:
    """Returns the pieces of a validation set. Positions restart at each document unless training attends across."""
    scored = is_scored(text.blocks, text.lengths, eos_id, options.attend_across_documents)
    places = np.arange(text.blocks.shape[1] - 1)
    pieces = []
    for block, counts in zip(text.blocks, scored, strict=True):
        starts = np.zeros_like(places)
        if not options.attend_across_documents:
            opens = np.flatnonzero(block[:-2] == eos_id) + 1
            starts[opens] = opens
        pieces.append(Piece(block, counts, places - np.maximum.accumulate(starts)))
    return pieces


def as_piece(request: Request) -> Piece:
    """Returns the request as a piece for a separate forward pass."""
    places = np.arange(len(request.tokens) - 1)
    return Piece(request.tokens, places >= len(places) - request.scored, places)


def windows(document: Tokens, eos_id: int, context_length: int, stride: int) -> Iterator[Piece]:
    """Prepends an EOS to the document, then yields windows. Each token of the document is scored in one window.

    Args:
        document: [tokens], without EOS.
    """
    tokens = np.concatenate([np.array([eos_id], np.int32), document.astype(np.int32)])
    done = 0
    while done < len(document):
        end = min(done + (stride if done else context_length), len(document))
        start = max(0, end - context_length)
        places = np.arange(end - start)
        yield Piece(tokens[start : end + 1], places + start >= done, places)
        done = end
