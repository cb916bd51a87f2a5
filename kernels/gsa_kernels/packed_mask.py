"""Converts packed masks to bool masks and back. A packed mask has one bit per key, in words of 32 bits. A word is a
uint32 that is stored as int32, because torch supports few operations on uint32."""

import torch


def int32_words(words: torch.Tensor) -> torch.Tensor:
    """Convert int64 values below 2^32 to the int32 values with the same bits. For values from 2^31 on, a cast alone
    would be undefined."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [..., Lk] into int32 [..., ceil(Lk / 32)]: bit s % 32 of word s // 32."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool mask")
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32))
    bits = padded.to(torch.int64) << torch.arange(32, device=mask.device)
    return int32_words(bits.sum(-1))


def unpack_mask(packed_mask: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Unpack int32 [..., W] to bool [..., num_keys]; the inverse of `pack_mask`."""
    if packed_mask.dtype != torch.int32 or packed_mask.shape[-1] != -(-num_keys // 32):
        raise ValueError(
            f"packed_mask is {packed_mask.dtype} {tuple(packed_mask.shape)}; pass int32 [..., ceil({num_keys} / 32)]"
        )
    bits = (packed_mask[..., None] >> torch.arange(32, dtype=torch.int32, device=packed_mask.device)) & 1
    return bits.bool().flatten(-2)[..., :num_keys]
