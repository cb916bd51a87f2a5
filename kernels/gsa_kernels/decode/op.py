"""Decodes with Gated Sparse Attention: one new query per sequence against a cache of keys, values and indexer keys.

A step launches four kernels: one for the scores, two for the selection and one for attention. A CUDA graph can capture
a call and replay it while the lengths grow, because `cache.lengths` is a tensor on the device, the grids cover the
whole cache, and the host reads nothing back. If the caller passes `out`, a call allocates no memory. The results are
deterministic; `decode_top_k` and `decode_attention` define them.

On Hopper, each kernel starts early and later waits for the previous kernel to end (programmatic dependent launch;
row_product/op.py lists the rules). The scores kernel starts early only if `cache.in_chain` is true. Before the wait, a
kernel may read `lengths`, `starts` and `block_table`. If `cache.settled` is true, the scores kernel also reads all
indexer keys except each sequence's newest.
"""

from dataclasses import replace

import torch

from gsa_kernels.checks import (
    check_at_least,
    check_dtype_and_device,
    check_head_counts,
    check_head_size,
    check_indexer_sizes,
    check_kernel_dtype,
    check_shape,
    check_unit_strides,
    kernels_use_sigmoid,
)
from gsa_kernels.decode.state import DecodeWorkspace, LayerCache, most_selected
from gsa_kernels.decode.triton_attend import attend_to_indices
from gsa_kernels.decode.triton_score import score_keys
from gsa_kernels.decode.triton_select import select_indices
from gsa_kernels.devices import can_chain, launching_on
from gsa_kernels.indexer.score_inputs import check_indexer_dtypes
from gsa_kernels.limits import DECODE_INDEXER_HEADS
from gsa_kernels.types import BudgetRule, Geometry, Indexer


@torch.no_grad()
def decode_step(
    q: torch.Tensor,
    indexer: Indexer,
    cache: LayerCache,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry,
    gate_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `decode_select`, then `decode_attend`, with the same arguments, and return its result."""
    decode_select(indexer, cache, rule, variance_ema)
    return _attend(q, cache, geometry.local_window, gate_logits, out, behind_selection=True)


@torch.no_grad()
def decode_select(
    indexer: Indexer,
    cache: LayerCache,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
) -> None:
    """Write each sequence's k_t keys of highest indexer score, ties to the lower index, into `cache.selection`.

    The selection is exact for the scores that this call computes and leaves in `cache.workspace.scores`. These scores
    differ from the scores of the reference only by rounding.

    Args:
        indexer: queries [B, 1, HI, DI] and head weight logits [B, 1, HI] of the tokens at position lengths - 1; keys
            [B, L_max, DI], the cache, including these tokens; bf16 or fp32
        cache: its selection is overwritten; its workspace is for at least B sequences of L_max tokens
        variance_ema: 0-d fp32, the layer's frozen moving average
    """
    queries = indexer.queries
    check_shape("indexer.queries", queries, "[B, 1, HI, DI]", (None, 1, None, None))
    batch, _, heads, dim = queries.shape
    check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
    max_length = cache.max_length
    check_at_least("the cache's L_max", max_length, 1)
    pages = batch if cache.block_table is None else None
    check_shape("indexer.keys", indexer.keys, "[B, L_max, DI]", (pages, cache.k.shape[1], dim))
    check_indexer_sizes(heads, dim, DECODE_INDEXER_HEADS)
    check_indexer_dtypes(indexer)
    names = ("queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias")
    check_unit_strides({f"indexer.{name}": getattr(indexer, name) for name in names})
    if variance_ema.dtype != torch.float32:
        raise ValueError(f"variance_ema has dtype {variance_ema.dtype}; pass float32")
    most_keys = most_selected(rule, max_length)
    if cache.selection.indices.shape[1] < most_keys:
        raise ValueError(f"selection holds {cache.selection.indices.shape[1]} keys; pass one for {most_keys}")
    workspace = _workspace(cache)
    sequences, columns = workspace.scores.shape
    if sequences < batch or columns < max_length:
        raise ValueError(
            f"workspace is for {sequences} sequences of {columns} tokens; make one for {batch} of {max_length}"
        )
    _check_cache(queries, cache, variance_ema=variance_ema)

    chained = can_chain(queries)
    # The floor of the scores is made for k_max. It may be too high for a short sequence that selects all keys. This
    # only costs time.
    rule = replace(rule, k_min=min(rule.k_min, max_length), k_max=min(rule.k_max, max_length))
    with launching_on(queries, "the query"):
        score_keys(indexer, cache, rule.k_max, workspace, chained)
        signed = not kernels_use_sigmoid(indexer.activation)
        select_indices(cache, workspace, rule, variance_ema, chained, signed)


@torch.no_grad()
def decode_attend(
    q: torch.Tensor,
    cache: LayerCache,
    local_window: int = 0,
    gate_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each sequence's new token to its selection and its last `local_window` keys, and multiply by G1.

    A key that is in both counts once. Query head h reads key-value head h // (H / Hkv).

    Args:
        q: [B, H, D], D one of limits.HEAD_SIZES; bf16 or fp32
        cache: includes the new token's key and value
        local_window: number of keys, including the query's own
        gate_logits: [B, H, D], G1 before its sigmoid
        out: [B, H, D], where to write; None allocates a tensor

    Returns:
        out: [B, H, D] in the dtype of q; zeros where the length is 0
    """
    return _attend(q, cache, local_window, gate_logits, out, behind_selection=False)


def _attend(
    q: torch.Tensor,
    cache: LayerCache,
    local_window: int,
    gate_logits: torch.Tensor | None,
    out: torch.Tensor | None,
    behind_selection: bool,
) -> torch.Tensor:
    """Run `decode_attend`. `behind_selection` says that the previous kernel is the selection's, not the caller's."""
    k, v, workspace = cache.k, cache.v, _workspace(cache)
    check_shape("q", q, "[B, H, D]", (None, None, None))
    batch, heads, dim = q.shape
    pages = batch if cache.block_table is None else None
    check_shape("k", k, "[B, L_max, Hkv, D]", (pages, None, None, dim))
    max_length, kv_heads = cache.max_length, k.shape[2]
    check_shape("v", v, "[B, L_max, Hkv, D]", tuple(k.shape))
    if 0 in (batch, heads, max_length):
        raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}; pass a sequence, a head, a token")
    check_head_counts(heads, kv_heads)
    check_head_size(dim)
    check_at_least("local_window", local_window, 0)
    floats = {"q": q, "k": k, "v": v}
    for name, tensor in (("gate_logits", gate_logits), ("out", out)):
        if tensor is not None:
            check_shape(name, tensor, "[B, H, D]", (batch, heads, dim))
            floats[name] = tensor
    check_kernel_dtype("q", q)
    check_dtype_and_device("q", q, floats)
    check_unit_strides(floats)
    partial = tuple(workspace.partial_out.shape)
    if partial[0] < batch or (partial[1], *partial[3:]) != (kv_heads, heads // kv_heads, dim):
        raise ValueError(
            f"workspace is for {partial[0]} sequences of {partial[1]} key-value heads x {partial[3]} query heads "
            f"x {partial[4]}; make one for {batch} of {kv_heads} x {heads // kv_heads} x {dim}"
        )
    _check_cache(q, cache)
    if out is None:
        out = torch.empty_like(q)
    with launching_on(q, "the query"):
        window = min(local_window, max_length)
        chained = can_chain(q)
        attend_to_indices(q, cache, workspace, window, gate_logits, out, (chained, behind_selection))
    return out


def _workspace(cache: LayerCache) -> DecodeWorkspace:
    if cache.workspace is None:
        raise ValueError("cache.workspace is None; make one with new_workspace, which layers may share")
    return cache.workspace


def _check_cache(first: torch.Tensor, cache: LayerCache, **others: torch.Tensor) -> None:
    batch, lengths, indices = first.shape[0], cache.lengths, cache.selection.indices
    numbers = {"lengths": lengths} | ({} if cache.starts is None else {"starts": cache.starts})
    for name, tensor in numbers.items():
        check_shape(name, tensor, "[B]", (batch,))
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} with stride {tensor.stride()}; pass contiguous int32")
    if cache.block_table is not None:
        check_shape("block_table", cache.block_table, "[B, pages of a sequence]", (batch, None))
        if cache.block_table.dtype != torch.int32:
            raise ValueError(f"block_table has dtype {cache.block_table.dtype}; pass int32")
        if cache.starts is not None:
            raise ValueError("block_table and starts are both given; pass one of them")
        check_unit_strides({"block_table": cache.block_table})
        others = {"block_table": cache.block_table, **others}
    check_shape("selection.indices", indices, "[B, k_cap]", (batch, None))
    if not indices.is_contiguous():
        raise ValueError("selection.indices is not contiguous; make it with new_selection")
    state = {**numbers, "selection": indices, "workspace": _workspace(cache).scores}
    for name, tensor in {**state, **others}.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, the query on {first.device}; pass one device for all"
            )
