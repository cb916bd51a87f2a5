"""Defines the operations: selection, attention, indexer loss and decoding. `gsa_kernels` exports the four main
functions.

The caller names the implementation, and each function runs that implementation or raises an error. `triton` runs the
fused kernels, which need a CUDA device. `reference` runs plain torch on any device. Both give the same results and
gradients up to rounding. `limits.py` lists what the kernels support. `types.py` explains the letters in shapes.

Inputs that are not finite:
- If a query has a score of NaN, it selects k_base causal keys, but it is unspecified which.
- If a selected key has a score of NaN, the KL of this query and the loss are NaN.
- If an input is infinite, queries select the right number of causal keys, but nothing else is guaranteed.
- NaN or infinite scores of a query change other queries' results in the last bits at most.

The results of a query (output, log-sum-exp, KL and gradients) depend only on the keys that the query selects. With a
packed mask (one bit per query and key), this holds to the last bit. With key lists, a tile of limits.TILE_QUERIES
neighbouring queries shares one list, and sums follow the order of the list. The selections of neighbours in the tile,
even later ones, can therefore change the last bits (about 1e-7 of a value in fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

from gsa_kernels.checks import check_shape
from gsa_kernels.decode.state import LayerCache
from gsa_kernels.limits import PACKED_MASK_MAX_TOKENS, Kernel
from gsa_kernels.types import BudgetRule, Geometry, Implementation, Indexer, RowSample, Selection

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
    overlap_with: Callable[[], object] = lambda: None,
) -> Selection:
    """Select S_t: the k_t causal keys with the highest scores, and the last `local_window` keys.

    If keys have equal scores, the key with the lower index is selected first. The selection is deterministic and has no
    gradient. With Triton, the top-k is exact for the kernels' scores, which differ from the reference's scores by
    rounding.

    Args:
        indexer: queries [B, L, HI, DI]; all Lk keys
        variance_ema: fp32, 0-d: moving average of the layer's score variance before this step; 0 at the start
        kernel: the attention kernel that will read the selection. `masked` reads a packed mask. `gathered` reads key
            lists (for each tile of queries, the keys that any of them selects). Indexer loss and backward pass wait
            until the host knows the lengths of the lists, which depend on the data. `auto` takes a packed mask with the
            reference. With Triton, `limits.takes_key_lists` decides by sequence length and budget.
        with_log_sum: also return `Selection.log_sum`, with which the indexer loss needs one pass less. Key lists have
            no log-sum with the reference, nor with Triton if candidates select them (limits.CANDIDATES_ABOVE_TOKENS).
        overlap_with: called once. Above limits.PACKED_MASK_MAX_TOKENS keys, the host waits for the lengths of the lists
            before it allocates them. Work that this function launches runs meanwhile.

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
    return operations.select(indexer, rule, variance_ema, geometry, kernel, with_log_sum, overlap_with)


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
    """Compute out[t] = sigmoid(gate) * sum_{s in S_t} softmax_{s in S_t}(q[t] . k[s] / sqrt(D)) v[s], per head.

    The function computes equations 10 to 12 of GSA. Query head h reads key-value head h // (H / Hkv). The function is
    deterministic, and differentiable in q, k, v and gate_logits.

    Args:
        q: [B, L, H, D], D one of limits.HEAD_SIZES; with Triton bf16 or fp32
        k: [B, Lk, Hkv, D]
        v: [B, Lk, Hkv, D]
        selection: the keys S_t of these queries; None: dense attention to all causal keys of the query's document
        geometry: the one passed to `select`
        gate_logits: output gate G1 before its sigmoid, [B, L, H, D] or [B, L, Hkv, H / Hkv, D]

    Returns:
        out: [B, L, H, D], in the dtype of q
        lse: fp32 [B, H, L] (fp64 for fp64 inputs), log sum_{s in S_t} exp(q[t] . k[s] / sqrt(D)), without gradient
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
    """Sum KL(p_t || softmax_{s in S_t}(beta I[t, s])) over the rows: GSA, equations 14 and 15.

    The target p_t is the attention probability of query t for each key, averaged over the heads. Gradients reach only
    the indexer's tensors, including its inverse temperature beta.

    Args:
        q, k: all heads
        lse: log-sum-exp of the attention over the same keys
        selection: the selected keys; None: all causal keys of the document (indexer warm-up)
        rows: the queries (rows) over which the KL is summed

    Returns:
        loss: fp32, 0-d
        kl_of_rows: fp32 [B, L], without gradient; NaN for rows not sampled
    """
    _check_rows(indexer, geometry)
    _check_selection(selection, geometry, q, k)
    operations = _operations(implementation)
    return operations.indexer_loss(indexer, q, k, lse, selection, geometry, rows)


def sampled_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    packed_mask: torch.Tensor,
    *,
    implementation: Implementation,
) -> torch.Tensor:
    """Compute the log-sum-exp of the attention logits of S queries, for statistics. Return fp32 [B, H, S].

    Each query sums over the keys that `packed_mask` selects. This costs as much as dense attention to all Lk keys,
    about 4 B H S Lk D operations.

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
    """Decode one token per sequence. Select keys from the cache, attend to them, and apply the gate, without gradient.

    With Triton, the host does not wait for the device. A CUDA graph can therefore capture the step, and replay it while
    `cache.lengths` grows.

    Args:
        q: [B, H, D], of the token at position lengths - 1
        indexer: queries [B, 1, HI, DI] and head weight logits [B, 1, HI] of that token; keys [B, L_max, DI], the
            cache of the tokens' keys
        cache: the cache of this layer; its selection is overwritten
        variance_ema: fp32, 0-d, the layer's moving average from training
        geometry: `local_window` of training, other fields at their defaults
        gate_logits: [B, H, D], output gate G1 before its sigmoid

    Returns:
        [B, H, D]; zeros for a sequence of length 0
    """
    if geometry.document_starts is not None or geometry.query_start != 0:
        raise ValueError(
            f"geometry has document_starts or query_start {geometry.query_start}; pass local_window alone: a cache "
            "holds one document"
        )
    check_shape("indexer.queries", indexer.queries, "[B, 1, HI, DI]", (len(q), 1, None, None))
    sizes = tuple(cache.k.shape[:2])
    check_shape("indexer.keys", indexer.keys, "[B, L_max, DI], as the cache has", (*sizes, None))
    operations = _operations(implementation)
    return operations.decode_step(q, indexer, cache, rule, variance_ema, geometry, gate_logits)


def _operations(implementation: Implementation) -> ModuleType:
    """Return the module with this implementation of every operation, imported on first use."""
    if implementation not in _MODULES:
        raise ValueError(f"implementation is {implementation!r}; pass 'triton' or 'reference'")
    return import_module(_MODULES[implementation])


def _check_rows(indexer: Indexer, geometry: Geometry) -> None:
    batch, num_rows = indexer.queries.shape[:2]
    check_shape("indexer.keys", indexer.keys, "[B, Lk, DI]", (batch, None, None))
    length = indexer.keys.shape[1] - geometry.query_start
    if length < 1:
        raise ValueError(
            f"query_start is {geometry.query_start} with {indexer.keys.shape[1]} keys; pass the keys up to the last "
            "query's own"
        )
    if num_rows != length:
        raise ValueError(
            f"indexer.queries has {num_rows} rows; pass {length}: the queries from position {geometry.query_start} to "
            "the last key"
        )
    if geometry.document_starts is not None:
        check_shape("document_starts", geometry.document_starts, "[B, L]", (batch, length))


def _check_selection(
    selection: Selection | None, geometry: Geometry, q: torch.Tensor, k: torch.Tensor
) -> None:
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
