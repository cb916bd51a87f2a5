"""S_t of every query by the fused kernels, in the form that attention over it is fastest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gsa_kernels.lists.key_lists import KeyLists
from gsa_kernels.selection.block_op import select_block_lists
from gsa_kernels.selection.lists_op import key_lists_from_words, select_key_lists
from gsa_kernels.selection.op import select_keys
from gsa_train.config import GSAConfig
from gsa_train.config.kernel_checks import MASKED_MAX_TOKENS
from gsa_train.model.indexer import Indexer, IndexerProjections
from gsa_train.model.supports import Selected, SelectedBits, SelectedLists

MEASURED_FROM_TOKENS = 16384
"""Below, attention over bits is taken unseen: with budgets of thousands of keys most of its tiles are hit."""

GATHERED_BELOW_DENSITY = 2 / 3
"""Forward and backward, 16/4 heads of 128 in bf16 on an H200: 2.2 ns per key and tile of 32 queries over bits,
hit or not, and 3.2 ns per key of the lists (kernels/bench/bench_attention.py and bench_gathered.py)."""


@dataclass(frozen=True)
class LayerSelection:
    selected: Selected
    budget: torch.Tensor
    """int32 [B, R]: k_t of the R selecting queries."""
    variance: torch.Tensor
    """fp32 [B, R]: variance of their scores."""
    density: float | None
    """Keys in the lists over keys visible to their tiles; None where nobody counted."""


@torch.no_grad()
def select_for_layer(
    projections: IndexerProjections,
    indexer: Indexer,
    variance_ema: torch.Tensor,
    gsa: GSAConfig,
    document_starts: torch.Tensor | None,
    query_start: int = 0,
    with_log_sum: bool = False,
) -> LayerSelection:
    """Select, and choose between bits and lists as `gsa.attention_kernel` says.

    Waits for the device where lists are made of per-query selections: their length is in the data.

    Args:
        projections: of the selecting queries, every `gsa.selection_block`-th from `query_start` on, and of all keys
            up to the last query.
        document_starts: of all queries, int32 [B, L_q]
        with_log_sum: also give what spares the indexer loss a pass; for selections as bits
    """
    arguments: dict[str, Any] = {
        "score_bias": indexer.score_bias,
        "weight_bias": indexer.weight_bias,
        "activation": gsa.indexer_activation,
        "k_base": gsa.k_base,
        "k_min": gsa.k_min,
        "k_max": gsa.k_max,
        "mode": gsa.adaptive_k,
        "document_starts": document_starts,
        "local_window": gsa.local_window,
        "query_start": query_start,
    }
    length = projections.keys.shape[1]
    if gsa.selection_block > 1:
        shared = select_block_lists(
            *projections, variance_ema, selection_block=gsa.selection_block, **arguments
        )
        selected = SelectedLists(shared.lists, gsa.selection_block)
        return LayerSelection(selected, shared.budget, shared.variance, None)
    if length > MASKED_MAX_TOKENS:
        listed = select_key_lists(*projections, variance_ema, **arguments)
        density = union_density(listed.lists)
        return LayerSelection(SelectedLists(listed.lists, 1), listed.budget, listed.variance, density)
    beta = indexer.inverse_temperature() if with_log_sum else None
    chosen = select_keys(*projections, variance_ema, **arguments, inverse_temperature=beta)
    bits = SelectedBits(chosen.words, chosen.log_sum)
    measured = gsa.attention_kernel == "auto" and length >= MEASURED_FROM_TOKENS
    if gsa.attention_kernel != "gathered" and not measured:
        return LayerSelection(bits, chosen.budget, chosen.variance, None)
    lists = key_lists_from_words(chosen.words, length - query_start, query_start)
    density = union_density(lists)
    gathers = gsa.attention_kernel == "gathered" or density < GATHERED_BELOW_DENSITY
    return LayerSelection(
        SelectedLists(lists, 1) if gathers else bits, chosen.budget, chosen.variance, density
    )


def union_density(lists: KeyLists) -> float:
    """Entries of lists that were made for their data, over those of dense causal attention."""
    batch, tiles = lists.counts.shape
    ends = lists.query_start + (torch.arange(1, tiles + 1) * lists.queries).clamp(max=lists.length)
    return lists.keys.numel() / (batch * int(ends.sum()))
