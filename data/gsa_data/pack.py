"""Documents to blocks of seq_len + 1 tokens, and what the model derives from the EOS tokens in a block."""

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
"""[tokens] of any integer type: a mapped file holds uint16. Blocks are always int32."""


class Cursor(NamedTuple):
    """A place in one lane: token `token_offset` of slot (document, copy) of the lane's unit `unit`.

    Without weights of sources there are no copies, and slot (document, 0) is the unit's document `document`.
    Positions saved before there were copies and lines lack these; 0 lines are not known.
    """

    epoch: int
    unit: int
    document: int
    token_offset: int
    copy: int = 0
    lines: int = 0
    """Of the unit when the lane opened it, from which its order is drawn: a resume may find fewer."""


LANE_START = Cursor(0, 0, 0, 0)

FILLER = -1
"""In a block: a place that no text is left for. Nothing is predicted there, and the model sees an EOS."""


def pack(pieces: Iterable[tuple[Cursor, AnyTokens]], seq_len_tokens: int) -> Iterator[tuple[Tokens, Cursor]]:
    """Concatenate pieces and cut blocks [seq_len_tokens + 1], each with the cursor of the next block.

    A piece is the cursor of its first token and its tokens (one document with its EOS). The stride is
    seq_len_tokens: the last token of a block opens the next one, so that each token is a label exactly once,
    and a cursor always points into a document already seen. A rest too short for a block is dropped, which
    only happens when `pieces` ends.
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
    """Copy seq_len_tokens + 1 tokens from the front and remove all but the last of them."""
    block = np.empty(seq_len_tokens + 1, dtype=np.int32)
    filled = 0
    while filled <= seq_len_tokens:
        cursor, tokens = waiting.popleft()
        part = tokens[: len(block) - filled]
        block[filled : filled + len(part)] = part
        filled += len(part)
    used = len(part) - 1  # the last token is the first of the next block
    waiting.appendleft((cursor._replace(token_offset=cursor.token_offset + used), tokens[used:]))
    return block


def document_ids(tokens: Tensor, eos_id: int) -> Tensor:
    """Number the documents of each row: [B, L] int tokens -> [B, L] int32, counting from 0.

    The EOS belongs to the document it ends; the token after it opens the next.
    """
    opens = torch.zeros_like(tokens, dtype=torch.int32)
    opens[:, 1:] = tokens[:, :-1] == eos_id
    return opens.cumsum(1, dtype=torch.int32)


def document_starts(document_ids: Tensor, query_start: int = 0) -> Tensor:
    """First position of the document of each token from `query_start` on: int32 [B, L] ids, which never decrease along
    a row -> int32 [B, L - query_start]."""
    document_ids = document_ids.contiguous()
    return torch.searchsorted(document_ids, document_ids[:, query_start:].contiguous(), out_int32=True)


def loss_mask(tokens: Tensor, eos_id: int, attend_across_documents: bool) -> Tensor:
    """Which labels are scored: [B, L] int input tokens -> [B, L] float32 of 0 and 1.

    With isolated documents an EOS input would have to guess the next document from nothing, so it scores 0.
    """
    if attend_across_documents:
        return torch.ones_like(tokens, dtype=torch.float32)
    return (tokens != eos_id).float()
