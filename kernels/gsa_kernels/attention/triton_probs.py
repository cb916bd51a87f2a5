"""Sums attention probabilities over heads: the target of the indexer loss."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import ALL_OF_ONE_SEQUENCE, checked_inputs
from gsa_kernels.attention.triton_tiles import (
    Tiles,
    causal_hit,
    expand_words,
    input_precision,
    is_even,
    load_rows,
    load_words,
    tile_source,
    use_tma,
)
from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.limits import ceil_div
from gsa_kernels.sampling import SampledRows
from gsa_kernels.triton_constants import LOG2_E
from gsa_kernels.triton_rows import row_of
from gsa_kernels.types import Geometry


def probs_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1, tma=False)
    # A product over 256 channels has twice the instructions, and registers hold the addresses of their operands.
    return Tiles(64, 128 if head_size <= 128 else 64, 4, 3)


def shared_probs_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """Return tiles that let three programs share a multiprocessor. One multiplies while others compute exponentials."""
    tiles = probs_tiles(head_size, dtype)
    if dtype == torch.float32:
        return tiles
    # Each program has 64 of the 227 KiB of shared memory. Heads of size 256 fit in two stages only.
    return tiles._replace(registers=168, stages=3 if head_size <= 128 else 2)


@torch.no_grad()
def head_sum_probs_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    packed_mask: torch.Tensor | None,
    rows: SampledRows,
    geometry: Geometry = ALL_OF_ONE_SEQUENCE,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sum exp(q[t,h] . k[s] / sqrt(D) - lse[h,t]) over the heads, for the queries t of `rows` and the keys s in S_t.

    For all other keys the result is 0, except in tiles without a causal key. These tiles stay uninitialised, because
    `triton_indexer_loss` does not read them.

    Args:
        q: [B, L, H, D]
        k: [B, Lk, Hkv, D], Lk = query_start + L
        lse: fp32 [B, H, L], from `masked_attention` with the same packed mask, so that each head's row sums to 1
        rows: which queries, as indices into dimension L of q
        packed_mask, geometry: as in `masked_attention`
        dtype: dtype of the result, fp32 or fp16; the heads are always added in fp32

    Returns:
        [B, rows.count, Lk], without gradient
    """
    document_starts, query_start = geometry.document_starts, geometry.query_start
    scale = checked_inputs(
        q, k, k, None, query_start, packed_mask=packed_mask, document_starts=document_starts
    ).scale
    batch, length, heads, head_size = q.shape
    num_keys = k.shape[1]
    check_shape("lse", lse, "[B, H, L]", (batch, heads, length))
    check_at_least("rows.start", rows.start, 0)
    check_at_least("rows.count", rows.count, 1)
    if rows.row(rows.count - 1) >= length:
        raise ValueError(f"rows end at {rows.row(rows.count - 1)}; pass rows of a sequence of {length}")
    tiles = shared_probs_tiles(head_size, q.dtype)
    tma = use_tma(tiles, q, k)
    lse = lse.contiguous()
    out = torch.empty(batch, rows.count, num_keys, dtype=dtype, device=q.device)
    if document_starts is not None:
        document_starts = document_starts.contiguous()
    grid = (ceil_div(num_keys, tiles.keys), ceil_div(rows.count, tiles.queries), batch)
    _probs_kernel[grid](
        tile_source(q, tiles.queries, tma),
        tile_source(k, tiles.keys, tma),
        lse,
        packed_mask,
        document_starts,
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        *(packed_mask.stride()[:2] if packed_mask is not None else (0, 0)),
        rows.start,
        rows.count,
        length,
        query_start or None,
        ceil_div(num_keys, 32),
        scale * LOG2_E.value,
        KV_HEADS=k.shape[2],
        GROUP=heads // k.shape[2],
        D=head_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        STRETCH=rows.stretch,
        SPACING=rows.spacing,
        HAS_MASK=packed_mask is not None,
        HAS_DOCUMENTS=document_starts is not None,
        EVEN=is_even(length, num_keys, max(tiles.queries, tiles.keys)) and rows.count % tiles.queries == 0,
        TMA=tma,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    return out


@triton.jit
def _probs_kernel(
    q, k, lse, packed_mask, document_starts, out,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_wb, stride_wl,
    row_start, num_rows, length, query_start, word_columns, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of the result, summed over all heads."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    batch = tl.program_id(2)
    batch64 = batch.to(tl.int64)
    column = tl.program_id(0) * KEYS
    number = tl.program_id(1) * QUERIES
    start = row_of(number, row_start, STRETCH, SPACING)
    rows = start + tl.arange(0, QUERIES)
    columns = column + tl.arange(0, KEYS)
    valid = number + tl.arange(0, QUERIES) < num_rows
    num_keys = query_start + length
    total = tl.zeros([QUERIES, KEYS], tl.float32)

    seen = column < query_start + start + QUERIES
    if HAS_DOCUMENTS:
        document_starts += batch64 * length
        seen = seen & (column + KEYS > tl.load(document_starts + start))
    if seen:
        heads: tl.constexpr = KV_HEADS * GROUP
        lse_rows = lse + batch64 * heads * length + rows
        # The log-sum-exp is loaded one head ahead, because the compiler pipelines only the operands of a product.
        next_lse = tl.load(lse_rows, mask=valid, other=0.0)
        for kv_head in range(KV_HEADS):
            k_tile = load_rows(
                k, batch, kv_head, column, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA
            )
            for member in range(GROUP):
                head = kv_head * GROUP + member
                q_tile = load_rows(
                    q, batch, head, start, stride_qb, stride_ql, stride_qh, length, QUERIES, D, EVEN, TMA
                )
                row_lse2 = next_lse * LOG2_E
                next_lse = tl.load(lse_rows + (head + 1) * length, mask=valid & (head + 1 < heads), other=0.0)
                logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                total += tl.exp2(logits * scale_log2 - row_lse2[:, None])
        if HAS_MASK:
            packed_mask += batch64 * stride_wb + start.to(tl.int64) * stride_wl
            local = tl.arange(0, QUERIES) * stride_wl
            word0, word1, word2, word3 = load_words(
                packed_mask + local + column // 32, 1, valid, word_columns - column // 32, KEYS, EVEN
            )
            hit = expand_words(word0, word1, word2, word3, KEYS)
        else:
            first_keys = rows
            if HAS_DOCUMENTS:
                first_keys = tl.load(document_starts + rows, mask=valid, other=0)
            hit = causal_hit(query_start + rows, columns, first_keys, HAS_DOCUMENTS)
        # The mask is applied after the sum, because the exponential of an unselected key may overflow to infinity.
        total = tl.where(hit, total, 0.0)
    out += (batch64 * num_rows + number) * num_keys
    target = out + (tl.arange(0, QUERIES).to(tl.int64)[:, None] * num_keys + columns[None, :])
    if seen:
        tl.store(target, total.to(out.dtype.element_ty), mask=valid[:, None] & (columns < num_keys)[None, :])
