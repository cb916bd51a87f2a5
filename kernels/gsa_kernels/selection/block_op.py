"""Selections that blocks of queries share, as lists of keys for the attention (section 9 of the specification)."""

from dataclasses import dataclass
from typing import Literal

import torch

from gsa_kernels.checks import count_queries
from gsa_kernels.devices import launching_on
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_block_lists import block_key_lists
from gsa_kernels.limits import SELECTION_BLOCKS, SELECTION_CHUNK_BYTES
from gsa_kernels.selection.op import select_keys


@dataclass(frozen=True)
class BlockSelection:
    """Queries in aligned blocks of b share the top-k of the block's first query; row r belongs to query r b, at the
    position query_start + r b."""

    lists: KeyLists
    """S_t of every query: its block's top-k and its own local window, as far as it sees them."""

    budget: torch.Tensor
    """int32 [B, R], R = ceil(L / b): the keys of the top-k."""

    variance: torch.Tensor
    """fp32 [B, R]: population variance of the row's scores over its visible keys."""

    words: torch.Tensor
    """int32 [B, R, ceil(Lk / 32)]: bit s % 32 of word s // 32 set = key s is in the row's top-k."""


@torch.no_grad()
def select_block_lists(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    variance_ema: torch.Tensor,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    k_base: int,
    k_min: int,
    k_max: int,
    mode: Literal["inverse", "direct", "off"],
    selection_block: int,
    local_window: int,
    document_starts: torch.Tensor | None = None,
    query_start: int = 0,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
) -> BlockSelection:
    """S_t = (top-k of the block's first query, over keys at or before it) and the last `local_window` keys.

    The definition is `select_top_k`, `expand_block_selection`, `local_window_mask` and `causal_mask`. As with
    `select_keys`: exact for the scores this call calculates, no gradients, no waiting for the device, equal
    inputs give equal bits. What a query attends to does not depend on later tokens.

    Args:
        q_idx: [B, R, HI, DI], of the first query of every block, R = ceil(L / selection_block)
        k_idx: [B, Lk, DI], Lk = query_start + L, dtype of q_idx
        weight_logits: w, [B, R, HI]
        selection_block: b, one of 16, 32, 64, 128
        local_window: keys, the query's own included; at least b, so that each query sees its own block

    The other arguments are those of `select_keys`.
    """
    _check_blocks(selection_block, local_window)
    length = count_queries(query_start, k_idx.shape[1], selection_block)
    selection = select_keys(
        q_idx,
        k_idx,
        weight_logits,
        variance_ema,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        k_base=k_base,
        k_min=k_min,
        k_max=k_max,
        mode=mode,
        document_starts=document_starts,
        selection_block=selection_block,
        query_start=query_start,
        row_chunk_bytes=row_chunk_bytes,
    )
    with launching_on(q_idx):
        lists = block_key_lists(
            selection.words,
            length=length,
            k_max=k_max,
            selection_block=selection_block,
            local_window=local_window,
            document_starts=None if document_starts is None else document_starts.contiguous(),
            query_start=query_start,
        )
    return BlockSelection(lists, selection.budget, selection.variance, selection.words)


def _check_blocks(selection_block: int, local_window: int) -> None:
    if selection_block not in SELECTION_BLOCKS[1:]:
        raise ValueError(f"selection_block is {selection_block}; pass one of {SELECTION_BLOCKS[1:]}")
    if local_window < selection_block:
        raise ValueError(
            f"local_window is {local_window}, below selection_block {selection_block}; pass at least "
            f"{selection_block}, so that each query sees the keys of its own block"
        )
