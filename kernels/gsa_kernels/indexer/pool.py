"""An indexer that scores groups of neighbouring keys by their mean (`pool` p): the definition, in plain torch.

Group g holds the positions g p to g p + p - 1 of the sequence. A query chooses among the earlier groups whose last
token is in the query's document. A group's mean therefore covers only its tokens in the document of its last token. The
keys of groups are [B, Lk, DI]: a group's key is at the group's first position, and the other positions are zero.
Tensors of groups have G = ceil(Lk / p) columns.
"""

from dataclasses import replace

import torch

from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.types import Geometry, Indexer


def pool_keys(keys: torch.Tensor, pool: int, document_starts: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of each group's keys, over the document of its last token: [B, Lk, DI], at the first of these tokens.

    A group's rotary angle is the one of this token; `to_first_positions` follows the rotation. The mean of a short last
    group, which no query chooses, is 0.

    Args:
        keys: [B, Lk, DI]; bf16 is added up in fp32
        document_starts: int [B, Lk], the position at which each key's document begins; 0 if None
    """
    check_shape("keys", keys, "[B, Lk, DI]", (None, None, None))
    check_at_least("pool", pool, 1)
    batch, length, _ = keys.shape
    groups = length // pool
    members = keys[:, : groups * pool].unflatten(1, (groups, pool))
    wide = members.to(torch.promote_types(keys.dtype, torch.float32))
    if document_starts is None:
        means = (_sum_in_order(wide) / pool).to(keys.dtype)[:, :, None]
        placed = torch.nn.functional.pad(means, (0, 0, 0, pool - 1))
    else:
        check_shape("document_starts", document_starts, "[B, Lk]", (batch, length))
        starts = document_starts[:, pool - 1 :: pool, None]
        positions = torch.arange(groups * pool, device=keys.device).view(groups, pool)
        counted = (positions >= starts)[..., None]
        number = counted.sum(2)
        means = (_sum_in_order(torch.where(counted, wide, 0)) / number).to(keys.dtype)[:, :, None]
        first = torch.maximum(starts, positions[:, :1]) == positions
        placed = torch.where(first[..., None], means, 0)
    return torch.nn.functional.pad(placed.flatten(1, 2), (0, 0, 0, length - groups * pool))


def to_first_positions(keys: torch.Tensor, pool: int) -> torch.Tensor:
    """The keys of `pool_keys`, perhaps rotated, each moved to the first position of its group."""
    return sum_over_groups(keys.transpose(1, 2), pool, keep_places=True).transpose(1, 2)


def pooled(indexer: Indexer, geometry: Geometry) -> Indexer:
    """Return the indexer with the keys of groups, as `select` and `indexer_loss` take it.

    Args:
        indexer: its keys are of single tokens. If it has a rotary embedding, each key is rotated by the angle of the
            first token of its group in its document, so that the mean of the keys is the rotated mean.
        geometry: of whole sequences
    """
    pool = geometry.indexer_pool
    if pool == 1:
        return indexer
    keys = pool_keys(indexer.keys, pool, geometry.document_starts)
    return replace(indexer, keys=to_first_positions(keys, pool))


def group_means(keys: torch.Tensor, pool: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean key of each whole group of a cache: [B, ceil(L_max / p), DI]; unspecified for other groups.

    Args:
        keys: [B, L_max, DI]
        starts: int [B], entries before each sequence, at which its first group begins; 0 if None
    """
    length = keys.shape[1]
    if starts is not None:
        entries = (starts[:, None] + torch.arange(length, device=keys.device)) % length
        keys = torch.take_along_dim(keys, entries[..., None], 1)
    members = torch.nn.functional.pad(keys, (0, 0, 0, -length % pool)).unflatten(1, (-1, pool))
    return (members.sum(2, dtype=torch.promote_types(keys.dtype, torch.float32)) / pool).to(keys.dtype)


def sum_over_groups(values: torch.Tensor, pool: int, keep_places: bool = False) -> torch.Tensor:
    """[..., Lk] of keys -> the sum over each group, from its first key to its last: [..., G].

    Args:
        keep_places: return [..., Lk], the sums at the groups' first positions, with zeros elsewhere
    """
    num_keys = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -num_keys % pool)).unflatten(-1, (-1, pool))
    sums = _sum_in_order(padded.transpose(-1, -2))
    if not keep_places:
        return sums
    return torch.nn.functional.pad(sums[..., None], (0, pool - 1)).flatten(-2)[..., :num_keys]


def _sum_in_order(members: torch.Tensor) -> torch.Tensor:
    """[..., p, any] -> [..., any]."""
    total = members[..., 0, :]
    for i in range(1, members.shape[-2]):
        total = total + members[..., i, :]
    return total


def earlier_groups(
    positions: torch.Tensor, document_starts: torch.Tensor | None, pool: int, num_keys: int
) -> torch.Tensor:
    """What each query chooses among: bool [B or 1, L, G].

    Args:
        positions: int64 [L], of the queries
        document_starts: int [B or 1, L], of the queries; 0 if None
    """
    groups = torch.arange(-(-num_keys // pool), device=positions.device)
    earlier = (groups < positions[:, None] // pool)[None]
    return earlier if document_starts is None else earlier & (groups >= document_starts[..., None] // pool)


def keys_of_groups(groups: torch.Tensor, positions: torch.Tensor, pool: int, num_keys: int) -> torch.Tensor:
    """The keys of the chosen groups, and of each query's own group, which the query reads up to itself.

    Args:
        groups: bool [B, L, G]
        positions: int64 [L], of the queries

    Returns:
        bool [B, L, Lk], to be cut to the causal keys
    """
    keys = torch.arange(num_keys, device=positions.device) // pool
    return groups.index_select(-1, keys) | (keys == positions[:, None] // pool)


def count_choices(visible: torch.Tensor, positions: torch.Tensor, pool: int) -> torch.Tensor:
    """The number of keys, or of groups, among which each query chooses.

    Args:
        visible: int [B, L], number of causal keys in the query's document
        positions: int [L], of the queries
    """
    return visible if pool == 1 else positions // pool - (positions + 1 - visible) // pool
