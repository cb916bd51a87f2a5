"""The indexer loss (GSA, equation 15) over groups of neighbouring keys (`Geometry.indexer_pool` p).

The target is the sum of attention over each group's keys. Under a packed mask, or over all groups, the rows are the
ones of `selection/groups.py`. They cost 1 / p of a loss over single keys; their target is not cheaper. Over key lists
the loss and its target are calculated for the listed groups alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import GATHERED_LOSS_BYTES, LOSS_CHUNK_BYTES
from gsa_kernels.loss.gathered import gathered_indexer_loss
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.groups import rows_of_groups
from gsa_kernels.types import Geometry, Indexer, RowSample, Selection


def group_indexer_loss(
    indexer: Indexer,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry,
    rows: RowSample,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as in `api.indexer_loss`. Sampling takes whole groups of queries, or tiles of key lists."""
    if selection is not None and selection.group_mask is None and selection.group_lists is None:
        raise ValueError("selection has no groups; pass what select makes with this geometry")
    if selection is not None and selection.key_lists is not None:
        return _over_lists(indexer, partial(head_sum_probs_lists, q, k, lse), selection, geometry, rows)
    group_rows = rows_of_groups(geometry, q.shape[1])
    pool, of_rows = group_rows.pool, group_rows.indexer(indexer)
    packed_mask = group_mask = None
    if selection is not None and selection.group_mask is not None:
        packed_mask, groups = selection.packed_mask, of_rows.keys.shape[1]
        group_mask = group_rows.by_row(selection.group_mask)[..., : -(-groups // 32)]
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16

    def target(chunk: SampledRows) -> torch.Tensor:
        """fp32 [B p, chunk.count, groups]"""
        queries = SampledRows(
            group_rows.skipped + chunk.start * pool, chunk.count * pool, chunk.every, chunk.stretch * pool
        )
        missing = max(queries.row(queries.count - 1) + 1 - q.shape[1], 0)
        queries = SampledRows(queries.start, queries.count - missing, queries.every, queries.stretch)
        # A group may begin in a tile of keys that are all before its queries' document.
        fill = geometry.document_starts is not None
        probs = head_sum_probs_rows(q, k, lse, packed_mask, queries, geometry, dtype=dtype, fill=fill)
        groups = of_rows.keys.shape[1]
        sums = probs[..., : groups * pool].unflatten(-1, (groups, pool)).sum(-1, dtype=torch.float32)
        sums = torch.nn.functional.pad(sums, (0, 0, 0, missing))
        return sums.unflatten(1, (chunk.count, pool)).transpose(1, 2).flatten(0, 1)

    total, kl_of_rows = masked_indexer_loss(
        of_rows,
        Target(target),
        Attended(group_mask, geometry=group_rows.geometry(geometry)),
        rows,
        queries_per_row=pool,
        # The probabilities of single keys are p times as many.
        row_chunk_bytes=LOSS_CHUNK_BYTES // pool,
    )
    left_out = float("nan") if rows != RowSample() else 0.0
    return total, group_rows.by_query(kl_of_rows, left_out)


def _over_lists(
    indexer: Indexer,
    probs_of: Callable[[KeyLists, torch.Tensor], torch.Tensor],
    selection: Selection,
    geometry: Geometry,
    rows: RowSample,
) -> tuple[torch.Tensor, torch.Tensor]:
    lists, groups, pool = selection.key_lists, selection.group_lists, geometry.indexer_pool
    assert lists is not None
    assert groups is not None

    def target(tiles: torch.Tensor) -> torch.Tensor:
        """fp32 [B, N, groups, queries]. A tile's last group, which none of its queries chose, may lack some keys."""
        return probs_of(lists, tiles).unflatten(2, (groups.max_count, pool)).sum(3)

    # The probabilities of single keys are p times as many.
    scratch = GATHERED_LOSS_BYTES // pool
    return gathered_indexer_loss(indexer, target, groups, rows=rows, scratch_bytes=scratch)
