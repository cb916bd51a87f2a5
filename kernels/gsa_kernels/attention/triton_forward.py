"""Computes flash attention with a packed mask. The epilogue applies gate G1."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import AttentionInputs
from gsa_kernels.attention.triton_tiles import (
    FLOOR,
    MASKED,
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
from gsa_kernels.limits import ceil_div
from gsa_kernels.triton_constants import LN_2, LOG2_E


def forward_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(32, 32, float_warps(head_size), 1, tma=False)
    if head_size > 128:
        # One program runs per multiprocessor. Its 227 KiB of shared memory hold 64 KiB for q and two stages of 32 KiB
        # each for k and v. Each of 256 threads holds 128 registers of the output and 32 of logits. With 128 threads
        # there would be one warpgroup per multiprocessor. With 32 keys products would wait for their operands.
        return Tiles(128, 64, 8, 2)
    # Two programs run per multiprocessor: one multiplies while the other computes its exponentials.
    return Tiles(64, 64, 4, 3)


def attention_forward(
    inputs: AttentionInputs,
    packed_mask: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    anywhere: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on inputs that `masked_attention` has checked.

    Args:
        anywhere: the queries may be at any positions. The kernel then reads all keys, and only the packed mask says to
            which keys a query attends

    Returns:
        out: [B, L, H, D], gated if there are gate logits, in the memory order of q
        lse: fp32 [B, H, L], natural logarithm
    """
    q, k, v, gate_logits = inputs.q, inputs.k, inputs.v, inputs.gate_logits
    batch, length, heads, head_size = q.shape
    num_keys, kv_heads = k.shape[1:3]
    tiles = forward_tiles(head_size, q.dtype)
    tma = use_tma(tiles, k, v)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    # A tile holds half the queries for two heads. In one thread the two rows of a product then share their mask bits.
    paired = packed_mask is not None and heads // kv_heads % 2 == 0 and tiles.queries >= 64
    in_tile = 2 if paired else 1
    grid = (batch * heads // in_tile, ceil_div(length, tiles.queries // in_tile))
    _forward_kernel[grid](
        q,
        tile_source(k, tiles.keys, tma),
        tile_source(v, tiles.keys, tma),
        gate_logits,
        packed_mask,
        document_starts,
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(gate_logits.stride()[:4] if gate_logits is not None else (0, 0, 0, 0)),
        *(packed_mask.stride()[:2] if packed_mask is not None else (0, 0)),
        *out.stride()[:3],
        length,
        num_keys - length or None,
        heads,
        ceil_div(num_keys, 32),
        inputs.scale * LOG2_E.value,
        GROUP=heads // kv_heads,
        D=head_size,
        HEADS=in_tile,
        ROWS=tiles.queries,
        KEYS=tiles.keys,
        HAS_MASK=packed_mask is not None,
        HAS_DOCUMENTS=document_starts is not None,
        HAS_GATE=gate_logits is not None,
        GATE_FIRST=head_size <= 128,
        ANYWHERE=anywhere,
        EVEN=is_even(length, num_keys, max(tiles.queries, tiles.keys)),
        TMA=tma,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out, lse


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    gate,
    packed_mask,
    document_starts,
    out,
    lse,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    stride_vb,
    stride_vl,
    stride_vh,
    stride_gb,
    stride_gl,
    stride_gg,
    stride_gh,
    stride_wb,
    stride_wl,
    stride_ob,
    stride_ol,
    stride_oh,
    length,
    query_start,
    heads,
    word_columns,
    scale_log2,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ANYWHERE: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes ROWS rows, which are one tile of queries for HEADS heads.

    The grid starts with the last tiles of queries, which take longest, because their queries have the most keys.
    """
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    QUERIES: tl.constexpr = ROWS // HEADS
    batch = tl.program_id(0) // (heads // HEADS)
    head = tl.program_id(0) % (heads // HEADS) * HEADS
    kv_head = head // GROUP
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    # Rows alternate between the heads every eight queries.
    row = tl.arange(0, ROWS)
    local = row
    member = row * 0
    if HEADS > 1:
        local = row // (8 * HEADS) * 8 + row % 8
        member = row % (8 * HEADS) // 8
    rows = start + local
    valid = rows < length
    batch64, head64, start64 = batch.to(tl.int64), head.to(tl.int64), start.to(tl.int64)
    dims = tl.arange(0, D)[None, :]

    q += batch64 * stride_qb + head64 * stride_qh + start64 * stride_ql
    q_pointers = q + ((local * stride_ql + member * stride_qh)[:, None] + dims)
    q_tile = tl.load(q_pointers) if EVEN else tl.load(q_pointers, mask=valid[:, None], other=0.0)
    if HAS_GATE:
        gate += batch64 * stride_gb + start64 * stride_gl + kv_head.to(tl.int64) * stride_gg
        gate += head64 % GROUP * stride_gh
        if GATE_FIRST:
            # The gate logits are loaded early, so that the epilogue does not wait for them.
            gate_logits = _load_gate(gate, local, member, stride_gl, stride_gh, valid, D, EVEN)
    num_keys = query_start + length
    positions = query_start + rows
    maximum = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)

    first = 0
    first_keys = rows
    if HAS_DOCUMENTS:
        first_keys = tl.load(document_starts + batch64 * length + rows, mask=valid, other=0)
        # Document starts never decrease along the sequence, so the first row of the tile has the first causal key.
        first = tl.load(document_starts + batch64 * length + start) // KEYS * KEYS
    last = tl.minimum(query_start + start + QUERIES, num_keys)
    if HAS_MASK:
        packed_mask += batch64 * stride_wb + start64 * stride_wl
        if ANYWHERE:
            first, last = _seen_keys(
                packed_mask, stride_wl, length - start, num_keys, word_columns, QUERIES, KEYS
            )
        diagonal = last
    else:
        diagonal = (query_start + start) // KEYS * KEYS

    # Dense attention calls this function twice: for keys before the diagonal, then for keys on the diagonal.
    maximum, total, acc = _attend(
        q_tile, k, v, packed_mask, batch, kv_head, positions, start, first_keys, first, diagonal, maximum, total, acc,
        stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
        length, num_keys, word_columns, scale_log2,
        D, HEADS, ROWS, KEYS, HAS_MASK, HAS_DOCUMENTS, HAS_DOCUMENTS, EVEN, TMA, PRECISION,
    )  # fmt: skip
    if not HAS_MASK:
        maximum, total, acc = _attend(
            q_tile, k, v, packed_mask, batch, kv_head, positions, start, first_keys,
            tl.maximum(first, diagonal), last, maximum, total, acc,
            stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
            length, num_keys, word_columns, scale_log2,
            D, HEADS, ROWS, KEYS, False, HAS_DOCUMENTS, True, EVEN, TMA, PRECISION,
        )  # fmt: skip

    # A row without keys, which no selection contains, gives 0 instead of NaN.
    total = tl.where(total == 0.0, 1.0, total)
    if HAS_GATE:
        if not GATE_FIRST:
            gate_logits = _load_gate(gate, local, member, stride_gl, stride_gh, valid, D, EVEN)
        # This computes acc * sigmoid(gate) / total with one division.
        acc = acc / (total[:, None] * (1.0 + tl.exp2(gate_logits.to(tl.float32) * -LOG2_E)))
    else:
        acc = acc * (1.0 / total)[:, None]
    out += batch64 * stride_ob + head64 * stride_oh + start64 * stride_ol
    out_pointers = out + ((local * stride_ol + member * stride_oh)[:, None] + dims)
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=valid[:, None])
    lse += (batch64 * heads + head) * length
    tl.store(lse + (member * length + rows), (maximum + tl.log2(total)) * LN_2, mask=valid)


@triton.jit
def _load_gate(gate, local, member, stride_gl, stride_gh, valid, D: tl.constexpr, EVEN: tl.constexpr):
    pointers = gate + ((local * stride_gl + member * stride_gh)[:, None] + tl.arange(0, D)[None, :])
    if EVEN:
        return tl.load(pointers)
    else:  # noqa: RET505 (the compiler reads what follows a return)
        return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _seen_keys(
    packed_mask, stride_wl, rows, num_keys, word_columns, QUERIES: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return a range (first key, end) that contains every key selected by the tile's queries.

    The range starts at a multiple of KEYS. The queries select no keys outside the range, so the forward pass can skip
    these keys without changing a bit of the result.
    """
    queries = tl.arange(0, QUERIES)[:, None]
    low = word_columns - 1
    high = 0
    for column in range(0, word_columns, 32):
        columns = column + tl.arange(0, 32)
        exists = (queries < rows) & (columns < word_columns)[None, :]
        words = tl.load(packed_mask + (queries * stride_wl + columns[None, :]), mask=exists, other=0)
        seen = tl.max((words != 0).to(tl.int32), 0) != 0
        low = tl.minimum(low, tl.min(tl.where(seen, columns, word_columns - 1), 0))
        high = tl.maximum(high, tl.max(tl.where(seen, columns + 1, 0), 0))
    return low * 32 // KEYS * KEYS, tl.minimum(high * 32, num_keys)


@triton.jit
def _attend(
    q_tile, k, v, packed_mask, batch, kv_head, positions, start, first_keys, first, last, maximum, total, acc,
    stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh, stride_wl,
    length, num_keys, word_columns, scale_log2,
    D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Update one tile's running softmax with the keys first <= key < last. `first` is a multiple of KEYS."""
    QUERIES: tl.constexpr = ROWS // HEADS
    queries = tl.arange(0, QUERIES)
    local = queries * stride_wl
    valid = start + queries < length
    if HAS_MASK:
        word0, word1, word2, word3 = load_words(
            packed_mask + local + first // 32, 1, valid, word_columns - first // 32, KEYS, EVEN
        )
    for column in range(first, last, KEYS):
        if HAS_MASK:
            # The mask words of the next tile are loaded now, so that the next iteration does not wait for them.
            ahead = column + KEYS
            if EVEN:
                ahead = tl.minimum(ahead, num_keys - KEYS)
            next0, next1, next2, next3 = load_words(
                packed_mask + local + ahead // 32, 1, valid, word_columns - ahead // 32, KEYS, EVEN
            )
        k_tile = load_rows(
            k, batch, kv_head, column, stride_kb, stride_kl, stride_kh, num_keys, KEYS, D, EVEN, TMA
        )
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if HAS_MASK:
            hit = expand_words(word0, word1, word2, word3, KEYS)
            if HEADS > 1:
                of_heads = tl.broadcast_to(
                    tl.reshape(hit, [QUERIES // 8, 1, 8, KEYS]), [QUERIES // 8, HEADS, 8, KEYS]
                )
                hit = tl.reshape(of_heads, [ROWS, KEYS])
            logits = tl.where(hit, logits, MASKED)
        elif CAUSAL:
            hit = causal_hit(positions, column + tl.arange(0, KEYS), first_keys, HAS_DOCUMENTS)
            logits = tl.where(hit, logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * scale_log2)
        probs = tl.exp2(logits * scale_log2 - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(probs, 1)
        v_tile = load_rows(
            v, batch, kv_head, column, stride_vb, stride_vl, stride_vh, num_keys, KEYS, D, EVEN, TMA
        )
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
        if HAS_MASK:
            word0, word1, word2, word3 = next0, next1, next2, next3
    return maximum, total, acc
