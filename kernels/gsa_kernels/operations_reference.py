"""Implements the operations of `api.py` in plain torch with the same arguments and results.

The operations are differentiable, run on any device, and use tensors of [L, Lk].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from gsa_kernels.attention import reference as attention
from gsa_kernels.decode.reference import decode_attention, decode_top_k
from gsa_kernels.decode.state import LayerCache
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.indexer.reference import scores_of
from gsa_kernels.key_lists.format import key_lists_from_mask, mask_from_key_lists
from gsa_kernels.limits import TILE_QUERIES, Kernel
from gsa_kernels.loss.reference import indexer_kl, renormalise_target
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_kernels.sampling import sample_rows
from gsa_kernels.selection.budget import adaptive_budget, score_moments
from gsa_kernels.selection.reference import local_window_mask, select_top_k
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection


@torch.no_grad()
def select(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    kernel: Kernel,
    with_log_sum: bool,
    overlap_with: Callable[[], object],
) -> Selection:
    overlap_with()
    num_keys, device = indexer.keys.shape[1], indexer.keys.device
    positions = torch.arange(geometry.query_start, num_keys, device=device)
    causal = _causal(geometry, positions, num_keys)
    scores = scores_of(indexer)
    _, variance = score_moments(scores, causal)
    budget = adaptive_budget(variance, variance_ema, causal.sum(-1), **asdict(rule))
    near = local_window_mask(num_keys, geometry.local_window, query_positions=positions)
    chosen = (select_top_k(scores, causal, budget) | near) & causal
    log_sum = None
    if with_log_sum:
        logits = (scores * indexer.inverse_temperature).masked_fill(~chosen, float("-inf"))
        log_sum = logits.logsumexp(-1).float()
    statistics = (budget.to(torch.int32), variance)
    if kernel != "gathered":
        return Selection(pack_mask(chosen), None, *statistics, log_sum=log_sum)
    lists = key_lists_from_mask(chosen)
    return Selection(None, lists, *statistics)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry,
    gate_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = attended_keys(selection, geometry, q, k)
    found = attention.sparse_attention(q, k, v, mask, return_lse=True)
    assert found.lse is not None
    if gate_logits is None:
        return found.out, found.lse
    gate_logits = gate_logits.flatten(2, 3) if gate_logits.ndim == 5 else gate_logits
    return sigmoid_gate(found.out, gate_logits), found.lse


def indexer_loss(
    indexer: Indexer,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry,
    rows: RowSample,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = attended_keys(selection, geometry, q, k)
    kl = kl_of_rows(indexer, attention.head_sum_probs(q, k, lse, mask), mask)
    taken, factor = _taken_rows(kl.shape[1], selection, rows)
    if taken is None:
        return kl.sum(), kl.detach()
    taken = taken.to(kl.device)
    left_out = torch.full_like(kl, float("nan"))
    return kl[:, taken].sum() * factor, left_out.index_copy(1, taken, kl[:, taken]).detach()


def sampled_lse(q: torch.Tensor, k: torch.Tensor, packed_mask: torch.Tensor) -> torch.Tensor:
    lse = attention.sparse_attention(q, k, k, unpack_mask(packed_mask, k.shape[1]), return_lse=True).lse
    assert lse is not None
    return lse


@torch.no_grad()
def decode_step(
    q: torch.Tensor,
    indexer: Indexer,
    cache: LayerCache,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    gate_logits: torch.Tensor | None,
) -> torch.Tensor:
    max_length = cache.max_length
    k, v = cache.k, cache.v
    if cache.block_table is not None:  # entries after a sequence's last page may hold anything
        pages = cache.block_table.clamp(0, len(k) - 1)
        k, v = (x[pages].flatten(1, 2) for x in (k, v))
        indexer = replace(indexer, keys=indexer.keys[pages].flatten(1, 2))
    if cache.starts is not None:  # moves each sequence to the front; entries past its length are unused
        entries = (cache.starts[:, None] + torch.arange(max_length, device=q.device)) % max_length
        indexer = replace(indexer, keys=torch.take_along_dim(indexer.keys, entries[..., None], 1))
        k, v = (torch.take_along_dim(x, entries[..., None, None], 1) for x in (k, v))
    lengths = cache.lengths.clamp(max=max_length)
    found = decode_top_k(indexer, lengths, rule, variance_ema)
    state = cache.selection
    for sequence, selected in enumerate(found.selected):
        keys = selected.nonzero()[:, 0]
        state.indices[sequence, : len(keys)] = keys.to(torch.int32)
        state.counts[sequence] = len(keys)
    state.variance[: len(found.variance)] = found.variance
    return decode_attention(
        q,
        k,
        v,
        lengths,
        found.selected,
        local_window=geometry.local_window,
        output_gate_logits=gate_logits,
    )


def _causal(geometry: Geometry, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return bool [B or 1, L, Lk]: the causal keys in each query's document."""
    keys = torch.arange(num_keys, device=positions.device)
    causal = (keys <= positions[:, None])[None]
    if geometry.document_starts is None:
        return causal
    return causal & (keys >= geometry.document_starts[..., None])


def attended_keys(
    selection: Selection | None, geometry: Geometry, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Return bool [B or 1, L, Lk]: the keys that each query attends to."""
    if selection is None:
        positions = torch.arange(geometry.query_start, k.shape[1], device=q.device)
        return _causal(geometry, positions, k.shape[1])
    if selection.packed_mask is not None:
        return unpack_mask(selection.packed_mask, k.shape[1])
    assert selection.key_lists is not None
    return mask_from_key_lists(selection.key_lists)


def kl_of_rows(indexer: Indexer, probs: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Compute KL(p_t || softmax of beta * I[t, :] over the attended keys) of each query, [B, L] (eqs. 14, 15).

    Args:
        probs: [B, L, Lk], p of all queries at any scale
        attended: bool [B or 1, L, Lk], `attended_keys`
    """
    target = renormalise_target(probs, attended)
    beta = indexer.inverse_temperature
    beta = beta.reshape(()) if isinstance(beta, torch.Tensor) else beta
    return indexer_kl(scores_of(indexer), target, attended, beta)


def _taken_rows(
    num_rows: int, selection: Selection | None, rows: RowSample
) -> tuple[torch.Tensor | None, int]:
    """Return the sampled rows (int64; None for all rows), and a factor. The sum over the sampled rows times this factor
    is an estimate of the sum over all rows.

    As in the kernels, the sample consists of whole tiles if there are key lists, and otherwise of stretches of rows
    (`sample_rows`).
    """
    by_lists = selection is not None and selection.key_lists is not None
    stretch = TILE_QUERIES if by_lists else None
    sample, factor = sample_rows(num_rows, rows.fraction, rows.draw, rows.share, stretch)
    return (None if sample.every == 1 else sample.rows()), factor
