"""Computes the gradients of the indexer's tensors from G, the gradient of the scores (triton_grad.py).

For indexer head j let z_j = q_j . k / sqrt(DI) + bias_j, weight_j the head weight, a_j the activation of z_j and
slope_j its derivative at z_j. The gradients are:
    dz_j = beta G weight_j slope_j    dq_j = sum_s dz_j k / sqrt(DI)    dk = sum_t sum_j dz_j q_j / sqrt(DI)
    dweight_j = beta sum_s G a_j      dbias_j = sum_t sum_s dz_j        dbeta = sum_t sum_j weight_j sum_s G a_j

One kernel takes a tile of rows and sums over keys. Another takes a tile of keys and sums over rows. Both recompute the
product q_j . k, so that dz_j need not be stored. Both kernels loop in a fixed order, so that results repeat bit
for bit.
"""

import triton
import triton.language as tl

from gsa_kernels.loss.triton_grad import G_SCALE
from gsa_kernels.loss.triton_scores import (
    RELU,
    activate,
    head_weight_slope,
    load_bias,
    load_head_weight,
    load_keys,
    load_queries,
    times_slope,
)
from gsa_kernels.triton_rows import number_of, row_of, rows_of, rows_of_program


@triton.jit(do_not_specialize=["row_start", "num_rows"])  # all chunks run the same code
def grad_queries_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    document_starts,  # [B, R] int32
    list_keys,  # as in score_pass_kernel
    list_starts,
    list_counts,
    kl_parts,  # [segments, B, tiles * BM] fp32
    grad_scores,  # [B, tiles * BM, grad_stride]
    grad_stride,
    kl_rows,  # out: [B, R] fp32
    partial_sums,  # out: [1 + 3 HI, B, ceil(R / BR)] fp32, of BR rows: KL; then by head d/d beta, d/d w_j, d/d b_j
    dq,  # out: [B, R, HI, DI]
    dw,  # out: [B, R, HI]
    R,
    L,
    columns,
    query_start,
    row_start,
    num_rows,
    scale,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
):
    """One program takes BM rows and one head, and loops over the keys of the rows. The program of the first head also
    adds up the KL. The grid is (HI, tiles, B), or (1, tiles, B) if gradients are not wanted."""
    head = tl.program_id(0)
    num_tiles = tl.num_programs(1)
    tile, b, local, valid, _, row_index, last = rows_of_program(
        R, query_start, row_start, num_rows, BM, STRETCH, SPACING
    )
    first = 0
    if HAS_STARTS:
        first = tl.min(tl.load(document_starts + row_index, mask=valid, other=L), 0)
    if list_keys is not None:
        list_index = b.to(tl.int64) * num_tiles + tile
        list_start = tl.load(list_starts + list_index)
        count = tl.load(list_counts + list_index)
        last = tl.maximum(count, 1) - 1
    padded_rows = num_tiles * BM
    row_offsets = b.to(tl.int64) * padded_rows + local
    num_groups = tl.cdiv(R, BR)
    plane = tl.num_programs(2).to(tl.int64) * num_groups
    group = tile * BM + tl.arange(0, BM // BR) * BR
    exists = group < num_rows
    partial_sums += b.to(tl.int64) * num_groups + row_of(group, row_start, STRETCH, SPACING) // BR

    if head == 0:
        kl = tl.zeros([BM], tl.float32)
        for segment in range(first // SEGMENT, last // SEGMENT + 1):
            kl += tl.load(kl_parts + segment * tl.num_programs(2).to(tl.int64) * padded_rows + row_offsets)
        tl.store(kl_rows + row_index, kl, mask=valid)
        tl.store(partial_sums, sum_of_groups(kl, valid, BR), mask=exists)

    if WITH_GRADIENTS:
        queries = load_queries(q_idx, row_index, valid, head, HI, DI, BLOCK_D)
        bias = load_bias(score_bias, head, SCORE_BIAS)
        k_sequence = k_idx + b.to(tl.int64) * L * DI
        grad_rows = grad_scores + row_offsets * grad_stride
        dq_head = tl.zeros([BM, BLOCK_D], tl.float32)
        grad_a = tl.zeros([BM], tl.float32)
        grad_z = tl.zeros([BM], tl.float32)
        for key in range(first // BN * BN, last + 1, BN):
            cols = key + tl.arange(0, BN)
            if list_keys is not None:
                entries = tl.load(list_keys + list_start + cols, mask=cols < count, other=0)
                keys = load_keys(k_sequence, entries, L, DI, BLOCK_D)
            else:
                keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
            g = tl.load(grad_rows[:, None] + cols[None, :]).to(tl.float32)
            product = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            a = activate(product, scale, bias, KIND)
            dz = times_slope(g, product, a, KIND)
            if KIND != RELU:
                grad_a += tl.sum(g * a, 1)
            if SCORE_BIAS:
                grad_z += tl.sum(dz, 1)
            dq_head = tl.dot(dz.to(keys.dtype), keys, dq_head, input_precision=PRECISION)

        weight = load_head_weight(weight_logits, weight_bias, row_index, valid, head, HI, KIND, WEIGHT_BIAS)
        dq_head *= scale
        if KIND == RELU:  # a is slope times z
            grad_a = tl.sum(queries.to(tl.float32) * dq_head, 1)
        grad_a *= 1 / G_SCALE
        factor = tl.load(beta)
        grad_w = factor * grad_a * head_weight_slope(weight, KIND)
        factor *= weight * (1 / G_SCALE)
        partial_sums += (1 + head) * plane
        tl.store(partial_sums, sum_of_groups(weight * grad_a, valid, BR), mask=exists)
        tl.store(partial_sums + HI * plane, sum_of_groups(grad_w, valid, BR), mask=exists)
        tl.store(partial_sums + 2 * HI * plane, sum_of_groups(factor * grad_z, valid, BR), mask=exists)
        place = row_index * HI + head
        tl.store(dw + place, grad_w.to(dw.dtype.element_ty), mask=valid)
        d = tl.arange(0, BLOCK_D)
        tl.store(
            dq + place[:, None] * DI + d[None, :],
            (factor[:, None] * dq_head).to(dq.dtype.element_ty),
            mask=valid[:, None] & (d < DI)[None, :],
        )


@triton.jit
def sum_of_groups(x, valid, BR: tl.constexpr):
    """Sum the valid rows among each BR neighbouring rows: [BM] to [BM / BR]."""
    return tl.sum(tl.reshape(tl.where(valid, x, 0.0), [x.shape[0] // BR, BR]), 1)


@triton.jit(do_not_specialize=["row_start", "num_rows"])  # all chunks run the same code
def grad_keys_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    document_starts,  # [B, R] int32
    list_keys,  # as in score_pass_kernel
    list_starts,
    list_counts,
    grad_scores,  # [B, tiles * BM, grad_stride]
    grad_stride,
    dk,  # out: [HI / HEADS, B, L, DI] fp32, if ADDS with the chunks before; or by entry [B, tiles, columns, BLOCK_D]
    R,
    L,
    columns,
    query_start,
    row_start,
    num_rows,
    scale,
    HI: tl.constexpr,
    HEADS: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One program takes BN keys and HEADS heads, and loops over the tiles of rows that attend to these keys.

    The grid is (HI / HEADS, key tiles, B). It starts with the programs of the first keys, which take longest, because
    the most rows attend to these keys. With key lists, a program takes BN entries of the list of one tile, and the grid
    is (1, key tiles, B * tiles).
    """
    if query_start is None:  # None means 0: the constant saves time for whole sequences
        query_start = 0
    part, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    key = tl.program_id(1) * BN
    cols = key + tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    WIDTH: tl.constexpr = DI if list_keys is None else BLOCK_D
    inside = (cols < columns)[:, None] & (d < WIDTH)[None, :]
    out = dk + ((part * tl.num_programs(2) + b) * columns + cols)[:, None] * WIDTH + d[None, :]
    num_tiles = tl.cdiv(num_rows, BM)
    first_row = tl.maximum(tl.maximum(key - query_start, 0), row_start)
    first_tile = number_of(first_row, row_start, STRETCH, SPACING) // BM
    end_tile = num_tiles
    if HAS_STARTS:
        # Documents are in order: the tiles with a key here come before the tiles of later documents.
        end_tile = 0
        for base in range(0, num_tiles, 128):
            tiles = base + tl.arange(0, 128)
            row = row_of(tiles * BM, row_start, STRETCH, SPACING)
            exists = tiles < num_tiles
            start = tl.load(document_starts + b * R + row, mask=exists, other=0)
            end_tile += tl.sum((exists & (start < key + BN)).to(tl.int32), 0)
    entries = cols
    if list_keys is not None:
        count = tl.load(list_counts + b)
        entries = tl.load(list_keys + tl.load(list_starts + b) + cols, mask=cols < count, other=0)
        first_tile = (b % num_tiles).to(tl.int32)
        end_tile = tl.where(key < count, first_tile + 1, first_tile)
        b = b // num_tiles

    factor = tl.load(beta) * (scale / G_SCALE)
    keys = load_keys(k_idx + b * L * DI, entries, L, DI, BLOCK_D)
    keys_t = tl.trans(keys)
    total = tl.zeros([BN, BLOCK_D], tl.float32)
    if ADDS:
        total = tl.load(out, mask=inside, other=0.0)
    for step in range(first_tile * HEADS, end_tile * HEADS):
        tile, head = step // HEADS, part * HEADS + step % HEADS
        local = tile * BM + tl.arange(0, BM)
        valid = local < num_rows
        row_index = b * R + rows_of(tile * BM, row_start, BM, STRETCH, SPACING)
        queries = load_queries(q_idx, row_index, valid, head, HI, DI, BLOCK_D)
        weight = load_head_weight(weight_logits, weight_bias, row_index, valid, head, HI, KIND, WEIGHT_BIAS)
        bias = load_bias(score_bias, head, SCORE_BIAS)
        grad_rows = grad_scores + (b * (num_tiles * BM) + local) * grad_stride
        g = tl.load(grad_rows[:, None] + cols[None, :]).to(tl.float32)
        product = tl.dot(queries, keys_t, input_precision=PRECISION)
        a = activate(product, scale, bias, KIND)
        dz = times_slope(g * (weight * factor)[:, None], product, a, KIND)
        total = tl.dot(tl.trans(dz.to(keys.dtype)), queries, total, input_precision=PRECISION)
    tl.store(out, total, mask=inside)


@triton.jit
def totals_kernel(
    partial_sums,  # [1 + 3 HI, size] fp32
    total,  # out: [1] fp32
    d_beta,  # out: [HI] fp64, of each head's part
    d_weight_bias,  # out: [HI]
    d_score_bias,  # out: [HI]
    size,
    HI: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program sums one row of `partial_sums`. The sum is in fp64, because a row has tens of thousands of numbers of
    both signs."""
    row = tl.program_id(0)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        part = tl.load(partial_sums + row.to(tl.int64) * size + place, mask=place < size, other=0.0)
        sums += part.to(tl.float64)
    summed = tl.sum(sums)
    tl.store(total, summed.to(tl.float32), mask=row == 0)
    which, head = (row + HI - 1) // HI, (row + HI - 1) % HI
    if d_beta is not None:
        tl.store(d_beta + head, summed, mask=which == 1)
    if d_weight_bias is not None:
        tl.store(d_weight_bias + head, summed.to(d_weight_bias.dtype.element_ty), mask=which == 2)
    if d_score_bias is not None:
        tl.store(d_score_bias + head, summed.to(d_score_bias.dtype.element_ty), mask=which == 3)
