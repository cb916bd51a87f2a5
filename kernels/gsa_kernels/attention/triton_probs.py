"""Probabilities of attention summed over heads: the target of the indexer's loss."""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow by addition, for Triton has no starred ones.
# ruff: noqa: RUF005

from typing import Any

import torch
import triton
import triton.language as tl

from gsa_kernels import sampling
from gsa_kernels.attention.op import check_attention
from gsa_kernels.attention.triton_tiles import (
    LOG2E,
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
from gsa_kernels.sampling import RowSample
from gsa_kernels.triton_rows import row_of


def probs_tiles(dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1, tma=False)
    return Tiles(64, 128, 4, 3)


def shared_probs_tiles(dtype: torch.dtype) -> Tiles:
    """Three programs share a multiprocessor: one multiplies while another waits for its exponentials."""
    tiles = probs_tiles(dtype)
    return tiles if dtype == torch.float32 else tiles._replace(registers=168)


PROBS_FORMS: dict[str, dict[str, Any]] = {
    "64 x 128": {},
    "64 x 2 x 128": {"tiles": Tiles(64, 128, 4, 2), "key_tiles": 2},
    "64 x 2 x 128, three stages": {"tiles": Tiles(64, 128, 4, 3), "key_tiles": 2},
    "2 x 64 x 128": {"tiles": Tiles(64, 128, 4, 2), "row_tiles": 2},
    "2 x 64 x 128, three stages": {"tiles": Tiles(64, 128, 4, 3), "row_tiles": 2},
    "128 x 128, groups ahead": {"tiles": Tiles(128, 128, 8, 2), "unroll_groups": True},
}
"""Of `head_sum_probs_rows` in halves with heads of 128, to be measured: the first is the default.

It reads 48 bytes of queries and keys per pair of query and key from the L2 for 16 heads over 4, 410 MB for 4096 tokens,
and waits for each key head's tile before it asks for the queries; three programs share a multiprocessor. With two key
tiles it is 32 bytes, with two row tiles 40, and either waits half as often for the same work, in two programs. With
groups ahead (40 bytes, one program) the next key head's tiles are asked for before the products of this one. On sm_90
only the third spills in its loop."""


@torch.no_grad()
def head_sum_probs_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    words: torch.Tensor | None,
    rows: RowSample,
    *,
    document_starts: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    query_start: int = 0,
    dtype: torch.dtype = torch.float32,
    fill: bool = True,
    tiles: Tiles | None = None,
    row_tiles: int = 1,
    key_tiles: int = 1,
    unroll_groups: bool = False,
) -> torch.Tensor:
    """sum_h exp(q[t,h] . k[s] * scale - lse[h,t]) for s in S_t, 0 elsewhere; for the queries t of `rows`.

    Args:
        q: [B, L, H, D]
        k: [B, Lk, Hkv, D], Lk = query_start + L
        lse: fp32 [B, H, L], from `masked_attention` with the same words: each head's row sums to 1
        rows: counted in queries, not positions
        words, document_starts, query_start: as in `masked_attention`
        dtype: of the result, fp32 or fp16; the sum is always taken in fp32
        fill: False leaves unwritten what no query of a tile sees, which `indexer_kl_loss` does not read
        row_tiles, key_tiles: tiles of queries and of keys of a program: each is read once for all of the others;
            costs registers
        unroll_groups: load what a key head needs, keys and the queries of all of its heads, one key head ahead;
            costs shared memory

    Returns:
        [B, rows.count, Lk], without gradient
    """
    scale = check_attention(q, k, k, words, document_starts, softmax_scale, None, query_start)
    batch, length, heads, head_size = q.shape
    num_keys = k.shape[1]
    check_shape("lse", lse, "[B, H, L]", (batch, heads, length))
    check_at_least("rows.start", rows.start, 0)
    check_at_least("rows.count", rows.count, 1)
    if rows.row(rows.count - 1) >= length:
        raise ValueError(f"rows end at {rows.row(rows.count - 1)}; pass rows of a sequence of {length}")
    tiles = tiles or shared_probs_tiles(q.dtype)
    tma = use_tma(tiles, q, k)
    program_rows, program_keys = tiles.queries * row_tiles, tiles.keys * key_tiles
    if rows.every > 1 and sampling.SAMPLED_ROWS % program_rows:
        raise ValueError(
            f"a program has {program_rows} rows; pass a divisor of {sampling.SAMPLED_ROWS} for a sample"
        )
    lse = lse.contiguous()
    out = torch.empty(batch, rows.count, num_keys, dtype=dtype, device=q.device)
    if document_starts is not None:
        document_starts = document_starts.contiguous()
    grid = (triton.cdiv(num_keys, program_keys), triton.cdiv(rows.count, program_rows), batch)
    _probs_kernel[grid](
        tile_source(q, tiles.queries, tma),
        tile_source(k, tiles.keys, tma),
        lse,
        words,
        document_starts,
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        *(words.stride()[:2] if words is not None else (0, 0)),
        rows.start,
        rows.count,
        length,
        query_start or None,
        triton.cdiv(num_keys, 32),
        scale * LOG2E,
        KV_HEADS=k.shape[2],
        GROUP=heads // k.shape[2],
        D=head_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        PARTS=row_tiles,
        SPANS=key_tiles,
        UNROLL=unroll_groups,
        RUN=sampling.SAMPLED_ROWS,
        SPACING=rows.spacing,
        HAS_WORDS=words is not None,
        HAS_DOCUMENTS=document_starts is not None,
        EVEN=is_even(length, num_keys, max(program_rows, program_keys)) and rows.count % program_rows == 0,
        TMA=tma,
        PRECISION=input_precision(q.dtype),
        FILL=fill,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    return out


@triton.jit
def _probs_kernel(
    q, k, lse, words, document_starts, out,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_wb, stride_wl,
    row_start, num_rows, length, query_start, word_columns, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, SPANS: tl.constexpr, UNROLL: tl.constexpr,
    RUN: tl.constexpr, SPACING: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """One program: PARTS x SPANS tiles of the result, summed over all heads."""
    if query_start is None:  # stands for 0: a constant, so that the whole sequence costs nothing more
        query_start = 0
    batch = tl.program_id(2)
    batch64 = batch.to(tl.int64)
    column = tl.program_id(0) * (KEYS * SPANS)
    number = tl.program_id(1) * (QUERIES * PARTS)
    start = row_of(number, row_start, RUN, SPACING)
    num_keys = query_start + length
    totals = ()
    for _ in tl.static_range(PARTS * SPANS):
        totals = totals + (tl.zeros([QUERIES, KEYS], tl.float32),)

    seen = column < query_start + start + QUERIES * PARTS
    if HAS_DOCUMENTS:
        document_starts += batch64 * length
        seen = seen & (column + KEYS * SPANS > tl.load(document_starts + start))
    if seen:
        for kv_head in range(KV_HEADS):
            k_tiles = ()
            for span in tl.static_range(SPANS):
                k_tile = load_rows(
                    k, batch, kv_head, column + span * KEYS,
                    stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA,
                )  # fmt: skip
                k_tiles = k_tiles + (k_tile,)
            if UNROLL:
                for member in tl.static_range(GROUP):
                    totals = _add_head(
                        totals, q, k_tiles, lse, batch, kv_head * GROUP + member, number, num_rows, start,
                        stride_qb, stride_ql, stride_qh, length, scale_log2,
                        KV_HEADS * GROUP, D, QUERIES, PARTS, SPANS, EVEN, TMA, PRECISION,
                    )  # fmt: skip
            else:
                for member in range(GROUP):
                    totals = _add_head(
                        totals, q, k_tiles, lse, batch, kv_head * GROUP + member, number, num_rows, start,
                        stride_qb, stride_ql, stride_qh, length, scale_log2,
                        KV_HEADS * GROUP, D, QUERIES, PARTS, SPANS, EVEN, TMA, PRECISION,
                    )  # fmt: skip
    if HAS_WORDS:
        words += batch64 * stride_wb
    for part in tl.static_range(PARTS):
        first = start + part * QUERIES
        valid = number + part * QUERIES + tl.arange(0, QUERIES) < num_rows
        part_out = out + (batch64 * num_rows + number + part * QUERIES) * num_keys
        for span in tl.static_range(SPANS):
            from_key = column + span * KEYS
            columns = from_key + tl.arange(0, KEYS)
            total = totals[part * SPANS + span]
            if seen:
                if HAS_WORDS:
                    local = tl.arange(0, QUERIES) * stride_wl
                    word0, word1, word2, word3 = load_words(
                        words + first.to(tl.int64) * stride_wl + local + from_key // 32,
                        1, valid, word_columns - from_key // 32, KEYS, EVEN,
                    )  # fmt: skip
                    hit = expand_words(word0, word1, word2, word3, KEYS)
                else:
                    rows = first + tl.arange(0, QUERIES)
                    first_keys = rows
                    if HAS_DOCUMENTS:
                        first_keys = tl.load(document_starts + rows, mask=valid, other=0)
                    hit = causal_hit(query_start + rows, columns, first_keys, HAS_DOCUMENTS)
                # Selected after the sum: an unselected key's logit may overflow, and inf is dropped here.
                total = tl.where(hit, total, 0.0)
            target = part_out + (tl.arange(0, QUERIES).to(tl.int64)[:, None] * num_keys + columns[None, :])
            if seen | FILL:
                mask = valid[:, None] & (columns < num_keys)[None, :]
                tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_head(
    totals, q, k_tiles, lse, batch, head, number, num_rows, start,
    stride_qb, stride_ql, stride_qh, length, scale_log2,
    HEADS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr, SPANS: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The totals with the probabilities of one head added."""
    added = ()
    for part in tl.static_range(PARTS):
        first = start + part * QUERIES
        q_tile = load_rows(
            q, batch, head, first, stride_qb, stride_ql, stride_qh, length, QUERIES, D, EVEN, TMA
        )
        valid = number + part * QUERIES + tl.arange(0, QUERIES) < num_rows
        position = (batch.to(tl.int64) * HEADS + head) * length + first + tl.arange(0, QUERIES)
        row_lse2 = tl.load(lse + position, mask=valid, other=0.0) * 1.4426950408889634
        for span in tl.static_range(SPANS):
            logits = tl.dot(q_tile, tl.trans(k_tiles[span]), input_precision=PRECISION)
            added = added + (totals[part * SPANS + span] + tl.exp2(logits * scale_log2 - row_lse2[:, None]),)
    return added
