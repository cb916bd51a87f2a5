"""What a token of a conversation says beside its id: two bits above it, which blocks carry wherever tokens go.

A token without marks is its own id, so text has none. pack.FILLER is no token: put another id in its place first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNSCORED = 1 << 29
"""Not to be predicted: no part of what the assistant writes. FILLER has this bit, too."""
INSIDE = 1 << 28
"""Of an EOS within a conversation, such as the end of a turn: it ends no document."""
TOKEN_ID = INSIDE - 1
"""The bits of the id."""


def mark(tokens: NDArray[np.int32], is_scored: NDArray[np.bool_], eos_id: int) -> NDArray[np.int32]:
    """A document [tokens] whose last token is its EOS, with its marks."""
    inside = tokens == eos_id
    inside[-1] = False
    marked: NDArray[np.int32] = tokens | np.where(is_scored, 0, UNSCORED).astype(np.int32)
    marked[inside] |= INSIDE
    return marked
