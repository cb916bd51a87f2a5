"""Sums attention probabilities over heads for each entry of the key lists: the target of the indexer loss.

A matrix product has one row per entry and one column per pair (head, query). In the product's register layout, one
thread holds the values of all heads for a query. The sum over heads therefore needs no exchange between threads: each
thread adds its own registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import checked_inputs
from gsa_kernels.attention.triton_tiles import input_precision
from gsa_kernels.checks import check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import TILE_QUERIES, ceil_div, next_power_of_2
from gsa_kernels.sampling import SampledRows
from gsa_kernels.triton_constants import LOG2_E


class ProbsTiles(NamedTuple):
    """Holds the tile shape and launch options of the kernel."""

    entries: int
    members: int
    """Query heads of a key-value head in one product."""
    warps: int
    stages: int


def gathered_probs_tiles(head_size: int, dtype: torch.dtype) -> ProbsTiles:
    if dtype == torch.float32:
        return ProbsTiles(32, 1, 8, 1)
    if head_size > 128:
        # Two stages hold 32 KiB of q and 32 KiB of k each, so that two programs fit a multiprocessor.
        return ProbsTiles(64, 2, 4, 2)
    # This is faster than 128 entries and 8 warps (docs/kernels.md, Tuning).
    return ProbsTiles(64, 4, 4, 2)


@torch.no_grad()
def head_sum_probs_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    lists: KeyLists,
    rows: SampledRows,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sum exp(q[t,h] . k[s] / sqrt(D) - lse[h,t]) over the heads for every query t of `rows` and entry s of its list.

    Where query t does not attend to key s, the sum is 0. Entries at or beyond a tile's count are unspecified.

    Args:
        q: [B, L, H, D]
        k: [B, Lk, Hkv, D], Lk = lists.num_keys
        lse: fp32 [B, H, L], from attention over the same lists, so that each head's row sums to 1
        rows: whole tiles
        columns: size of the last dimension, at least lists.max_count
        dtype: of the result, fp32 or fp16; the heads are always added in fp32

    Returns:
        [B, rows, columns]
    """
    scale = checked_inputs(q, k, k, None, lists.query_start).scale
    batch, length, heads, head_size = q.shape
    check_shape("lse", lse, "[B, H, L]", (batch, heads, length))
    check_lists(lists, batch, length)
    shape = gathered_probs_tiles(head_size, q.dtype)
    group = heads // k.shape[2]
    members = min(shape.members, next_power_of_2(group))
    lse = lse.contiguous()
    tiles = ceil_div(rows.count, TILE_QUERIES)
    out = torch.empty((batch, tiles * TILE_QUERIES, columns), dtype=dtype, device=q.device)
    grid = (ceil_div(lists.max_count, shape.entries), tiles, batch)
    _gathered_probs_kernel[grid](
        q,
        k,
        lse,
        lists.keys,
        lists.words,
        lists.starts,
        lists.counts,
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        length,
        lists.counts.shape[1],
        rows.start // TILE_QUERIES,
        rows.every,
        columns,
        scale * LOG2_E.value,
        KV_HEADS=k.shape[2],
        GROUP=group,
        MEMBERS=members,
        D=head_size,
        QUERIES=TILE_QUERIES,
        ENTRIES=shape.entries,
        # Longer loops are not unrolled, because unrolling would hold all tiles of queries in shared memory.
        UNROLLED=ceil_div(group, members) * head_size <= 256,
        PRECISION=input_precision(q.dtype),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out[:, : rows.count]


def check_lists(lists: KeyLists, batch: int, length: int) -> None:
    """Raise ValueError if the lists are not for `length` queries."""
    if lists.length != length:
        raise ValueError(f"lists are of sequences of {lists.length}; pass lists of {length}")
    check_shape("lists.counts", lists.counts, "[B, T]", (batch, -(-length // TILE_QUERIES)))


@triton.jit
def _sum_of_heads(
    k_tile, q_rows, lse, batch, kv_head, member, query, length, stride_qh, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of MEMBERS query heads, summed: [entries, QUERIES]."""
    head = kv_head * GROUP + member
    valid = (member < GROUP) & (query < length)
    q_tile = tl.load(q_rows + head.to(tl.int64)[:, None] * stride_qh, mask=valid[:, None], other=0.0)
    # The log-sum-exp of a head that does not exist is infinite, so its probabilities are 0.
    lse_of = lse + (batch * (KV_HEADS * GROUP) + head) * length + query
    lse2 = tl.load(lse_of, mask=valid, other=float("inf")) * LOG2_E
    logits = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    probs = tl.exp2(logits * scale_log2 - lse2[None, :])
    return tl.sum(tl.reshape(probs, [k_tile.shape[0], MEMBERS, QUERIES]), 1)


@triton.jit(do_not_specialize=["first_tile", "every"])
def _gathered_probs_kernel(
    q, k, lse, keys, words, starts, counts, out,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    length, list_tiles, first_tile, every, out_stride, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, UNROLLED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program takes ENTRIES entries and the queries of a tile. Grid: (ceil(max_count / ENTRIES), tiles, B)."""
    batch = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(1)
    tile = first_tile + unit * every
    list_index = batch * list_tiles + tile
    count = tl.load(counts + list_index)
    if tl.program_id(0) * ENTRIES < count:
        entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
        list_start = tl.load(starts + list_index)
        key = tl.load(keys + list_start + entries, mask=entries < count, other=0)
        dims = tl.arange(0, D)
        k_rows = k + batch * stride_kb + key.to(tl.int64)[:, None] * stride_kl + dims[None, :]
        columns = tl.arange(0, MEMBERS * QUERIES)
        member = columns // QUERIES
        rows = tl.arange(0, QUERIES)
        start = tile * QUERIES
        query = start + columns % QUERIES
        q_rows = q + batch * stride_qb + query.to(tl.int64)[:, None] * stride_ql + dims[None, :]
        total = tl.zeros([ENTRIES, QUERIES], tl.float32)
        for kv_head in range(KV_HEADS):
            k_tile = tl.load(k_rows + tl.cast(kv_head, tl.int64) * stride_kh)
            if UNROLLED:
                for first_member in tl.static_range(0, GROUP, MEMBERS):
                    total += _sum_of_heads(
                        k_tile, q_rows, lse, batch, kv_head, first_member + member, query, length, stride_qh,
                        scale_log2, KV_HEADS, GROUP, MEMBERS, QUERIES, PRECISION,
                    )  # fmt: skip
            else:
                for first_member in range(0, GROUP, MEMBERS):
                    total += _sum_of_heads(
                        k_tile, q_rows, lse, batch, kv_head, first_member + member, query, length, stride_qh,
                        scale_log2, KV_HEADS, GROUP, MEMBERS, QUERIES, PRECISION,
                    )  # fmt: skip
        word = tl.load(words + list_start + entries, mask=entries < count, other=0)
        hit = ((word[:, None] >> rows[None, :]) & 1) != 0
        # The mask is applied after the sum, because the exponential of an unselected key may overflow to infinity.
        total = tl.where(hit & (start + rows < length)[None, :], total, 0.0)
        out_rows = out + ((batch * tl.num_programs(1) + unit) * QUERIES + rows) * out_stride
        target = out_rows[None, :] + entries[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=(entries < count)[:, None])
