"""Words of 32 bits: uint32 values in tensors of int32, for torch calculates little in uint32."""

import torch


def int32_words(words: torch.Tensor) -> torch.Tensor:
    """int64 of 0 .. 2^32 - 1 -> int32 of the same bits. By value, since a cast of what does not fit is not defined."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
