"""Pack documents into blocks of seq_len + 1 tokens. A block's EOS tokens set its document boundaries and loss mask."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.int32]
AnyTokens = NDArray[np.integer[Any]]
"""[tokens] of any integer type, because a mapped file may hold uint16. Blocks are always int32."""


class Cursor(NamedTuple):
    """Points to token `token_offset` of a document in one lane (lanes.py).

    A lane is one of the run's token streams. `unit` is an index into the units (parts of shards) that the lane reads in
    `epoch`. (`document`, `copy`) is the document's slot in the unit (source_weights.py). Without source weights,
    documents have `copy` 0.
    """

    epoch: int
    unit: int
    document: int
    token_offset: int
    copy: int = 0
    lines: int = 0
    """Number of lines of the unit when the lane opened it, or 0 if unknown. A resume needs this number to permute the
    lines in the same way, even if the file now has fewer lines."""


LANE_START = Cursor(0, 0, 0, 0)

FILLER = -1
"""Padding at the end of a block. The loss does not cover padding, and the model reads an EOS in its place."""


def pack(pieces: Iterable[tuple[Cursor, AnyTokens]], seq_len_tokens: int) -> Iterator[tuple[Tokens, Cursor]]:
    """Concatenate pieces and cut blocks [seq_len_tokens + 1], each with the cursor of the next block.

    A piece is a document with its EOS, together with the cursor of its first token. The last token of each block is
    also the first token of the next block. Every token except the very first is therefore a label exactly once. If the
    last tokens do not fill a block, they are dropped.
    """
    waiting: deque[tuple[Cursor, AnyTokens]] = deque()
    waiting_tokens = 0
    for piece in pieces:
        waiting.append(piece)
        waiting_tokens += len(piece[1])
        while waiting_tokens > seq_len_tokens:
            yield _take(waiting, seq_len_tokens), waiting[0][0]
            waiting_tokens -= seq_len_tokens


def _take(waiting: deque[tuple[Cursor, AnyTokens]], seq_len_tokens: int) -> Tokens:
    """Copy seq_len_tokens + 1 tokens from the front, and remove all of them except the last."""
    block = np.empty(seq_len_tokens + 1, dtype=np.int32)
    filled = 0
    while filled <= seq_len_tokens:
        cursor, tokens = waiting.popleft()
        part = tokens[: len(block) - filled]
        block[filled : filled + len(part)] = part
        filled += len(part)
    used = len(part) - 1  # the last token opens the next block
    waiting.appendleft((cursor._replace(token_offset=cursor.token_offset + used), tokens[used:]))
    return block


def document_ids(tokens: Tensor, eos_id: int) -> Tensor:
    """Returns the number (from 0) of each token's document in its row, int32 [B, L], for tokens [B, L].

    An EOS belongs to the document that it ends.
    """
    opens = torch.zeros_like(tokens, dtype=torch.int32)
    opens[:, 1:] = tokens[:, :-1] == eos_id
    return opens.cumsum(1, dtype=torch.int32)


def document_starts(document_ids: Tensor, query_start: int = 0) -> Tensor:
    """For each token from position `query_start` on, returns the position of its document's first token: int32 [B, L -
    query_start]. `document_ids`, int32 [B, L], must not decrease along a row."""
    document_ids = document_ids.contiguous()
    return torch.searchsorted(document_ids, document_ids[:, query_start:].contiguous(), out_int32=True)


def loss_mask(tokens: Tensor, eos_id: int, attend_across_documents: bool) -> Tensor:
    """Returns float32 [B, L] for input tokens [B, L]: 1 if the loss covers the label of the input, else 0.

    With isolated documents the label of an EOS is the start of another document, so it is not scored.
    """
    if attend_across_documents:
        return torch.ones_like(tokens, dtype=torch.float32)
    return (tokens != eos_id).float()
