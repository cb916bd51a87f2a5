"""Sums attention probabilities over heads and over each block of queries. The sums are the target of the indexer loss
when a block shares one selection."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import checked_inputs
from gsa_kernels.attention.triton_probs import probs_tiles
from gsa_kernels.attention.triton_tiles import (
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
from gsa_kernels.limits import SELECTION_BLOCKS
from gsa_kernels.sampling import SampledRows
from gsa_kernels.triton_constants import LOG2_E
from gsa_kernels.triton_rows import row_of
from gsa_kernels.types import Geometry


@torch.no_grad()
def block_sum_probs_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: SampledRows,
    geometry: Geometry,
    packed_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum exp(q[t,h] . k[s] / sqrt(D) - lse[h,t]) over the heads h and the queries t of each block.

    Row r of `rows` is the block of the queries r b <= t < (r + 1) b. The sums cover the keys s <= r b, which existed
    when the block selected, and only the pairs in which t attends to s. All other entries are 0. Sums run in a fixed
    order. Queries are counted from `query_start`.

    Args:
        q: [B, L, H, D]
        k: [B, Lk, Hkv, D], Lk = query_start + L
        lse: fp32 [B, H, L], from attention to the same keys, so that each head's row sums to 1
        geometry: its selection_block is b, one of limits.SELECTION_BLOCKS of at least 16; the last block may be short
        packed_mask: int32 [B, L, ceil(Lk / 32)], the keys of each query; None: all causal keys of its document
    Returns:
        fp32 [B, rows.count, Lk], without gradient
    """
    document_starts, query_start = geometry.document_starts, geometry.query_start
    selection_block = geometry.selection_block
    inputs = checked_inputs(
        q, k, k, None, query_start, packed_mask=packed_mask, document_starts=document_starts
    )
    batch, length, heads, head_size = q.shape
    num_keys = k.shape[1]
    check_shape("lse", lse, "[B, H, L]", (batch, heads, length))
    if selection_block not in SELECTION_BLOCKS[1:]:
        raise ValueError(f"selection_block is {selection_block}; pass one of {SELECTION_BLOCKS[1:]}")
    check_at_least("rows.start", rows.start, 0)
    check_at_least("rows.count", rows.count, 1)
    blocks = triton.cdiv(length, selection_block)
    if rows.row(rows.count - 1) >= blocks:
        raise ValueError(
            f"rows end at {rows.row(rows.count - 1)}; pass rows of the sequence's {blocks} blocks"
        )
    tiles = probs_tiles(head_size, q.dtype)
    tma = use_tma(tiles, q, k)
    lse = lse.contiguous()
    out = torch.empty(batch, rows.count, num_keys, dtype=torch.float32, device=q.device)
    if document_starts is not None:
        document_starts = document_starts.contiguous()
    rows_per_tile = max(tiles.queries // selection_block, 1)
    grid = (triton.cdiv(num_keys, tiles.keys), triton.cdiv(rows.count, rows_per_tile), batch)
    _block_probs_kernel[grid](
        tile_source(q, tiles.queries, tma),
        tile_source(k, tiles.keys, tma),
        lse,
        document_starts,
        packed_mask,
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        *((0, 0) if packed_mask is None else packed_mask.stride()[:2]),
        rows.start,
        rows.count,
        length,
        query_start or None,
        triton.cdiv(num_keys, 32),
        inputs.scale * LOG2_E.value,
        KV_HEADS=k.shape[2],
        GROUP=heads // k.shape[2],
        D=head_size,
        BLOCK=selection_block,
        ROWS=rows_per_tile,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        STRETCH=rows.stretch,
        SPACING=rows.spacing,
        HAS_DOCUMENTS=document_starts is not None,
        EVEN=is_even(length, num_keys, max(tiles.queries, tiles.keys, selection_block))
        and rows.count % rows_per_tile == 0,
        TMA=tma,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@triton.jit
def _block_probs_kernel(
    q, k, lse, document_starts, packed_mask, out,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_wb, stride_wl,
    row_start, num_rows, length, query_start, word_columns, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STRETCH: tl.constexpr, SPACING: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes KEYS keys of ROWS blocks, or of one block in BLOCK / QUERIES tiles of queries."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    batch = tl.program_id(2)
    batch64 = batch.to(tl.int64)
    column = tl.program_id(0) * KEYS
    columns = column + tl.arange(0, KEYS)
    number = tl.program_id(1) * ROWS
    row = row_of(number, row_start, STRETCH, SPACING)
    rows = row + tl.arange(0, ROWS)
    num_keys = query_start + length
    total = tl.zeros([ROWS, KEYS], tl.float32)

    here = tl.minimum(num_rows - number, ROWS)
    seen = column <= query_start + (row + here - 1) * BLOCK
    if HAS_DOCUMENTS:
        document_starts += batch64 * length
        seen = seen & (column + KEYS > tl.load(document_starts + row * BLOCK))
    if seen:
        for start in range(row * BLOCK, (row + ROWS) * BLOCK, QUERIES):
            queries = start + tl.arange(0, QUERIES)
            valid = queries < length
            probs = tl.zeros([QUERIES, KEYS], tl.float32)
            for kv_head in range(KV_HEADS):
                k_tile = load_rows(
                    k, batch, kv_head, column, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA
                )
                for member in range(GROUP):
                    head = kv_head * GROUP + member
                    q_tile = load_rows(
                        q, batch, head, start, stride_qb, stride_ql, stride_qh, length, QUERIES, D, EVEN, TMA
                    )
                    position = (batch64 * (KV_HEADS * GROUP) + head) * length + queries
                    row_lse2 = tl.load(lse + position, mask=valid, other=0.0) * LOG2_E
                    logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    probs += tl.exp2(logits * scale_log2 - row_lse2[:, None])
            if packed_mask is not None:
                first_word = (
                    packed_mask + batch64 * stride_wb + queries.to(tl.int64) * stride_wl + column // 32
                )
                word0, word1, word2, word3 = load_words(
                    first_word, 1, valid, word_columns - column // 32, KEYS, False
                )
                hit = expand_words(word0, word1, word2, word3, KEYS)
            else:
                first_keys = queries
                if HAS_DOCUMENTS:
                    first_keys = tl.load(document_starts + queries, mask=valid, other=0)
                hit = causal_hit(query_start + queries, columns, first_keys, HAS_DOCUMENTS)
            # The mask is applied after the sum, because the exponential of a masked key may overflow to infinity.
            probs = tl.where(hit & valid[:, None], probs, 0.0)
            total += tl.sum(tl.reshape(probs, [ROWS, QUERIES // ROWS, KEYS]), axis=1)
        total = tl.where(columns[None, :] <= query_start + rows[:, None] * BLOCK, total, 0.0)
    out += (batch64 * num_rows + number) * num_keys
    target = out + (tl.arange(0, ROWS).to(tl.int64)[:, None] * num_keys + columns[None, :])
    tl.store(target, total, mask=(tl.arange(0, ROWS) < here)[:, None] & (columns < num_keys)[None, :])
