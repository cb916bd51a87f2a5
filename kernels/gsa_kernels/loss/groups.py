"""The indexer loss (GSA, equation 15) over groups of neighbouring keys (`Geometry.indexer_pool` p).

The rows are the ones of `selection/groups.py`: p causal problems of C rows and C groups. Their target is the sum
of attention over each group's keys. The loss costs 1 / p of a loss over single keys; its target is not cheaper.
"""

from __future__ import annotations

import torch

from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.limits import LOSS_CHUNK_BYTES
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.groups import by_query, check_groups, indexer_of_groups
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
    """Arguments and results as in `api.indexer_loss`. Sampling takes whole groups of queries."""
    pool, length = geometry.indexer_pool, q.shape[1]
    check_groups(geometry, length)
    num_groups = length // pool - 1
    group_mask = packed_mask = None
    if selection is not None:
        group_mask, packed_mask = selection.group_mask, selection.packed_mask
        if group_mask is None:
            raise ValueError(
                "selection has no group_mask; pass what select makes by Triton with this geometry"
            )
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16

    def target(chunk: SampledRows) -> torch.Tensor:
        """fp32 [B p, chunk.count, C]"""
        queries = SampledRows((chunk.start + 1) * pool, chunk.count * pool, chunk.every, chunk.stretch * pool)
        # Key lists have no mask: the loss leaves out the groups that a query did not select.
        probs = head_sum_probs_rows(q, k, lse, packed_mask, queries, dtype=dtype, fill=False)
        sums = probs[..., : num_groups * pool].unflatten(-1, (num_groups, pool)).sum(-1, dtype=torch.float32)
        return sums.unflatten(1, (chunk.count, pool)).transpose(1, 2).flatten(0, 1)

    total, kl_of_rows = masked_indexer_loss(
        indexer_of_groups(indexer, pool),
        Target(target),
        Attended(group_mask),
        rows,
        queries_per_row=pool,
        # The probabilities of single keys are p times as many.
        row_chunk_bytes=LOSS_CHUNK_BYTES // pool,
    )
    left_out = float("nan") if rows != RowSample() else 0.0
    return total, by_query(kl_of_rows, pool, left_out)
