"""Computes the gradient of q. One program per tile of queries loops over the keys."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import GradientInputs
from gsa_kernels.attention.triton_tiles import (
    Tiles,
    causal_hit,
    expand_words,
    float_warps,
    input_precision,
    is_even,
    load_rows,
    load_words,
    tile_source,
    use_tma,
)
from gsa_kernels.devices import shared_memory
from gsa_kernels.limits import HOPPER_SHARED_BYTES, ceil_div
from gsa_kernels.triton_constants import LOG2_E


def query_tiles(head_size: int, dtype: torch.dtype, shared: int = HOPPER_SHARED_BYTES) -> Tiles:
    """Return the tile shape for a GPU with `shared` bytes of shared memory per program."""
    if dtype == torch.float32:
        return Tiles(32, 32, float_warps(head_size), 1, tma=False)
    if head_size > 128:
        # Shared memory holds 128 KiB of q and of the output's gradient, and two stages of 16 KiB each of k and of v. A
        # tile of 64 keys would leave no second stage. A tile of 64 queries would have one warpgroup with 248 registers
        # per thread.
        return Tiles(128, 32, 8, 2)
    # Three stages need 128 KiB without TMA.
    return Tiles(64, 64, 4, 3) if head_size <= 64 else Tiles(128, 64, 8, 3 if shared > 128 * 1024 else 2)


def backward_queries(
    inputs: GradientInputs, packed_mask: torch.Tensor | None, document_starts: torch.Tensor | None
) -> torch.Tensor:
    """Compute the gradient of q: [B, L, H, D]."""
    q, k, v, grad, scale = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.scale
    batch, length, heads, head_size = q.shape
    num_keys = k.shape[1]
    tiles = query_tiles(head_size, q.dtype, shared_memory(q.device))
    grad_q = torch.empty_like(q)
    tma = use_tma(tiles, k, v)
    _queries_kernel[(batch * heads, ceil_div(length, tiles.queries))](
        q,
        tile_source(k, tiles.keys, tma),
        tile_source(v, tiles.keys, tma),
        grad,
        inputs.delta,
        inputs.lse2,
        packed_mask,
        document_starts,
        grad_q,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        *(packed_mask.stride()[:2] if packed_mask is not None else (0, 0)),
        *grad_q.stride()[:3],
        length,
        num_keys - length or None,
        heads,
        ceil_div(num_keys, 32),
        scale,
        scale * LOG2_E.value,
        GROUP=heads // k.shape[2],
        D=head_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        HAS_MASK=packed_mask is not None,
        HAS_DOCUMENTS=document_starts is not None,
        EVEN=is_even(length, num_keys, max(tiles.queries, tiles.keys)),
        TMA=tma,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return grad_q


@triton.jit
def _queries_kernel(
    q, k, v, grad, delta, lse2, packed_mask, document_starts, grad_q,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_ub, stride_ul, stride_uh,
    stride_wb, stride_wl,
    stride_db, stride_dl, stride_dh,
    length, query_start, heads, word_columns, scale, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes the gradient of one tile of queries of one head. The last tiles run first."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    kv_head = head // GROUP
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    rows = start + tl.arange(0, QUERIES)
    valid = rows < length
    batch64 = batch.to(tl.int64)

    q_tile = load_rows(
        q, batch, head, start, stride_qb, stride_ql, stride_qh, length, QUERIES, D, EVEN, False
    )
    u_tile = load_rows(
        grad, batch, head, start, stride_ub, stride_ul, stride_uh, length, QUERIES, D, EVEN, False
    )
    position = (batch64 * heads + head) * length + rows
    row_lse2 = tl.load(lse2 + position, mask=valid, other=0.0)
    row_delta = tl.load(delta + position, mask=valid, other=0.0)

    num_keys = query_start + length
    positions = query_start + rows
    first = 0
    first_keys = rows
    if HAS_DOCUMENTS:
        first_keys = tl.load(document_starts + batch64 * length + rows, mask=valid, other=0)
        first = tl.load(document_starts + batch64 * length + start) // KEYS * KEYS
    last = tl.minimum(query_start + start + QUERIES, num_keys)
    if HAS_MASK:
        packed_mask += batch64 * stride_wb + start.to(tl.int64) * stride_wl
        diagonal = last
    else:
        diagonal = (query_start + start) // KEYS * KEYS

    acc = tl.zeros([QUERIES, D], tl.float32)
    acc = _pull_to_queries(
        q_tile, u_tile, row_lse2, row_delta, k, v, packed_mask, batch, kv_head, positions, valid, first_keys,
        first, diagonal, acc,
        stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
        num_keys, word_columns, scale_log2,
        D, QUERIES, KEYS, HAS_MASK, HAS_DOCUMENTS, HAS_DOCUMENTS, EVEN, TMA, PRECISION,
    )  # fmt: skip
    if not HAS_MASK:
        acc = _pull_to_queries(
            q_tile, u_tile, row_lse2, row_delta, k, v, packed_mask, batch, kv_head, positions, valid, first_keys,
            tl.maximum(first, diagonal), last, acc,
            stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
            num_keys, word_columns, scale_log2,
            D, QUERIES, KEYS, False, HAS_DOCUMENTS, True, EVEN, TMA, PRECISION,
        )  # fmt: skip

    grad_q += batch64 * stride_db + head.to(tl.int64) * stride_dh + start.to(tl.int64) * stride_dl
    target = grad_q + ((rows - start)[:, None] * stride_dl + tl.arange(0, D)[None, :])
    tl.store(target, (acc * scale).to(grad_q.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _pull_to_queries(
    q_tile, u_tile, row_lse2, row_delta, k, v, packed_mask, batch, kv_head, positions, valid, first_keys,
    first, last, acc,
    stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
    num_keys, word_columns, scale_log2,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K (S: logits) of keys in range(first, last) to acc. first is a multiple of KEYS."""
    local = tl.arange(0, QUERIES) * stride_wl
    if HAS_MASK:
        word0, word1, word2, word3 = load_words(
            packed_mask + local + first // 32, 1, valid, word_columns - first // 32, KEYS, EVEN
        )
    for column in range(first, last, KEYS):
        if HAS_MASK:
            # The mask words of the next tile are loaded now, so that the next iteration does not wait.
            ahead = column + KEYS
            if EVEN:
                ahead = tl.minimum(ahead, num_keys - KEYS)
            next0, next1, next2, next3 = load_words(
                packed_mask + local + ahead // 32, 1, valid, word_columns - ahead // 32, KEYS, EVEN
            )
        k_tile = load_rows(
            k, batch, kv_head, column, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA
        )
        v_tile = load_rows(
            v, batch, kv_head, column, stride_vb, stride_vl, stride_vh, num_keys, KEYS, D, EVEN, TMA
        )
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        by_probs = tl.dot(u_tile, tl.trans(v_tile), input_precision=PRECISION)
        probs = tl.exp2(logits * scale_log2 - row_lse2[:, None])
        if HAS_MASK:
            probs = tl.where(expand_words(word0, word1, word2, word3, KEYS), probs, 0.0)
        elif CAUSAL:
            hit = causal_hit(positions, column + tl.arange(0, KEYS), first_keys, HAS_DOCUMENTS)
            probs = tl.where(hit, probs, 0.0)
        by_logits = probs * (by_probs - row_delta[:, None])
        acc = tl.dot(by_logits.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        if HAS_MASK:
            word0, word1, word2, word3 = next0, next1, next2, next3
    return acc
