"""Computes the gradients of k and v. Each program takes one tile of keys, and loops over the queries that attend to
them."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import GradientInputs
from gsa_kernels.attention.triton_packed_mask import transpose_packed_mask
from gsa_kernels.attention.triton_tiles import (
    Tiles,
    count_multiprocessors,
    expand_words,
    float_warps,
    input_precision,
    is_even,
    load_rows,
    load_words,
    tile_source,
    use_tma,
)
from gsa_kernels.limits import GRADIENT_KEYS, ceil_div, count_key_parts
from gsa_kernels.triton_constants import LOG2_E


def key_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """Return the tile shape for the gradients of k and v."""
    if dtype == torch.float32:
        return Tiles(32, GRADIENT_KEYS[4], float_warps(head_size), 1, tma=False)
    if head_size > 128:
        # The two gradients take 128 of 256 registers in each thread. Shared memory holds 64 KiB of k and v, and two
        # stages of 32 KiB each of q and of the output's gradient.
        return Tiles(64, GRADIENT_KEYS[2], 8, 2)
    # A third stage leaves room for only one program per multiprocessor at head size 128.
    return Tiles(64, GRADIENT_KEYS[2], 4, 3 if head_size <= 64 else 2)


def backward_keys(
    inputs: GradientInputs, packed_mask: torch.Tensor | None, document_starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of k and v: [B, Lk, Hkv, D].

    There is one program per pair (tile of keys, key-value head). If these programs cannot fill the device, the query
    heads of a key-value head are divided into parts (`count_key_parts`). Each part then has a program of its own, and a
    second kernel adds the gradients of the parts.
    """
    q, k, v, grad, scale = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.scale
    batch, length, heads, head_size = q.shape
    num_keys, kv_heads = k.shape[1:3]
    query_start = num_keys - length
    group = heads // kv_heads
    tiles = key_tiles(head_size, q.dtype)
    key_blocks = ceil_div(num_keys, tiles.keys)
    splits = count_key_parts(batch * kv_heads * key_blocks, group, count_multiprocessors(q.device))
    if splits == 1:
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        targets = grad_k[None], grad_v[None]
    else:
        parts = torch.empty(
            2, splits, batch, num_keys, kv_heads, head_size, dtype=torch.float32, device=q.device
        )
        targets = parts[0], parts[1]
    last_rows = None
    if document_starts is not None:
        # Rows below last_rows[b, i] may attend to key block i; the documents of later rows start after the block.
        ends = torch.arange(1, key_blocks + 1, device=q.device, dtype=torch.int32) * tiles.keys - 1
        ends = ends.expand(batch, key_blocks).contiguous()
        last_rows = torch.searchsorted(document_starts, ends, right=True, out_int32=True)
    turned = transpose_packed_mask(packed_mask, query_start) if packed_mask is not None else None
    tma = use_tma(tiles, q, grad)
    _keys_kernel[(batch * kv_heads * splits, key_blocks)](
        tile_source(q, tiles.queries, tma),
        k,
        v,
        tile_source(grad, tiles.queries, tma),
        inputs.delta,
        inputs.lse2,
        turned,
        document_starts,
        last_rows,
        *targets,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        *targets[0].stride()[:4],
        *targets[1].stride()[:4],
        length,
        query_start or None,
        heads,
        kv_heads,
        ceil_div(length, 32),
        scale,
        scale * LOG2_E.value,
        GROUP=group,
        SPLITS=splits,
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
    if splits > 1:
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        rows = 16
        _sum_parts_kernel[(ceil_div(num_keys, rows), batch * kv_heads, 2)](
            parts,
            grad_k,
            grad_v,
            *grad_k.stride()[:3],
            *grad_v.stride()[:3],
            batch,
            num_keys,
            kv_heads,
            SPLITS=splits,
            D=head_size,
            ROWS=rows,
            num_warps=4,
        )
    return grad_k, grad_v


@triton.jit
def _keys_kernel(
    q, k, v, grad, delta, lse2, turned, document_starts, last_rows, grad_k, grad_v,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_ub, stride_ul, stride_uh,
    stride_xs, stride_xb, stride_xl, stride_xh,
    stride_ys, stride_yb, stride_yl, stride_yh,
    length, query_start, heads, kv_heads, word_columns, scale, scale_log2,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of one tile of keys for one key-value head, summed over GROUP / SPLITS query
    heads.

    The program works on transposed tiles [KEYS, QUERIES]. Probabilities and their gradients are then left-hand operands
    of matrix products, and can stay in registers. The grid starts with the first key tiles, which take longest, because
    the most queries attend to them.
    """
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(0) // SPLITS % kv_heads
    batch = tl.program_id(0) // (SPLITS * kv_heads)
    block = tl.program_id(1)
    start = block * KEYS
    columns = start + tl.arange(0, KEYS)
    num_keys = query_start + length
    valid = columns < num_keys
    batch64 = batch.to(tl.int64)

    k_tile = load_rows(
        k, batch, kv_head, start, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, False
    )
    v_tile = load_rows(
        v, batch, kv_head, start, stride_vb, stride_vl, stride_vh, num_keys, KEYS, D, EVEN, False
    )
    last = length
    if HAS_DOCUMENTS:
        document_starts += batch64 * length
        last = tl.load(last_rows + batch64 * tl.num_programs(1) + block)
    if HAS_MASK:
        turned += batch64 * word_columns * num_keys
    first = tl.maximum(start - query_start, 0) // QUERIES * QUERIES
    # Dense attention: rows from `below` on attend to the whole tile, up to the limit of their document.
    below = tl.cdiv(tl.maximum(start + KEYS - query_start, 0), QUERIES) * QUERIES

    acc_k = tl.zeros([KEYS, D], tl.float32)
    acc_v = tl.zeros([KEYS, D], tl.float32)
    for member in range(GROUP // SPLITS):
        head = kv_head * GROUP + split * (GROUP // SPLITS) + member
        if HAS_MASK:
            acc_k, acc_v = _pull_to_keys(
                k_tile, v_tile, q, grad, delta, lse2, turned, document_starts, batch, head, columns, valid, query_start,
                first, last, acc_k, acc_v,
                stride_qb, stride_ql, stride_qh, stride_ub, stride_ul, stride_uh,
                length, num_keys, heads, word_columns, scale_log2,
                D, QUERIES, KEYS, HAS_MASK, HAS_DOCUMENTS, False, EVEN, TMA, PRECISION,
            )  # fmt: skip
        else:
            acc_k, acc_v = _pull_to_keys(
                k_tile, v_tile, q, grad, delta, lse2, turned, document_starts, batch, head, columns, valid, query_start,
                first, tl.minimum(below, last), acc_k, acc_v,
                stride_qb, stride_ql, stride_qh, stride_ub, stride_ul, stride_uh,
                length, num_keys, heads, word_columns, scale_log2,
                D, QUERIES, KEYS, HAS_MASK, HAS_DOCUMENTS, True, EVEN, TMA, PRECISION,
            )  # fmt: skip
            acc_k, acc_v = _pull_to_keys(
                k_tile, v_tile, q, grad, delta, lse2, turned, document_starts, batch, head, columns, valid, query_start,
                below, last, acc_k, acc_v,
                stride_qb, stride_ql, stride_qh, stride_ub, stride_ul, stride_uh,
                length, num_keys, heads, word_columns, scale_log2,
                D, QUERIES, KEYS, HAS_MASK, HAS_DOCUMENTS, HAS_DOCUMENTS, EVEN, TMA, PRECISION,
            )  # fmt: skip

    local = (columns - start)[:, None]
    dims = tl.arange(0, D)[None, :]
    head64, split64, start64 = kv_head.to(tl.int64), split.to(tl.int64), start.to(tl.int64)
    grad_k += split64 * stride_xs + batch64 * stride_xb + head64 * stride_xh + start64 * stride_xl
    grad_v += split64 * stride_ys + batch64 * stride_yb + head64 * stride_yh + start64 * stride_yl
    target = grad_k + (local * stride_xl + dims)
    tl.store(target, (acc_k * scale).to(grad_k.dtype.element_ty), mask=valid[:, None])
    target = grad_v + (local * stride_yl + dims)
    tl.store(target, acc_v.to(grad_v.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _sum_parts_kernel(
    parts, grad_k, grad_v, stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh,
    batches, length, kv_heads, SPLITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the parts [2, SPLITS, B, L, Hkv, D] of the gradients of k and v in a fixed order."""
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = tl.program_id(1) % kv_heads
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    dims = tl.arange(0, D)[None, :]
    total = tl.zeros([ROWS, D], tl.float32)
    for split in range(SPLITS):
        part = (tl.program_id(2) * SPLITS + split) * batches + batch
        position = ((part * length + rows) * kv_heads + head) * D + dims
        total += tl.load(parts + position, mask=rows < length, other=0.0)
    if tl.program_id(2) == 0:
        target = grad_k + (batch * stride_kb + rows * stride_kl + head * stride_kh + dims)
        tl.store(target, total.to(grad_k.dtype.element_ty), mask=rows < length)
    else:
        target = grad_v + (batch * stride_vb + rows * stride_vl + head * stride_vh + dims)
        tl.store(target, total.to(grad_v.dtype.element_ty), mask=rows < length)


@triton.jit
def _pull_to_keys(
    k_tile, v_tile, q, grad, delta, lse2, turned, document_starts, batch, head, columns, valid, query_start,
    first, last, acc_k, acc_v,
    stride_qb, stride_ql, stride_qh, stride_ub, stride_ul, stride_uh,
    length, num_keys, heads, word_columns, scale_log2,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add P^T dO to `acc_v` and dS^T Q to `acc_k`, summed over the queries `first` to `last - 1`.

    P are the attention probabilities, and dS is the gradient of the logits.
    """
    head_rows = (batch.to(tl.int64) * heads + head) * length
    own_rows = columns - query_start  # rows of the queries at the positions of these keys
    if HAS_MASK:
        # Vector j holds words [first // 32 + j, columns]. The offset of the first row is a 64-bit scalar.
        base = turned + tl.cast(first // 32, tl.int64) * num_keys
        word0, word1, word2, word3 = load_words(
            base + columns, num_keys, valid, word_columns - first // 32, QUERIES, EVEN
        )
    for row in range(first, last, QUERIES):
        rows = row + tl.arange(0, QUERIES)
        if HAS_MASK:
            ahead = row + QUERIES
            if EVEN:
                ahead = tl.minimum(ahead, length - QUERIES)
            base = turned + tl.cast(ahead // 32, tl.int64) * num_keys
            next0, next1, next2, next3 = load_words(
                base + columns, num_keys, valid, word_columns - ahead // 32, QUERIES, EVEN
            )
        q_tile = load_rows(
            q, batch, head, row, stride_qb, stride_ql, stride_qh, length, QUERIES, D, EVEN, TMA
        )
        u_tile = load_rows(
            grad, batch, head, row, stride_ub, stride_ul, stride_uh, length, QUERIES, D, EVEN, TMA
        )
        if EVEN:
            row_lse2 = tl.load(lse2 + head_rows + rows)
            row_delta = tl.load(delta + head_rows + rows)
        else:
            row_lse2 = tl.load(lse2 + head_rows + rows, mask=rows < length, other=0.0)
            row_delta = tl.load(delta + head_rows + rows, mask=rows < length, other=0.0)
        logits = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        by_probs = tl.dot(v_tile, tl.trans(u_tile), input_precision=PRECISION)
        probs = tl.exp2(logits * scale_log2 - row_lse2[None, :])
        if HAS_MASK:
            probs = tl.where(expand_words(word0, word1, word2, word3, QUERIES), probs, 0.0)
        elif CAUSAL:
            hit = own_rows[:, None] <= rows[None, :]
            if HAS_DOCUMENTS:
                first_keys = tl.load(document_starts + rows, mask=rows < length, other=0)
                hit = hit & (columns[:, None] >= first_keys[None, :])
            probs = tl.where(hit, probs, 0.0)
        acc_v = tl.dot(probs.to(u_tile.dtype), u_tile, acc_v, input_precision=PRECISION)
        by_logits = probs * (by_probs - row_delta[None, :])
        acc_k = tl.dot(by_logits.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
        if HAS_MASK:
            word0, word1, word2, word3 = next0, next1, next2, next3
    return acc_k, acc_v
