"""Turns the joined projection of one new token per sequence into attention's inputs and cache entries: plain torch."""

from typing import NamedTuple

import torch

from gsa_kernels.checks import check_shape
from gsa_kernels.row_product.reference import Norm, row_product


class EntrySizes(NamedTuple):
    """Columns of the joined projection, in their order, and what they consist of."""

    q: int
    """H * D"""
    k: int
    """Hkv * D, the same as for v."""
    value_gate: int
    """Hkv * D, or 0 without gate G2."""
    gate: int
    """H * D, or 0 without gate G1."""
    index_heads: int
    """HI, 0 without an indexer. The indexer's key, its queries and its head weights follow: (1 + HI) * DI + HI."""
    head_dim: int
    """D"""
    index_dim: int
    """DI"""
    eps: float = 0.0
    """Epsilon of the norms of q and k."""

    @property
    def width(self) -> int:
        """Columns that are used; the projection may have more."""
        return self.q + 2 * self.k + self.value_gate + self.gate + self.index_width

    @property
    def index_width(self) -> int:
        """The indexer's share of the width."""
        return (1 + self.index_heads) * self.index_dim + self.index_heads if self.index_heads else 0


class Angles(NamedTuple):
    """Cosines and sines of the new tokens' positions. Only the leading channels of a head, their width, turn."""

    cos: torch.Tensor
    """[B, channels]"""
    sin: torch.Tensor
    index_cos: torch.Tensor | None = None
    """[B, channels] of the indexer; None: it is not rotated."""
    index_sin: torch.Tensor | None = None
    key_cos: torch.Tensor | None = None
    """[B, channels] of the indexer's key: with groups of keys, of the group's first. None: as of its queries."""
    key_sin: torch.Tensor | None = None


class AngleTable(NamedTuple):
    """Angles of all positions, and the numbers of tokens: kernels look up the new tokens' angles themselves."""

    values: torch.Tensor
    """[positions + 1, 2 channels + 2 index_channels]: row p + 1 has cosines and sines of position p, then the
    indexer's, with `keys_apart` then its key's; both channels of a pair have the same. So a sequence's new token has
    the row of its length."""
    lengths: torch.Tensor
    """int32 [B], the new token included; at most the positions."""
    channels: int
    index_channels: int
    """0: the indexer is not rotated."""
    keys_apart: bool = False
    """The indexer's key has other angles than its queries, in 2 index_channels more columns."""

    @property
    def width(self) -> int:
        return 2 * self.channels + 2 * (1 + self.keys_apart) * self.index_channels

    def angles(self) -> Angles:
        """Angles of the new tokens."""
        indexers = 2 * (1 + self.keys_apart) * (self.index_channels,) if self.index_channels else ()
        counts = (self.channels, self.channels, *indexers)
        return Angles(*self.values.index_select(0, self.lengths).split(counts, -1))


class JoinedProduct(NamedTuple):
    """All that a layer multiplies with its normalised input, and the norm."""

    weight: torch.Tensor
    """[N, d], rows as the columns of EntrySizes; N may be larger."""
    norm: Norm
    bias: torch.Tensor | None = None
    """[N]"""


class EntryCache(NamedTuple):
    """The caches of one layer."""

    k: torch.Tensor
    """[B, Hkv, Lk, D]"""
    v: torch.Tensor
    rows: torch.Tensor | None
    """[B, Lk, width]: the indexer's key, and where width has room for them its queries and head weights, then zeros."""


class Entered(NamedTuple):
    """What attention and selection take of the new tokens."""

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
) -> Entered:
    """v times sigmoid(G2), norms of q and k, rotation; keys, values and the indexer's row go into the cache.

    Args:
        projected: [B, at least sizes.width]
        slot: int64 [1], where in the cache
        norms: RMSNorm weights [D] of q and k
    """
    heads, width = sizes.head_dim, sizes.index_dim
    batch = projected.shape[0]
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
    if angles.index_cos is not None and angles.index_sin is not None:
        cos, sin = angles.index_cos, angles.index_sin
        index_queries = _turned(index_queries, cos[:, None], sin[:, None])
        key_angles = (cos, sin)
        if angles.key_cos is not None and angles.key_sin is not None:
            key_angles = (angles.key_cos, angles.key_sin)
        index_key = _turned(index_key, *key_angles)
    rows = cache.rows
    assert rows is not None
    row = index_key
    if rows.shape[-1] > width:
        row = torch.cat([index_key, index_queries.flatten(1), index_weights], -1)
        row = torch.nn.functional.pad(row, (0, rows.shape[-1] - row.shape[-1]))
    check_shape("row", row, "[B, width]", (batch, rows.shape[-1]))
    rows.index_copy_(1, slot, row[:, None])
    return Entered(q, heads_gate, index_queries[:, None], index_weights[:, None])


def enter_row(
    x: torch.Tensor,
    product: JoinedProduct,
    sizes: EntrySizes,
    table: AngleTable,
    cache: EntryCache,
    slot: torch.Tensor,
) -> Entered:
    """The joined product of x [B, d], and `enter_token`."""
    projected = row_product(x, product.weight, product.norm, product.bias)
    return enter_token(projected, sizes, table.angles(), cache, slot)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: of the first channels the pairs (i, i + channels / 2) turn."""
    channels = cos.shape[-1]
    turned, passed = x[..., :channels].float(), x[..., channels:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos.float() + torch.cat((-second, first), -1) * sin.float()
    return torch.cat((turned.to(x.dtype), passed), -1)
