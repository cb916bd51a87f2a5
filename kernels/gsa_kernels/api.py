"""The one door to this package: select, attend, learn, decode.

    selection = select(indexer, rule, variance_ema, geometry, implementation="triton")
    out, lse = sparse_attention(q, k, v, selection, geometry, gate_logits, implementation="triton")
    loss, kl_of_rows = indexer_loss(indexer, q, k, lse, selection, geometry, implementation="triton")

Every function takes the implementation by name, and never replaces it: `triton`, the fused kernels, which need a CUDA
device, or `reference`, plain torch on any device. Both give the same results up to rounding, and the same gradients.
`limits.py` says what the kernels can do. Letters in shapes are those of `types.py`.

A NaN in the indexer's inputs is not hidden: a row that sees it has a NaN variance, the base budget, that many visible
keys, which ones is not said, and a NaN KL if it chose the bad key; so has the loss. Of infinite inputs only the
selection's size and visibility are promised. Rows that do not see them keep their results to the last bit, apart from
what key lists do:

What a query gets (output, log-sum-exp, KL and its gradients) depends on its own keys alone. Over a packed mask, and
over the lists of blocks that share a selection, that holds to the last bit. Over the key lists of queries that select
for themselves the last bits also depend on which keys the other queries of its tile select, later ones too: a tile,
limits.TILE_QUERIES neighbours, has one list, and the terms of each query's sums are added in its order. In fp32 that
moves 1e-7 of a value; nothing else of another query comes in.
"""

from __future__ import annotations

from types import ModuleType

import torch

from gsa_kernels.checks import check_shape
from gsa_kernels.decode.state import LayerCache
from gsa_kernels.limits import PACKED_MASK_MAX_TOKENS, Kernel
from gsa_kernels.types import BudgetRule, FusedLoss, Geometry, Implementation, Indexer, RowSample, Selection

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

    Without gradient. By Triton the top-k is exact for the scores that the kernels calculate, which differ from the
    reference by rounding; equal inputs give equal bits.

    Args:
        indexer: its queries are those that select, [B, R, HI, DI], R = ceil(L / selection_block); its keys all Lk
        variance_ema: fp32, 0-d: moving average of the layer's score variance, from before this step; 0 at the start
        kernel: which attention kernel the selection is for. `masked`: a packed mask. `gathered`: key lists. `auto`, by
            Triton: key lists beyond limits.PACKED_MASK_MAX_TOKENS keys; for shared selections what the density that
            k_base makes favours; for others what the measured density favours from limits.MEASURED_FROM_TOKENS on, else
            a packed mask; by the reference a packed mask. Where key lists are made of queries that select for
            themselves, the host waits for the device: their length is in the data.
        with_log_sum: also give `Selection.log_sum`, which spares the indexer loss a pass; for packed masks of keys that
            each query selects singly and for itself

    Raises:
        ValueError: the kernels cannot do it, or an argument does not fit; it names the argument and the remedy.
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
        q: [B, L, H, D], D one of limits.HEAD_SIZES; by Triton bf16 or fp32
        k: [B, Lk, Hkv, D]
        v: [B, Lk, Hkv, D]
        selection: S_t of these queries; None: dense attention to all causal keys of the query's document
        geometry: as it was for `select`
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

    p_t is the attention of query t, averaged over the heads; of a block that shares a selection, over its queries, too.
    With `indexer_pool` p_t is summed over each group, and S_t are the groups before the query's own that it reads
    whole.
    Gradients go to the indexer's tensors only, the inverse temperature among them.

    Args:
        q, k: of all heads
        lse: from the attention over the same keys
        selection: what the queries attended to; None: all causal keys of the document, in the indexer's warm-up
        rows: which rows are calculated

    Returns:
        loss: fp32, 0-d
        kl_of_rows: fp32 [B, R], without gradient; NaN for rows that were left out
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

    The backward pass of attention has the probabilities that are the loss's target, so that it spares their
    calculation. The target is rounded to fp16. The loss itself is not returned: it is known in the backward pass only
    (`FusedLoss.on_rows`). By Triton, where `can_fuse_indexer_loss` says so.
    """
    _check_rows(loss.indexer, geometry)
    _check_selection(selection, geometry, q, k)
    operations = _operations(implementation)
    return operations.sparse_attention_with_loss(q, k, v, selection, geometry, loss, gate_logits)


def can_fuse_indexer_loss(q: torch.Tensor, k: torch.Tensor, selection: Selection | None) -> bool:
    """Whether `sparse_attention_with_loss` takes these by Triton: a packed mask of keys that are selected singly, bf16,
    and a multiple of limits.FUSED_LOSS_HEADS query heads for each key-value head, on Hopper (or in Triton's
    interpreter)."""
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
    """Log of the softmax's sum over the keys of a packed mask, for S queries from anywhere in the sequence: fp32
    [B, H, S], for statistics. Takes about 4 B H S Lk D operations.

    Args:
        q: [B, S, H, D], in any order; a query may be there several times, beside different masks
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
    """One new token for each sequence: select from the cache, attend, gate. Without gradient.

    With `selection_block` b the selection of an aligned block of b tokens is made when its first token is decoded, and
    kept in `cache.selection`. Sequences may stand at different places of their blocks. By Triton the host reads nothing
    back, so that the step can be captured in a CUDA graph while `cache.lengths` grows.

    Args:
        q: [B, H, D], of the token at position lengths - 1
        indexer: queries [B, 1, HI, DI] and head weight logits [B, 1, HI] of that token; keys [B, L_max, DI], the cache
        cache: of this layer; its selection is overwritten
        variance_ema: fp32, 0-d, the layer's moving average from training
        geometry: `selection_block` and `local_window` of training; its other fields are of whole sequences
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
    """The module with this implementation of every operation. Triton is imported by those only who name it."""
    if implementation == "triton":
        from gsa_kernels import operations_triton

        return operations_triton
    if implementation == "reference":
        from gsa_kernels import operations_reference

        return operations_reference
    raise ValueError(f"implementation is {implementation!r}; pass 'triton' or 'reference'")


def _check_rows(indexer: Indexer, geometry: Geometry) -> None:
    """The indexer has a row for each query that selects."""
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
    """The selection is one of these queries."""
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
            f"selection is of {lists.length} queries from position {lists.query_start}; pass that of the {length} "
            f"queries from position {geometry.query_start}"
        )
