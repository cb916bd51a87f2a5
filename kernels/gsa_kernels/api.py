"""The operations: selection, attention, indexer loss, decoding. `gsa_kernels` exports the four that a model calls.

Each function runs the implementation that the caller names, and never another: `triton`, the fused kernels, which need
a CUDA device, or `reference`, plain torch on any device. Results and gradients agree up to rounding. `limits.py` lists
what the kernels support; `types.py` explains the letters in shapes.

Non-finite inputs: a row with a NaN among its indexer inputs gets a NaN variance, the base budget, that number of causal
keys (unspecified which), and, if it selected the NaN key, a NaN KL and loss. With infinite inputs only the size and the
causality of the selection are guaranteed. All other rows keep their results bit for bit, except for this rule:

A query's results (output, log-sum-exp, KL, gradients) depend on its own keys only. Over a packed mask, and over lists
of blocks that share a selection, that holds bit for bit. Over the key lists of queries that select individually, the
sums follow the order of the list, which the limits.TILE_QUERIES neighbouring queries of a tile share. The last bits
(1e-7 of a value in fp32) therefore depend on the keys that these neighbours select, later queries included.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from gsa_kernels.checks import check_shape
from gsa_kernels.decode.state import LayerCache
from gsa_kernels.limits import PACKED_MASK_MAX_TOKENS, Kernel
from gsa_kernels.types import BudgetRule, FusedLoss, Geometry, Implementation, Indexer, RowSample, Selection

_MODULES = {"triton": "gsa_kernels.operations_triton", "reference": "gsa_kernels.operations_reference"}
_ALL_OF_ONE_SEQUENCE = Geometry()
_ALL_ROWS = RowSample()


def select(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    *,
    implementation: Implementation,
    kernel: Kernel = "auto",
    with_log_sum: bool = False,
) -> Selection:
    """S_t = the k_t causal keys of highest score, ties to the lower index, and the last `local_window` keys.

    Without gradient, deterministic. With Triton the top-k is exact for the kernels' scores, which differ from the
    reference by rounding.

    Args:
        indexer: queries [B, R, HI, DI] of the R = ceil(L / selection_block) queries that select; all Lk keys
        variance_ema: fp32, 0-d: moving average of the layer's score variance, from before this step; 0 at the start
        kernel: the attention kernel that reads the selection. `masked`: packed mask. `gathered`: key lists. `auto` with
            Triton: key lists above limits.PACKED_MASK_MAX_TOKENS keys; up to that length the format that the density
            favours, which follows from k_base for shared selections and is measured from limits.MEASURED_FROM_TOKENS
            keys on for individual ones; else a packed mask. `auto` with the reference: packed mask. Key lists of
            individual selections synchronise the host with the device, because their length depends on the data.
        with_log_sum: also return `Selection.log_sum`, which saves the indexer loss a pass; only for packed masks, with
            selection_block 1 and indexer_pool 1

    Raises:
        ValueError: an argument is invalid or not supported; the message names the argument and the remedy.
    """
    _check_rows(indexer, geometry)
    if kernel not in ("auto", "masked", "gathered"):
        raise ValueError(f"kernel is {kernel!r}; pass 'auto', 'masked' or 'gathered'")
    if implementation == "triton" and kernel == "masked":
        num_keys = indexer.keys.shape[1]
        if num_keys > PACKED_MASK_MAX_TOKENS:
            raise ValueError(
                f"kernel is 'masked' with {num_keys} keys; pass 'auto', or at most {PACKED_MASK_MAX_TOKENS} keys"
            )
    operations = _operations(implementation)
    return operations.select(indexer, rule, variance_ema, geometry, kernel, with_log_sum)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    gate_logits: torch.Tensor | None = None,
    *,
    implementation: Implementation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t] = sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] / sqrt(D)) v[s], times sigmoid(gate), per head.

    GSA, equations 10 to 12. Query head h reads key-value head h // (H / Hkv). Differentiable in q, k, v and
    gate_logits; deterministic.

    Args:
        q: [B, L, H, D], D one of limits.HEAD_SIZES; with Triton bf16 or fp32
        k: [B, Lk, Hkv, D]
        v: [B, Lk, Hkv, D]
        selection: S_t of these queries; None: dense attention to all causal keys of the query's document
        geometry: the one passed to `select`
        gate_logits: G1 before its sigmoid, [B, L, H, D] or [B, L, Hkv, H / Hkv, D]

    Returns:
        out: [B, L, H, D], in the dtype of q
        lse: fp32 [B, H, L], log sum_{s in S_t} exp(q[t] . k[s] / sqrt(D)), without gradient
    """
    _check_selection(selection, geometry, q, k)
    return _operations(implementation).sparse_attention(q, k, v, selection, geometry, gate_logits)


def indexer_loss(
    indexer: Indexer,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    selection: Selection | None,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    rows: RowSample = _ALL_ROWS,
    *,
    implementation: Implementation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the rows of KL(p_t || softmax_{s in S_t}(beta I[t, s])): GSA, equations 14 and 15.

    p_t is the attention of query t, averaged over the heads and, for a shared selection, over the queries of the block.
    With `indexer_pool` p_t is summed over each group, and S_t are the groups that the query selects.
    Gradients go to the indexer's tensors only, including the inverse temperature.

    Args:
        q, k: all heads
        lse: of the attention over the same keys
        selection: the keys attended to; None: all causal keys of the document (indexer warm-up)
        rows: which rows to compute

    Returns:
        loss: fp32, 0-d
        kl_of_rows: fp32 [B, R], without gradient; NaN for rows not sampled
    """
    _check_rows(indexer, geometry)
    _check_selection(selection, geometry, q, k)
    operations = _operations(implementation)
    return operations.indexer_loss(indexer, q, k, lse, selection, geometry, rows)


def sparse_attention_with_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    selection: Selection,
    geometry: Geometry,
    loss: FusedLoss,
    gate_logits: torch.Tensor | None = None,
    *,
    implementation: Implementation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_attention`, whose backward pass adds the gradients of loss.scale * `indexer_loss` over all rows.

    The backward pass of attention computes the probabilities anyway; they are the loss's target, rounded to fp16. The
    loss is known in the backward pass only (`FusedLoss.on_rows`). With Triton only if `can_fuse_indexer_loss`.
    """
    _check_rows(loss.indexer, geometry)
    _check_selection(selection, geometry, q, k)
    operations = _operations(implementation)
    return operations.sparse_attention_with_loss(q, k, v, selection, geometry, loss, gate_logits)


def can_fuse_indexer_loss(q: torch.Tensor, k: torch.Tensor, selection: Selection | None) -> bool:
    """Whether `sparse_attention_with_loss` supports these tensors with Triton: a packed mask, indexer_pool 1, bf16, and
    a multiple of limits.FUSED_LOSS_HEADS query heads per key-value head, on Hopper or in Triton's interpreter."""
    from gsa_kernels.hopper.fused_indexer_loss import can_fuse_indexer_loss as takes  # imports Triton

    if selection is None or selection.packed_mask is None or selection.group_mask is not None:
        return False
    return takes(q, k)


def sampled_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    packed_mask: torch.Tensor,
    *,
    implementation: Implementation,
) -> torch.Tensor:
    """Log-sum-exp over the keys of a packed mask for S sampled queries: fp32 [B, H, S], for statistics.

    Costs about 4 B H S Lk D operations.

    Args:
        q: [B, S, H, D], in any order; a query may occur repeatedly, with different masks
        k: [B, Lk, Hkv, D]
        packed_mask: int32 [B, S, ceil(Lk / 32)], for example `Selection.packed_rows`
    """
    return _operations(implementation).sampled_lse(q, k, packed_mask)


def decode_step(
    q: torch.Tensor,
    indexer: Indexer,
    cache: LayerCache,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    gate_logits: torch.Tensor | None = None,
    *,
    implementation: Implementation,
) -> torch.Tensor:
    """Decode one token per sequence: select from the cache, attend, gate. Without gradient.

    With `selection_block` b the first token of an aligned block of b tokens selects, and `cache.selection` keeps its
    keys for the block. Sequences may be at different offsets in their blocks. With Triton the host does not synchronise
    with the device, so that a CUDA graph can capture the step and replay it while `cache.lengths` grows.

    Args:
        q: [B, H, D], of the token at position lengths - 1
        indexer: queries [B, 1, HI, DI] and head weight logits [B, 1, HI] of that token; keys [B, L_max, DI], the cache
        cache: this layer's; its selection is overwritten
        variance_ema: fp32, 0-d, the layer's moving average from training
        geometry: `selection_block` and `local_window` of training, other fields at their defaults
        gate_logits: [B, H, D], G1 before its sigmoid

    Returns:
        [B, H, D]; zeros for a sequence of length 0
    """
    if geometry.indexer_pool > 1:
        raise ValueError(
            f"geometry has indexer_pool {geometry.indexer_pool}; pass 1: decoding selects single keys"
        )
    if geometry.document_starts is not None or geometry.query_start != 0:
        raise ValueError(
            f"geometry has document_starts or query_start {geometry.query_start}; pass selection_block and "
            "local_window alone: a cache holds one document"
        )
    check_shape("indexer.queries", indexer.queries, "[B, 1, HI, DI]", (len(q), 1, None, None))
    sizes = tuple(cache.k.shape[:2])
    check_shape("indexer.keys", indexer.keys, "[B, L_max, DI], as the cache has", (*sizes, None))
    operations = _operations(implementation)
    return operations.decode_step(q, indexer, cache, rule, variance_ema, geometry, gate_logits)


def _operations(implementation: Implementation) -> ModuleType:
    """The module with this implementation of every operation, imported on first use."""
    if implementation not in _MODULES:
        raise ValueError(f"implementation is {implementation!r}; pass 'triton' or 'reference'")
    return import_module(_MODULES[implementation])


def _check_rows(indexer: Indexer, geometry: Geometry) -> None:
    """The indexer has one row per query that selects."""
    batch, num_rows = indexer.queries.shape[:2]
    length = indexer.keys.shape[1] - geometry.query_start
    if length < 1:
        raise ValueError(
            f"query_start is {geometry.query_start} with {indexer.keys.shape[1]} keys; pass the keys up to the last "
            "query's own"
        )
    wanted = -(-length // geometry.selection_block)
    if num_rows != wanted:
        raise ValueError(
            f"indexer.queries has {num_rows} rows; pass {wanted}: the first of each {geometry.selection_block} of the "
            f"{length} queries from position {geometry.query_start} to the last key"
        )
    if geometry.document_starts is not None:
        check_shape("document_starts", geometry.document_starts, "[B, L]", (batch, length))


def _check_selection(
    selection: Selection | None, geometry: Geometry, q: torch.Tensor, k: torch.Tensor
) -> None:
    """The selection belongs to these queries."""
    check_shape("q", q, "[B, L, H, D]", (None, None, None, None))
    length = q.shape[1]
    check_shape("k", k, "[B, query_start + L, Hkv, D]", (len(q), geometry.query_start + length, None, None))
    if geometry.document_starts is not None:
        check_shape("document_starts", geometry.document_starts, "[B, L]", (len(q), length))
    if selection is None:
        return
    if selection.packed_mask is not None:
        shape = (len(q), length, -(-k.shape[1] // 32))
        check_shape("selection.packed_mask", selection.packed_mask, "[B, L, ceil(Lk / 32)]", shape)
    lists = selection.key_lists
    if lists is not None and (lists.length, lists.query_start) != (length, geometry.query_start):
        raise ValueError(
            f"selection is of {lists.length} queries from position {lists.query_start}; pass the one of the {length} "
            f"queries from position {geometry.query_start}"
        )
