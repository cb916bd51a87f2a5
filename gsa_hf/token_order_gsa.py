"""Number the tokens of a sequence, which padding may interrupt. Letters in shapes are as in indexer_gsa.py."""

import torch
from transformers.cache_utils import Cache


def key_numbers(visible: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """For each slot, return the number of its token in the sequence, int64 [B, Lk]. The first token has number 0. A
    slot with padding has the number of the last token before it, or -1 if there is none.

    Args:
        visible: bool [B, L, Lk], the keys that each query may see
        slots: int64 [L], the slots of this forward pass's tokens
    """
    # If this pass has all slots, exactly the real tokens see themselves. Otherwise a row is one document, and its last
    # token is real and sees all real tokens.
    whole = visible.shape[-1] == len(slots)
    return (visible.diagonal(dim1=1, dim2=2) if whole else visible[:, -1]).cumsum(-1) - 1


def token_numbers(x: torch.Tensor, padding: torch.Tensor | None, cache: Cache | None) -> torch.Tensor:
    """Return the numbers of the tokens x [B, L, d] of this forward pass: int64 [B or 1, L].

    Args:
        padding: [B, slots], 0 at padding; ignored if it has another shape
        cache: does not have these tokens yet
    """
    length = x.shape[1]
    if isinstance(padding, torch.Tensor) and padding.ndim == 2:
        return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=x.device) + (0 if cache is None else cache.get_seq_length()))[None]
