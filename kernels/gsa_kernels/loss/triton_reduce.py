"""Adds the stacked kernels' partial sums over a chunk of rows in a fixed order, so that results repeat bit for bit.

The partial sums of dq, dk and the score biases' gradients have a factor log2(e), because the scores are for exp2. This
module removes the factor. After the last chunk, `totals_kernel` adds the sums over all rows, of all kernels.
"""

import triton
import triton.language as tl

from gsa_kernels.hopper.triton_stacked import by_key_as_held, held_by_key
from gsa_kernels.loss.triton_scores import head_weight, head_weight_slope
from gsa_kernels.triton_constants import LN_2
from gsa_kernels.triton_rows import last_row_of, number_of, row_of, rows_of
from gsa_kernels.triton_stacks import place_in_stack


@triton.jit
def _reduce_rows(
    group,
    head,
    weight_logits,  # [B, R, HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    first_keys,  # [B, tiles] int32
    row_sums,  # [1 + 2 HI, segments, B, tiles * BM] fp32
    dq_parts,  # [segments, B, tiles, HEADS * BM, BLOCK_D] fp32
    kl_rows,  # out: [B, R] fp32, if WITH_VALUE
    partial_sums,  # out: [1 + 3 HI, B, ceil(R / BR)] fp32, of BR rows: KL; then by head d/d beta, d/d w_j, d/d b_j
    dq,  # out: [B, R, HI, DI]
    dw,  # out: [B, R, HI]
    R,
    query_start,
    row_start,
    num_rows,
    num_tiles,
    num_segments,
    scale,
    gradient_scale,
    HI: tl.constexpr,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
    WITH_VALUE: tl.constexpr,
):
    """Add the results of all key segments for BR rows from group * BR on and one head. One element of `partial_sums`
    receives the sum over these rows. The loops are unrolled so that several loads are in flight."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    b = tl.program_id(1)
    padded_rows = num_tiles * BM
    local = group * BR + tl.arange(0, BR)
    tile = group * BR // BM
    valid = local < num_rows
    first_row = row_of(group * BR, row_start, STRETCH, SPACING)
    row_index = b.to(tl.int64) * R + rows_of(group * BR, row_start, BR, STRETCH, SPACING)
    last = query_start + last_row_of(tile, row_start, num_rows, BM, STRETCH, SPACING)
    first = tl.load(first_keys + b * num_tiles + tile)
    first_segment = first // SEGMENT
    last_segment = last // SEGMENT

    segment_stride = tl.num_programs(1).to(tl.int64) * padded_rows
    plane = num_segments * segment_stride
    row_offsets = b.to(tl.int64) * padded_rows + local
    num_groups = tl.cdiv(R, BR)
    sums_plane = tl.num_programs(1).to(tl.int64) * num_groups
    partial_sums += b.to(tl.int64) * num_groups + first_row // BR
    exists = group * BR < num_rows

    if WITH_VALUE and head == 0:
        kl = tl.zeros([BR], tl.float32)
        for segment in tl.range(first_segment, last_segment + 1, loop_unroll_factor=4):
            kl += tl.load(row_sums + segment * segment_stride + row_offsets)
        tl.store(kl_rows + row_index, kl, mask=valid)
        tl.store(partial_sums, tl.sum(tl.where(valid, kl, 0.0)), mask=exists)

    if WITH_GRADIENTS:
        d = tl.arange(0, BLOCK_D)
        grad_a = tl.zeros([BR], tl.float32)
        grad_z = tl.zeros([BR], tl.float32)
        dq_head = tl.zeros([BLOCK_D, BR], tl.float32)
        row = group * BR % BM + tl.arange(0, BR)
        dq_tile = dq_parts + (b.to(tl.int64) * num_tiles + tile) * (BLOCK_D * HEADS * BM)
        dq_places = place_in_stack(head, row, HEADS, BM)[None, :] * BLOCK_D + d[:, None]
        for segment in tl.range(first_segment, last_segment + 1, loop_unroll_factor=4):
            offsets = segment * segment_stride + row_offsets
            grad_a += tl.load(row_sums + (1 + head) * plane + offsets)
            grad_z += tl.load(row_sums + (1 + HI + head) * plane + offsets)
            dq_head += tl.load(dq_tile + segment * segment_stride * (HEADS * BLOCK_D) + dq_places)

        logit = tl.load(weight_logits + row_index * HI + head, mask=valid, other=0.0).to(tl.float32)
        if WEIGHT_BIAS:
            logit += tl.load(weight_bias + head).to(tl.float32)
        weight = head_weight(logit, KIND)
        grad_w = tl.load(beta) * grad_a * head_weight_slope(weight, KIND)
        partial_sums += (1 + head) * sums_plane
        tl.store(partial_sums, tl.sum(tl.where(valid, weight * grad_a, 0.0)), mask=exists)
        tl.store(partial_sums + HI * sums_plane, tl.sum(tl.where(valid, grad_w, 0.0)), mask=exists)
        by_bias = tl.sum(tl.where(valid, grad_z, 0.0)) * LN_2
        tl.store(partial_sums + 2 * HI * sums_plane, by_bias, mask=exists)
        scaled_w = grad_w * gradient_scale
        tl.store(dw + row_index * HI + head, scaled_w.to(dw.dtype.element_ty), mask=valid)
        tl.store(
            dq + (row_index * HI + head)[None, :] * DI + d[:, None],
            (dq_head * (scale * LN_2 * gradient_scale)).to(dq.dtype.element_ty),
            mask=(d < DI)[:, None] & valid[None, :],
        )


@triton.jit
def _reduce_keys(
    group,
    part,
    first_keys,  # [B, tiles] int32
    dk_parts,  # [B, tiles, ceil(L / BN), BLOCK_D * BN] bf16 or fp32, `as_held`
    dk,  # out: [B, L, DI]; if ADDS in and out, of the chunks before, and fp32
    L,
    query_start,
    row_start,
    num_rows,
    num_tiles,
    scale,  # of the parts
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Add up the parts of dk from all tiles of rows, for BK keys from group * BK on and BD dimensions from part * BD
    on."""
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    b = tl.program_id(1).to(tl.int64)
    key = group * BK
    cols = key + tl.arange(0, BK)
    d = part * BD + tl.arange(0, BD)
    inside = (cols < L)[:, None] & (d < DI)[None, :]
    out = dk + (b * L + cols)[:, None] * DI + d[None, :]
    total = tl.zeros([BK, BD], tl.float32)
    if ADDS:
        total = tl.load(out, mask=inside, other=0.0)
    tl.static_assert(BD == 16 and BK % 16 == 0 and BN % BK == 0, "whole pieces of 16 dimensions and keys")
    total = by_key_as_held(total)
    columns = by_key_as_held(tl.broadcast_to(cols[:, None], [BK, BD]))
    piece = key % BN // 16 + tl.arange(0, BK * BD) // 256
    places = key // BN * (BLOCK_D * BN) + (piece * (BLOCK_D // BD) + part) * 256 + tl.arange(0, BK * BD) % 256
    tile_size = tl.cdiv(L, BN) * (BLOCK_D * BN)
    first_row = tl.maximum(key - query_start, 0)  # first row with a causal key among these
    first_tile = number_of(tl.maximum(first_row, row_start), row_start, STRETCH, SPACING) // BM
    for tile in tl.range(first_tile, num_tiles, loop_unroll_factor=8):
        # Only causal keys of a tile's rows were written.
        written = columns <= query_start + last_row_of(tile, row_start, num_rows, BM, STRETCH, SPACING)
        if HAS_STARTS:
            written = written & (columns >= tl.load(first_keys + b * num_tiles + tile))
        pointers = dk_parts + (b * num_tiles + tile) * tile_size + places
        total += scale * tl.load(pointers, mask=written, other=0.0).to(tl.float32)
    total = held_by_key(total, BK)
    tl.store(out, total.to(dk.dtype.element_ty), mask=inside)


@triton.jit
def reduce_kernel(
    weight_logits,
    weight_bias,
    beta,
    first_keys,
    row_sums,
    dq_parts,
    dk_parts,
    kl_rows,
    partial_sums,
    dq,
    dk,
    dw,
    R,
    L,
    query_start,
    row_start,
    num_rows,
    num_tiles,
    num_segments,
    key_programs,  # per sequence; they come first, because they have more to read
    scale,
    gradient_scale,  # [1] fp32, or None for 1
    HI: tl.constexpr,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ADDS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
    WITH_VALUE: tl.constexpr,
):
    """Run both reductions. Grid: (key_programs + tiles * BM / BR * HI, B); HI is 1 without gradients."""
    program = tl.program_id(0)
    heads: tl.constexpr = HI if WITH_GRADIENTS else 1
    factor = 1.0 if gradient_scale is None else tl.load(gradient_scale)
    if program < key_programs:
        if WITH_GRADIENTS:
            parts: tl.constexpr = BLOCK_D // BD
            _reduce_keys(
                program // parts, program % parts, first_keys, dk_parts, dk, L, query_start, row_start, num_rows,
                num_tiles, scale * LN_2 * factor, DI, BLOCK_D, BM, BN, BK, BD, STRETCH, SPACING,
                HAS_STARTS, ADDS,
            )  # fmt: skip
    else:
        program -= key_programs
        _reduce_rows(
            program // heads, program % heads, weight_logits, weight_bias, beta, first_keys, row_sums, dq_parts,
            kl_rows, partial_sums, dq, dw, R, query_start, row_start, num_rows, num_tiles, num_segments, scale,
            factor, HI, HEADS, DI, BLOCK_D, BM, BR, SEGMENT, STRETCH, SPACING, KIND, WEIGHT_BIAS,
            WITH_GRADIENTS, WITH_VALUE,
        )  # fmt: skip


@triton.jit
def totals_kernel(
    partial_sums,  # [1 + 3 HI, size] fp32
    total,  # out: [1] fp32
    d_beta,  # out: [HI] fp64, of each head's part
    d_weight_bias,  # out: [HI]
    d_score_bias,  # out: [HI]
    size,
    gradient_scale,  # of these three; [1] fp32, or None for 1
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program sums a row of `partial_sums`, in fp64 because it has tens of thousands of numbers of both signs."""
    row = tl.program_id(0)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        part = tl.load(partial_sums + row.to(tl.int64) * size + place, mask=place < size, other=0.0)
        sums += part.to(tl.float64)
    summed = tl.sum(sums)
    if total is not None:
        tl.store(total, summed.to(tl.float32), mask=row == 0)
    if gradient_scale is not None:
        summed *= tl.load(gradient_scale)
    which, head = (row + HI - 1) // HI, (row + HI - 1) % HI
    if d_beta is not None:
        tl.store(d_beta + head, summed, mask=which == 1)
    if d_weight_bias is not None:
        tl.store(d_weight_bias + head, summed.to(d_weight_bias.dtype.element_ty), mask=which == 2)
    if d_score_bias is not None:
        tl.store(d_score_bias + head, summed.to(d_score_bias.dtype.element_ty), mask=which == 3)
