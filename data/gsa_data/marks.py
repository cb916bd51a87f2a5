"""Mark the tokens of a conversation with two bits above the token id. UNSCORED is set if the loss skips the token.
INSIDE is set if the token is an EOS inside the conversation. When blocks are made, tokens keep their marks.

Tokens of plain text have no marks. The padding pack.FILLER is not a token, but its bits look like marks. Replace FILLER
by a token id before you read marks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UNSCORED = 1 << 29
"""The mark of a token outside the assistant's text, which the loss does not cover. FILLER also has this bit."""
INSIDE = 1 << 28
"""The mark of an EOS within a conversation, such as the end of a turn, which ends no document"""
TOKEN_ID = INSIDE - 1
"""The mask of the id's bits"""


def mark(tokens: NDArray[np.int32], is_scored: NDArray[np.bool_], eos_id: int) -> NDArray[np.int32]:
    """Mark a document, int32 [tokens]. Its last token is the document's EOS."""
    inside = tokens == eos_id
    inside[-1] = False
    marked: NDArray[np.int32] = tokens | np.where(is_scored, 0, UNSCORED).astype(np.int32)
    marked[inside] |= INSIDE
    return marked
