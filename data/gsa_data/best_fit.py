"""Pack documents into blocks without cutting a document that fits into a block (`packing: best_fit`).

This module packs a stream of documents by best fit (Ding et al. 2024, "Fewer Truncations Improve Language Modeling",
arXiv 2404.10830). A run has a fixed number of token streams, the lanes. Each lane keeps a pool of documents, oldest
first. A block is filled in three steps:

1. The block takes the oldest document in the pool.
2. The block repeatedly takes the largest document that still fits. Among equally long documents, it takes the oldest.
3. FILLER tokens fill the remaining space.

Documents longer than a block come first: whole blocks are cut from a document's start until the rest fits. The last
token of each cut block is also the first token of the next part. Every token except the document's first is therefore
predicted exactly once, in a block that also has the token before it. After an EOS, nothing is predicted
(pack.loss_mask).

Step 1 takes the oldest document, so no document stays in the pool for long. A saved position therefore refers only to
recently read documents. The pool starts small and grows by one document per block. Because step 2 prefers large
documents, a pool that started full would fill the first blocks mostly with long documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa_data.pack import FILLER, AnyTokens, Cursor, Tokens

MIN_POOL_BLOCKS = 4
"""Minimum amount of text in a pool, in blocks. If documents are short, a pool takes more than `pool_documents`
documents to reach this amount. Otherwise its documents could not fill a block."""

Pool = NDArray[np.int64]
"""[documents, fields of Cursor]: the cursor to the unread part of each document, oldest first"""

TOKEN_OFFSET = Cursor._fields.index("token_offset")
EMPTY_POOL: Pool = np.empty((0, len(Cursor._fields)), np.int64)

BLOCKS, PIECES = "packed_blocks", "packed_pieces"
"""Counters of blocks, and of the documents and parts of documents in blocks"""
DOCUMENTS, CUT_DOCUMENTS = "packed_documents", "packed_cut_documents"
"""Counters of documents whose first token is in a block, and of documents longer than a block"""
LABELS, FILLER_LABELS = "packed_labels", "packed_filler_labels"
"""Counters of the blocks' labels, and of the labels that are FILLER"""
COUNTERS = (BLOCKS, PIECES, DOCUMENTS, CUT_DOCUMENTS, LABELS, FILLER_LABELS)


class PackedBlock(NamedTuple):
    tokens: Tokens
    """int32 [seq_len_tokens + 1], with FILLER at the end if no document fits"""
    next_cursor: Cursor
    """The next document of the lane that the pool will read"""
    pool: Pool
    """The pool after this block."""
    counters: dict[str, int]


def best_fit(
    documents: Iterator[tuple[Cursor, AnyTokens]],
    start: Cursor,
    waiting: Iterable[tuple[Cursor, AnyTokens]],
    block_number: int,
    seq_len_tokens: int,
    pool_documents: int,
) -> Iterator[PackedBlock]:
    """Yields blocks of whole documents, each with the position after the block.

    Args:
        documents: the lane's endless documents from `start` on, with their EOS and cursors
        waiting: the documents that were in the pool at `start`, oldest first
        block_number: number of the lane's blocks before `start`
        seq_len_tokens: L; a block has L + 1 tokens
        pool_documents: size of the full pool, which is larger if documents are short (MIN_POOL_BLOCKS)
    """
    room = seq_len_tokens + 1
    held = list(waiting)
    texts = [tokens for _, tokens in held]
    pool = np.concatenate([EMPTY_POOL, *(np.array([cursor], np.int64) for cursor, _ in held)])
    lengths = np.array([len(tokens) for tokens in texts], np.int64)
    next_cursor = start
    for number in itertools.count(block_number):
        held, held_tokens = [], int(lengths.sum())
        wanted = min(pool_documents, number + 1)
        while len(texts) < wanted or held_tokens < MIN_POOL_BLOCKS * room:
            held.append(next(documents))
            texts.append(held[-1][1])
            held_tokens += len(texts[-1])
        if held:
            pool = np.concatenate([pool, np.array([cursor for cursor, _ in held], np.int64)])
            lengths = np.append(lengths, [len(tokens) for _, tokens in held])
            next_cursor = held[-1][0]._replace(token_offset=0, copy=held[-1][0].copy + 1)

        counters = Counter({BLOCKS: 1, LABELS: seq_len_tokens})
        longest = int(np.argmax(lengths > room))  # the oldest document longer than a block, or 0
        if lengths[longest] > room:
            offset = pool[longest, TOKEN_OFFSET]
            counters[PIECES] += 1
            counters.update({name: 1 for name in (DOCUMENTS, CUT_DOCUMENTS) if offset == 0})
            block = texts[longest][:room].astype(np.int32)
            pool = pool.copy()  # the previous array belongs to the last block
            pool[longest, TOKEN_OFFSET] += seq_len_tokens
            lengths[longest] -= seq_len_tokens
            texts[longest] = texts[longest][seq_len_tokens:]
        else:
            chosen = _choose(lengths, room)
            block = np.concatenate([*(texts[place] for place in chosen), np.empty(0, np.int32)])
            block = np.append(block, np.full(room - len(block), FILLER)).astype(np.int32)
            counters[PIECES] += len(chosen)
            counters[DOCUMENTS] += int((pool[chosen, TOKEN_OFFSET] == 0).sum())
            counters[FILLER_LABELS] += room - int(lengths[chosen].sum())
            pool, lengths = np.delete(pool, chosen, 0), np.delete(lengths, chosen)
            for place in sorted(chosen, reverse=True):
                del texts[place]
        yield PackedBlock(block, next_cursor, pool, dict(counters))


def _choose(lengths: NDArray[np.int64], room: int) -> list[int]:
    """Returns the indices in the pool of one block's documents: the oldest, then the largest that fit."""
    chosen = [0]
    free = lengths.copy()
    while True:
        room -= int(free[chosen[-1]])
        free[chosen[-1]] = 0
        fitting = np.where(free <= room, free, 0)
        largest = int(np.argmax(fitting))  # the oldest of equal lengths
        if fitting[largest] == 0:
            return chosen
        chosen.append(largest)


def pool_of(rows: Iterable[Sequence[int]]) -> Pool:
    """Returns the pool for the cursors in a saved state."""
    return np.array([Cursor(*row) for row in rows], np.int64).reshape(-1, len(Cursor._fields))


def packing_shares(counters: Mapping[str, int]) -> dict[str, float | None]:
    """Returns the share of labels that are padding (FILLER), the share of documents that are cut, and the mean number
    of pieces (documents or parts of them) in a block. The values are None before the first block."""

    def ratio(part: str, whole: str) -> float | None:
        return counters.get(part, 0) / counters[whole] if counters.get(whole) else None

    return {
        "filler_share": ratio(FILLER_LABELS, LABELS),
        "cut_share": ratio(CUT_DOCUMENTS, DOCUMENTS),
        "documents_per_block": ratio(PIECES, BLOCKS),
    }
