"""Names the Triton implementation of each operation of `api.py`, with the same arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gsa_kernels import limits
from gsa_kernels.attention.op import sampled_lse as sampled_lse
from gsa_kernels.attention.op import sparse_attention as sparse_attention
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.decode.op import decode_step as decode_step
from gsa_kernels.devices import launching_on
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import list_columns
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.lists_op import key_lists_from_packed_mask, select_key_lists
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection


@torch.no_grad()
def select(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    kernel: limits.Kernel,
    with_log_sum: bool,
    overlap_with: Callable[[], object],
) -> Selection:
    num_keys = indexer.keys.shape[1]
    if num_keys > limits.PACKED_MASK_MAX_TOKENS:
        return select_key_lists(indexer, rule, variance_ema, geometry, overlap_with=overlap_with)
    listed = limits.takes_key_lists(kernel, num_keys, rule.k_base)
    longer = num_keys > limits.CANDIDATES_ABOVE_TOKENS
    by_candidates = listed and longer and limits.has_candidates(rule.most_keys)
    chosen = select_keys(
        indexer,
        rule,
        variance_ema,
        geometry,
        candidates_from=limits.CANDIDATES_FROM if by_candidates else None,
        with_log_sum=with_log_sum and not by_candidates,
    )
    overlap_with()
    if not listed:
        return chosen
    assert chosen.packed_mask is not None
    length = num_keys - geometry.query_start
    lists = key_lists_from_packed_mask(chosen.packed_mask, length, geometry.query_start)
    return replace(chosen, packed_mask=None, key_lists=lists)


def indexer_loss(
    indexer: Indexer,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry,
    rows: RowSample,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss in chunks of rows, for which the target [B, rows, columns] is computed."""
    packed_mask, log_sum, lists = None, None, None
    if selection is not None:
        packed_mask, log_sum, lists = selection.packed_mask, selection.log_sum, selection.key_lists
    # fp16 probabilities have a relative error of 2^-12, similar to the scores from the hardware's tanh.
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16

    def target(chunk: SampledRows) -> torch.Tensor:
        if lists is not None:
            return head_sum_probs_lists(q, k, lse, lists, chunk, list_columns(lists), dtype)
        return head_sum_probs_rows(q, k, lse, packed_mask, chunk, geometry, dtype=dtype)

    # Each head's probabilities sum to 1 over the keys of its log-sum-exp.
    row_sum = float(q.shape[2])
    attended = Attended(packed_mask, log_sum, geometry, lists)
    with launching_on(q, "q"):
        return triton_indexer_loss(indexer, Target(target, row_sum), attended, rows)
