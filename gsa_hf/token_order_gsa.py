"""Number the tokens of a sequence, which padding may interrupt. Letters in shapes are as in indexer_gsa.py."""

import torch
from transformers.cache_utils import Cache


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
