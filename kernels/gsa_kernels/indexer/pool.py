"""An indexer that scores groups of neighbouring keys by their mean (`pool` p): the definition, in plain torch.

Groups are aligned in each document: the g-th holds its keys g p to g p + p - 1. A group's values stand at its
first key, and zeros at its other keys. A query selects among the complete groups before its own group. It always
reads its own group up to itself.
"""

from dataclasses import replace

import torch

from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.types import Geometry, Indexer


def firsts_of(geometry: Geometry, keys: torch.Tensor) -> torch.Tensor | None:
    """`group_firsts` of the indexer's keys [B, Lk, DI]; None where keys are selected singly."""
    if geometry.indexer_pool == 1:
        return None
    starts = geometry.document_starts
    if starts is None:
        starts = torch.zeros(keys.shape[:2], dtype=torch.int32, device=keys.device)
    return group_firsts(starts, geometry.indexer_pool)


def group_firsts(document_starts: torch.Tensor, pool: int) -> torch.Tensor:
    """The first key of each key's group: int64 [B, Lk].

    Args:
        document_starts: int [B, Lk], the position at which each key's document begins
        pool: p, at least 1
    """
    check_shape("document_starts", document_starts, "[B, Lk]", (None, None))
    check_at_least("pool", pool, 1)
    starts = document_starts.long()
    positions = torch.arange(starts.shape[1], device=starts.device)
    return starts + (positions - starts) // pool * pool


def pool_keys(keys: torch.Tensor, firsts: torch.Tensor, pool: int) -> torch.Tensor:
    """The sum over each group's keys, over p: of whole groups the mean. [B, Lk, DI], at the first keys, else 0.

    Args:
        keys: [B, Lk, DI]; bf16 is added up in fp32
        firsts: int64 [B, Lk], of `group_firsts`
    """
    check_shape("keys", keys, "[B, Lk, DI]", (*firsts.shape, None))
    dtype = torch.promote_types(keys.dtype, torch.float32)
    summed = sum_over_groups(keys.to(dtype).transpose(1, 2), firsts, pool).transpose(1, 2)
    return (summed / pool).to(keys.dtype)


def pooled(indexer: Indexer, geometry: Geometry) -> Indexer:
    """The indexer as `select` and `indexer_loss` take it, from one whose keys are of single tokens."""
    firsts = firsts_of(geometry, indexer.keys)
    if firsts is None:
        return indexer
    return replace(indexer, keys=pool_keys(indexer.keys, firsts, geometry.indexer_pool))


def group_means(keys: torch.Tensor, pool: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """The mean key of each whole group of a cache: [B, ceil(L_max / p), DI]; unspecified for other groups.

    Args:
        keys: [B, L_max, DI]
        starts: int [B], entries in front of each sequence, at which its first group begins; 0 if None
    """
    length = keys.shape[1]
    if starts is not None:
        entries = (starts[:, None] + torch.arange(length, device=keys.device)) % length
        keys = torch.take_along_dim(keys, entries[..., None], 1)
    members = torch.nn.functional.pad(keys, (0, 0, 0, -length % pool)).unflatten(1, (-1, pool))
    return (members.sum(2, dtype=torch.promote_types(keys.dtype, torch.float32)) / pool).to(keys.dtype)


def earlier_groups(
    firsts: torch.Tensor, causal: torch.Tensor, queries: torch.Tensor | None = None
) -> torch.Tensor:
    """What each query chooses among: bool [B, L, Lk], True at the first keys of the groups before the query's own.

    Args:
        firsts: int64 [B, Lk]
        causal: bool [B or 1, L, Lk]: the keys of its document up to each query
        queries: int64 [L], their positions; all Lk if None
    """
    own = firsts if queries is None else firsts[:, queries]
    positions = torch.arange(firsts.shape[1], device=firsts.device)
    return causal & (firsts == positions)[:, None] & (positions < own[..., None])


def keys_of_groups(
    groups: torch.Tensor, firsts: torch.Tensor, causal: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """The keys of the chosen groups, and of the query's own group up to the query: bool [B, L, Lk].

    Args:
        groups: bool [B, L, Lk], at first keys
    """
    own = firsts[:, queries, None] == firsts[:, None]
    return (groups.gather(-1, firsts[:, None].expand_as(groups)) | own) & causal


def sum_over_groups(values: torch.Tensor, firsts: torch.Tensor, pool: int) -> torch.Tensor:
    """[B, any, Lk] of keys -> the sum over each group, at its first key, else 0.

    From the group's first key to its last: a scatter would add in any order on a GPU.
    """
    check_shape("values", values, "[B, any, Lk]", (len(firsts), None, firsts.shape[1]))
    num_keys = firsts.shape[1]
    positions = torch.arange(num_keys, device=firsts.device)
    total = torch.where((firsts == positions)[:, None], values, 0)
    for i in range(1, min(pool, num_keys)):
        same_group = (firsts[:, i:] == positions[:-i])[:, None]
        of_member = torch.where(same_group, values[..., i:], 0)
        total = total + torch.nn.functional.pad(of_member, (0, i))
    return total


def whole_groups(
    attended: torch.Tensor, candidates: torch.Tensor, firsts: torch.Tensor, pool: int
) -> torch.Tensor:
    """The `candidates` whose keys a query attends to completely: bool [B, L, Lk], at first keys."""
    return candidates & (sum_over_groups(attended.expand(len(firsts), -1, -1).int(), firsts, pool) == pool)
