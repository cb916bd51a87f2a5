"""Marks of a conversation's tokens: two bits above the id, which stay with the tokens in blocks.

A token without marks is its own id, so text has none. pack.FILLER is not a token: replace it by an id first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNSCORED = 1 << 29
"""Not predicted: outside the assistant's text. FILLER also has this bit."""
INSIDE = 1 << 28
"""Marks an EOS within a conversation, such as the end of a turn, which ends no document."""
TOKEN_ID = INSIDE - 1
"""Mask of the id's bits."""


def mark(tokens: NDArray[np.int32], is_scored: NDArray[np.bool_], eos_id: int) -> NDArray[np.int32]:
    """Mark a document [tokens] whose last token is its EOS."""
    inside = tokens == eos_id
    inside[-1] = False
    marked: NDArray[np.int32] = tokens | np.where(is_scored, 0, UNSCORED).astype(np.int32)
    marked[inside] |= INSIDE
    return marked
