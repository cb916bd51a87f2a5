"""Computes the gradient of q and, from the same probabilities, the target of the indexer loss (sums over heads).

A program takes 32 queries for four query heads of one key-value head: the 128 rows of a product. The probabilities of
the four heads are in different registers and lanes, and the program adds them. If there are more than four heads, the
loss adds the sums of the programs.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import GradientInputs
from gsa_kernels.attention.triton_tiles import Tiles as _Tiles
from gsa_kernels.attention.triton_tiles import (
    expand_words,
    is_even,
    load_rows,
    load_words,
    tile_source,
    use_tma,
)
from gsa_kernels.devices import interpreted
from gsa_kernels.hopper.target_blocks import BLOCK, KEY, empty_blocks, place_in_block
from gsa_kernels.limits import FUSED_LOSS_HEADS
from gsa_kernels.triton_constants import LOG2_E

TILES = _Tiles(32, 64, 8, 3, registers=232)
"""Tile with 32 queries of each head. Without a register limit ptxas saves registers, and the second product then waits
for the exponentials of the first product."""

WIDE_TILES = _Tiles(32, 32, 8, 2)
"""Tile for heads of 256. In 227 KiB of shared memory, 128 KiB hold q and the output's gradient, and two stages of 16
KiB each hold k and v."""


def backward_queries_with_target(
    inputs: GradientInputs,
    packed_mask: torch.Tensor,
    document_starts: torch.Tensor | None,
    grad_q: torch.Tensor,
    rows: range,
) -> torch.Tensor:
    """Write grad_q[:, rows] of [B, L, H, D], and return the parts of these queries' target.

    Returns:
        fp16 [B, H / 4, row blocks, key blocks, 1024] in the block order of target_blocks.py. Each value is the sum of
        four heads' attention probabilities for query t and key s if s is in S_t, and 0 otherwise. A tile of 32 queries
        and 64 keys without a causal key is not written.
    """
    q, k, v, grad, scale = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.scale
    batch, length, heads, head_size = q.shape
    num_keys = k.shape[1]
    tiles = TILES if head_size <= 128 else WIDE_TILES
    tma = use_tma(tiles, k, v)
    parts = heads // FUSED_LOSS_HEADS
    target = empty_blocks(batch, parts, len(rows), num_keys, q.device)
    _queries_with_target_kernel[(batch * parts, triton.cdiv(len(rows), tiles.queries))](
        q,
        tile_source(k, tiles.keys, tma),
        tile_source(v, tiles.keys, tma),
        grad,
        inputs.delta,
        inputs.lse2,
        packed_mask,
        document_starts,
        grad_q,
        target,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        *packed_mask.stride()[:2],
        *grad_q.stride()[:3],
        *target.stride()[:3],
        rows.start,
        rows.stop,
        length,
        num_keys - length or None,
        heads,
        triton.cdiv(num_keys, 32),
        scale,
        scale * LOG2_E.value,
        GROUP=heads // k.shape[2],
        HEADS=FUSED_LOSS_HEADS,
        D=head_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        HAS_DOCUMENTS=document_starts is not None,
        EVEN=is_even(len(rows), num_keys, tiles.queries) and num_keys % (2 * BLOCK.value) == 0,
        TMA=tma,
        IN_LANES=not interpreted(),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    return target


# Row ranges vary from launch to launch. Specialising on them would only compile more variants.
@triton.jit(do_not_specialize=["row_start", "row_stop"])
def _queries_with_target_kernel(
    q, k, v, grad, delta, lse2, packed_mask, document_starts, grad_q, target,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_ub, stride_ul, stride_uh,
    stride_wb, stride_wl,
    stride_db, stride_dl, stride_dh,
    stride_tb, stride_tp, stride_tr,
    row_start, row_stop, length, query_start, heads, word_columns, scale, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, IN_LANES: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of queries of HEADS heads. The last tiles run first."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    parts = heads // HEADS
    batch = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    kv_head = part * HEADS // GROUP
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    start = row_start + tile * QUERIES
    batch64, start64 = batch.to(tl.int64), start.to(tl.int64)

    # A thread has rows i and i + 8 of each 16 rows of a product. The thread 16 lanes further has rows i + 4 and i + 12.
    # These four rows are the four heads of one query.
    stacked = tl.arange(0, HEADS * QUERIES)
    own = stacked // 16 * 4 + stacked % 4
    member = stacked % 16 // 4
    valid = start + own < row_stop
    dims = tl.arange(0, D)[None, :]
    q += batch64 * stride_qb + (part * HEADS).to(tl.int64) * stride_qh + start64 * stride_ql
    q_tile = _load(q + ((own * stride_ql + member * stride_qh)[:, None] + dims), valid, EVEN)
    grad += batch64 * stride_ub + (part * HEADS).to(tl.int64) * stride_uh + start64 * stride_ul
    u_tile = _load(grad + ((own * stride_ul + member * stride_uh)[:, None] + dims), valid, EVEN)
    position = (batch64 * heads + part * HEADS + member) * length + start + own
    row_lse2 = tl.load(lse2 + position, mask=valid, other=0.0)
    row_delta = tl.load(delta + position, mask=valid, other=0.0)

    num_keys = query_start + length
    first = 0
    if HAS_DOCUMENTS:
        # Document starts never decrease along the sequence, so the first row of the tile has the first causal key.
        first = tl.load(document_starts + batch64 * length + start) // (2 * BLOCK) * (2 * BLOCK)
    last = tl.minimum(query_start + start + QUERIES, num_keys)
    if KEYS == BLOCK:  # the loss reads two blocks of keys if a query has a key in one of them
        last = tl.cdiv(last, 2 * BLOCK) * (2 * BLOCK)

    rows = tl.arange(0, QUERIES)
    packed_mask += batch64 * stride_wb + start64 * stride_wl + rows * stride_wl
    readable = start + rows < row_stop
    target += batch64 * stride_tb + part.to(tl.int64) * stride_tp + tile.to(tl.int64) * stride_tr
    places = _places(target, QUERIES, KEYS)

    acc = tl.zeros([HEADS * QUERIES, D], tl.float32)
    word0, word1, word2, word3 = load_words(
        packed_mask + first // 32, 1, readable, word_columns - first // 32, KEYS, EVEN
    )
    for column in range(first, last, KEYS):
        # The mask words of the next tile are loaded now, so that the next iteration does not wait for them.
        ahead = column + KEYS
        if EVEN:
            ahead = tl.minimum(ahead, num_keys - KEYS)
        next0, next1, next2, next3 = load_words(
            packed_mask + ahead // 32, 1, readable, word_columns - ahead // 32, KEYS, EVEN
        )
        k_tile = load_rows(
            k, batch, kv_head, column, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA
        )
        v_tile = load_rows(
            v, batch, kv_head, column, stride_vb, stride_vl, stride_vh, num_keys, KEYS, D, EVEN, TMA
        )
        hit = expand_words(word0, word1, word2, word3, KEYS)
        of_heads = tl.broadcast_to(
            tl.reshape(hit, [QUERIES // 4, 1, 4, KEYS]), [QUERIES // 4, HEADS, 4, KEYS]
        )
        logits = tl.dot(q_tile, tl.trans(k_tile))
        by_probs = tl.dot(u_tile, tl.trans(v_tile))
        probs = tl.exp2(logits * scale_log2 - row_lse2[:, None])
        probs = tl.where(tl.reshape(of_heads, [HEADS * QUERIES, KEYS]), probs, 0.0)
        by_logits = probs * (by_probs - row_delta[:, None])
        acc = tl.dot(by_logits.to(k_tile.dtype), k_tile, acc)
        # The sums run after the last product is issued, and overlap with it.
        if IN_LANES:
            pairs = tl.sum(tl.reshape(probs, [QUERIES // 4, 2, 8, KEYS]), 1)
            halves = tl.permute(tl.reshape(pairs, [QUERIES // 4, 2, 4, 2, KEYS // 2]), [0, 1, 2, 4, 3])
            low, high = tl.split(halves)
            store_sums(places + column * KEY, low, high)
        else:
            sums = tl.sum(tl.reshape(probs, [QUERIES // 4, HEADS, 4, KEYS]), 1)
            halves = tl.permute(tl.reshape(sums, [QUERIES // 4, 4, 2, KEYS // 2]), [0, 2, 1, 3])
            columns = tl.arange(0, KEYS // 2)
            tl.store(
                places + column * KEY + (columns // 8 * 2 + columns % 2), halves.to(target.dtype.element_ty)
            )
        word0, word1, word2, word3 = next0, next1, next2, next3

    grad_q += batch64 * stride_db + (part * HEADS).to(tl.int64) * stride_dh + start64 * stride_dl
    pointers = grad_q + ((own * stride_dl + member * stride_dh)[:, None] + dims)
    tl.store(pointers, (acc * scale).to(grad_q.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _load(pointers, valid, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:  # noqa: RET505 (the compiler reads what follows a return)
        return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _places(target, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the address where each thread stores the first of its sums, in shape [QUERIES / 4, 2, 4, KEYS / 2].

    Lanes 0 to 15 store the first half of a query's keys, and the other lanes store the second half. If KEYS is 64, each
    half is a block. If KEYS is 32, both halves are in one block.
    """
    tl.static_assert(QUERIES == BLOCK and (KEYS == BLOCK or KEYS == 2 * BLOCK), "a tile is one or two blocks")
    row = tl.arange(0, QUERIES // 4)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, :, None]
    half = tl.arange(0, 2)[None, :, None, None]
    lane = tl.arange(0, KEYS // 2)[None, None, None, :] % 8 // 2
    apart: tl.constexpr = BLOCK * BLOCK if KEYS == 2 * BLOCK else 4
    return target + (half * apart + place_in_block(row, lane))


def _assembly(values: int) -> str:
    """Return the assembly of `store_sums` for 4 or 8 values per lane of each half.

    The operands are, in this order, the results, the addresses of the stores, `low` and `high`. The results are unused,
    but inline assembly must have some. There is one int8 per value, which is always 0, and each operand holds four of
    these. Each store writes 8 bytes. One store of 16 bytes would be slower, because it would wait for all sums.
    """
    results = values // 4
    places, low = results, results + values
    high = low + values
    exchanges = [
        f"""
        cvt.rn.f16x2.f32 low, ${low + 1 + 2 * pair}, ${low + 2 * pair};
        cvt.rn.f16x2.f32 high, ${high + 1 + 2 * pair}, ${high + 2 * pair};
        selp.b32 own, high, low, upper;
        selp.b32 other, low, high, upper;
        shfl.sync.bfly.b32 other, other, 16, 31, -1;
        add.rn.f16x2 sum{pair}, own, other;"""
        for pair in range(values // 2)
    ]
    stores = [
        f"""
        st.global.v2.b32 [${places} + {8 * part}], {{sum{2 * part}, sum{2 * part + 1}}};"""
        for part in range(values // 4)
    ]
    empty = [f"mov.b32 ${result}, 0;" for result in range(results)]
    sums = ", ".join(f"sum{pair}" for pair in range(values // 2))
    return f"""{{
        .reg .pred upper;
        .reg .b32 lane, low, high, own, other, {sums};
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 16;
        setp.ne.u32 upper, lane, 0;{"".join(exchanges)}{"".join(stores)}
        {" ".join(empty)}
        }}"""


def _constraints(values: int) -> str:
    return ",".join(["=r"] * (values // 4) + ["l"] * values + ["f"] * (2 * values))


_STORE_SUMS, _SUMS_OPERANDS = tl.constexpr(_assembly(8)), tl.constexpr(_constraints(8))
_STORE_FEW_SUMS, _FEW_SUMS_OPERANDS = tl.constexpr(_assembly(4)), tl.constexpr(_constraints(4))


@triton.jit
def store_sums(places, low, high):
    """Add the values of a query in two lanes, 16 lanes apart, and store the sum as fp16.

    Each lane stores eight or four sums, all for keys of one half. The sums are adjacent in memory, but the columns of
    the keys are not: counted from the thread's first column, they are 0, 1, 8 and 9, and with eight sums also 16, 17,
    24 and 25. If the compiler gives a thread other columns, `miscompile_guard.py` raises an error.

    Args:
        places: from `_places`
        low, high: fp32 [QUERIES / 4, 2, 4, KEYS / 2], the halves of the keys
    """
    values: tl.constexpr = low.shape[3] // 4
    tl.inline_asm_elementwise(
        _STORE_SUMS if values == 8 else _STORE_FEW_SUMS,
        _SUMS_OPERANDS if values == 8 else _FEW_SUMS_OPERANDS,
        [places.to(tl.int64), low, high],
        dtype=tl.int8,
        is_pure=False,
        pack=values,
    )
