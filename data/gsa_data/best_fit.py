"""Packing that cuts no document which fits into a block: `packing: best_fit`.

Best-fit packing of Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), done while
streaming. A lane keeps a pool of documents, oldest first. Each block takes, until nothing fits any more,

    the oldest document of the pool, then again and again the largest that fits into the room left (of equal ones
    the older); what then remains empty is FILLER.

A document longer than a block is cut: its whole blocks come first, one after another, with the stride of
concatenation (the last token of one opens the next), and its end, from that token on, stays in the pool as a document
of that length. So every token but a document's first is predicted from its own document exactly once; what stands
after an EOS is not to be predicted (pack.loss_mask).

The oldest goes first so that none waits longer than the pool has places, and a saved position never points far back;
starting with the largest fills blocks no better (measured). The pool grows by one document a block until it is full: a
pool filled at once would make the first blocks of a run out of long documents alone.
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
"""The pool takes more documents than requested until it holds this many blocks of text: with less choice
the last places of a block stay empty when documents are short."""

Pool = NDArray[np.int64]
"""[documents, fields of Cursor] cursors of documents, oldest first; each refers to the rest of its document."""

TOKEN_OFFSET = Cursor._fields.index("token_offset")
EMPTY_POOL: Pool = np.empty((0, len(Cursor._fields)), np.int64)

BLOCKS, PIECES = "packed_blocks", "packed_pieces"
"""Counters: blocks, and documents or parts of documents in them."""
DOCUMENTS, CUT_DOCUMENTS = "packed_documents", "packed_cut_documents"
"""Counters: documents whose first token is in a block, and how many of them are longer than a block."""
LABELS, FILLER_LABELS = "packed_labels", "packed_filler_labels"
"""Counters: labels of the blocks, and how many of them are FILLER."""
COUNTERS = (BLOCKS, PIECES, DOCUMENTS, CUT_DOCUMENTS, LABELS, FILLER_LABELS)


class PackedBlock(NamedTuple):
    tokens: Tokens
    """int32 [seq_len_tokens + 1]; FILLER at the end where no document fitted."""
    next_cursor: Cursor
    """First slot of the lane that was not read into the pool."""
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
    """Yields blocks of whole documents, each with the position after it.

    Args:
        documents: the lane's documents with their EOS from `start` on, each with its cursor. Endless.
        waiting: the pool of a saved position, or nothing.
        block_number: number of the lane's blocks before this position.
        seq_len_tokens: L; a block has room for documents of L + 1 tokens together.
        pool_documents: number of documents to choose from (more while they are less than MIN_POOL_BLOCKS blocks).
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
        longest = int(np.argmax(lengths > room))  # the oldest one longer than a block, else 0
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
    """Returns the pool's indices of one block's documents, in order: the oldest, then the largest that fit."""
    chosen = [0]
    free = lengths.copy()
    while True:
        room -= int(free[chosen[-1]])
        free[chosen[-1]] = 0
        fitting = np.where(free <= room, free, 0)
        largest = int(np.argmax(fitting))  # the first of equal ones
        if fitting[largest] == 0:
            return chosen
        chosen.append(largest)


def pool_of(rows: Iterable[Sequence[int]]) -> Pool:
    """Returns the pool for the cursors in a saved state."""
    return np.array([Cursor(*row) for row in rows], np.int64).reshape(-1, len(Cursor._fields))


def packing_shares(counters: Mapping[str, int]) -> dict[str, float | None]:
    """Returns the share of filler among labels, the share of documents that were cut, and documents per block, parts of
    documents included. None before the first block."""

    def ratio(part: str, whole: str) -> float | None:
        return counters.get(part, 0) / counters[whole] if counters.get(whole) else None

    return {
        "filler_share": ratio(FILLER_LABELS, LABELS),
        "cut_share": ratio(CUT_DOCUMENTS, DOCUMENTS),
        "documents_per_block": ratio(PIECES, BLOCKS),
    }
