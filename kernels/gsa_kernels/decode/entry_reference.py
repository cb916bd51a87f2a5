"""Turns the joined projection of one new token per sequence into attention inputs and cache entries, in plain torch."""

from typing import NamedTuple

import torch

from gsa_kernels.row_product.reference import Norm, row_product


class EntrySizes(NamedTuple):
    """Holds the numbers of columns of each section of the joined projection, in order, and the head sizes."""

    q: int
    """H * D"""
    k: int
    """Hkv * D columns for k, and the same number for v."""
    value_gate: int
    """Hkv * D, or 0 without gate G2."""
    gate: int
    """H * D, or 0 without gate G1."""
    index_heads: int
    """HI; 0 without an indexer. The last (1 + HI) * DI + HI columns are the indexer's key, queries and head weights."""
    head_dim: int
    """D"""
    index_dim: int
    """DI"""
    eps: float = 0.0
    """Epsilon of the norms of q, k and the indexer."""

    @property
    def width(self) -> int:
        """Return the number of columns that are used; the projection may have more."""
        index = (1 + self.index_heads) * self.index_dim + self.index_heads if self.index_heads else 0
        return self.q + 2 * self.k + self.value_gate + self.gate + index


class Angles(NamedTuple):
    """Holds cosines and sines of the new tokens' positions. RoPE rotates only the first `channels` of a head."""

    cos: torch.Tensor
    """[B, channels]"""
    sin: torch.Tensor
    index_cos: torch.Tensor | None = None
    """[B, channels], cosines of the indexer; None if the indexer has no RoPE."""
    index_sin: torch.Tensor | None = None


class AngleTable(NamedTuple):
    """Holds the angles of all positions and the sequences' lengths, so that kernels look up the new tokens' angles."""

    values: torch.Tensor
    """[positions + 1, 2 channels + 2 index_channels]. Row p + 1 holds cosines and sines of position p for q and k, then
    for the indexer, equal in both channels of a pair. The length of a sequence is thus the number of its new token's
    row."""
    lengths: torch.Tensor
    """int32 [B], tokens of each sequence, including the new token; at most the number of positions."""
    channels: int
    index_channels: int
    """Rotated channels of an indexer head; 0 if the indexer has no RoPE."""

    @property
    def width(self) -> int:
        return 2 * self.channels + 2 * self.index_channels

    def angles(self) -> Angles:
        """Return the new tokens' angles."""
        indexers = 2 * (self.index_channels,) if self.index_channels else ()
        counts = (self.channels, self.channels, *indexers)
        return Angles(*self.values.index_select(0, self.lengths).split(counts, -1))


class JoinedProduct(NamedTuple):
    """Holds all weights that a layer multiplies with its normalised input, and the norm."""

    weight: torch.Tensor
    """[N, d], with rows in the order of the columns in `EntrySizes`. N may exceed the number of these columns."""
    norm: Norm
    bias: torch.Tensor | None = None
    """[N]"""
    index_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """RMSNorm weights [DI] of the indexer's queries and key."""


class EntryCache(NamedTuple):
    k: torch.Tensor
    """[B, Hkv, Lk, D]"""
    v: torch.Tensor
    index_keys: torch.Tensor | None
    """[B, Lk, DI], of the indexer."""


class Entered(NamedTuple):
    """Holds what attention and selection need from the new tokens."""

    q: torch.Tensor
    """[B, H, D]"""
    gate: torch.Tensor | None
    """[B, H, D], before the sigmoid."""
    index_queries: torch.Tensor | None
    """[B, 1, HI, DI]"""
    index_weights: torch.Tensor | None
    """[B, 1, HI]"""


def enter_token(
    projected: torch.Tensor,
    sizes: EntrySizes,
    angles: Angles,
    cache: EntryCache,
    slot: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    index_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Entered:
    """Apply gate G2, norms and RoPE to the projection, and write all keys and values to the cache.

    v is multiplied by sigmoid(G2). The norms and RoPE apply to q, to k, and to the indexer's queries and key.

    Args:
        projected: [B, at least sizes.width]
        slot: int64 [1], the index in the cache
        norms: RMSNorm weights [D] of q and k
        index_norms: RMSNorm weights [DI] of the indexer's queries and key
    """
    heads, width = sizes.head_dim, sizes.index_dim
    counts: tuple[int, ...] = (sizes.q, sizes.k, sizes.k, sizes.value_gate, sizes.gate)
    if sizes.index_heads:
        counts += (width, sizes.index_heads * width, sizes.index_heads)
    q, k, v, value_gate, gate, *index = projected[:, : sum(counts)].split(counts, -1)
    if sizes.value_gate:
        v = (v.float() * torch.sigmoid(value_gate.float())).to(v.dtype)
    q, k, v = (each.unflatten(-1, (-1, heads)) for each in (q, k, v))
    if norms is not None:
        q, k = (_normed(each, weight, sizes.eps) for each, weight in zip((q, k), norms, strict=True))
    q, k = (_turned(each, angles.cos[:, None], angles.sin[:, None]) for each in (q, k))
    cache.k.index_copy_(2, slot, k[:, :, None])
    cache.v.index_copy_(2, slot, v[:, :, None])
    heads_gate = gate.unflatten(-1, (-1, heads)) if sizes.gate else None
    if not sizes.index_heads:
        return Entered(q, heads_gate, None, None)
    index_key, index_queries, index_weights = index
    index_queries = index_queries.unflatten(-1, (-1, width))
    if index_norms is not None:
        pairs = zip((index_queries, index_key), index_norms, strict=True)
        index_queries, index_key = (_normed(each, weight, sizes.eps) for each, weight in pairs)
    if angles.index_cos is not None and angles.index_sin is not None:
        cos, sin = angles.index_cos, angles.index_sin
        index_queries = _turned(index_queries, cos[:, None], sin[:, None])
        index_key = _turned(index_key, cos, sin)
    assert cache.index_keys is not None
    cache.index_keys.index_copy_(1, slot, index_key[:, None])
    return Entered(q, heads_gate, index_queries[:, None], index_weights[:, None])


def enter_row(
    x: torch.Tensor,
    product: JoinedProduct,
    sizes: EntrySizes,
    table: AngleTable,
    cache: EntryCache,
    slot: torch.Tensor,
) -> Entered:
    """Compute the joined product of x [B, d], then call `enter_token`."""
    projected = row_product(x, product.weight, product.norm, product.bias)
    return enter_token(projected, sizes, table.angles(), cache, slot, index_norms=product.index_norms)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to the pairs (i, i + channels / 2) of the first channels."""
    channels = cos.shape[-1]
    turned, passed = x[..., :channels].float(), x[..., channels:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos.float() + torch.cat((-second, first), -1) * sin.float()
    return torch.cat((turned.to(x.dtype), passed), -1)
