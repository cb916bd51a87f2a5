"""Runs the second pass over a chunk of rows: the KL and all gradients, in partial sums.

G is the softmax of the scores minus the target. For indexer head j let z_j = q_j . k / sqrt(DI) + bias_j, weight_j the
head weight and slope_j the derivative of the activation at z_j. The gradients are:
    dz_j = beta G weight_j slope_j    dq_j = sum_s dz_j k / sqrt(DI)    dk = sum_t sum_j dz_j q_j / sqrt(DI)

In the code dz_j has a factor log2(e), which comes from the weights. triton_reduce.py removes this factor.

A program owns BM rows and loops over a segment of the keys. Sums over keys (dq_j and the row sums) accumulate until the
segment ends. Sums over rows (dk) are stored for every key tile. A separate kernel for dk would recompute the scores.
"""

# Tuples grow by addition, because Triton does not support starred expressions in tuples.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import (
    NOT_A_SCORE,
    TANH,
    activate,
    attended_tile,
    load_biases,
    load_head_weights,
    load_keys,
    load_queries,
    load_target,
    score_tile,
    slope,
    target_places,
)
from gsa_kernels.triton_constants import LN_2, LOG2_E
from gsa_kernels.triton_rows import rows_of_program


@triton.jit
def merge_segments(
    row_stats,
    first_segment,
    last_segment,
    plane,
    stride,
    offsets,
    BM: tl.constexpr,
    TARGET: tl.constexpr = True,
):
    """Merge all segments of a row: log2-sum-exp2 of the scores and, with TARGET, the sum of the target."""
    maximum = tl.full([BM], NOT_A_SCORE, tl.float32)
    exp_sum = tl.zeros([BM], tl.float32)
    target_sum = tl.zeros([BM], tl.float32)
    for segment in range(first_segment, last_segment + 1):
        part = row_stats + segment * stride + offsets
        part_maximum = tl.load(part)
        new_maximum = tl.maximum(maximum, part_maximum)
        exp_sum = exp_sum * tl.exp2(maximum - new_maximum)
        exp_sum += tl.load(part + plane) * tl.exp2(part_maximum - new_maximum)
        if TARGET:
            target_sum += tl.load(part + 2 * plane)
        maximum = new_maximum
    return maximum + tl.log2(exp_sum), target_sum


@triton.jit
def kl_terms(log2_q, q, p, log2_p):
    """Compute q - p + p log(p / q) elementwise without cancellation. Where p is 0 the result is q. The target p and the
    softmax q both sum to 1 over the attended set, so adding q - p does not change the sum. In r = log(q / p) the term
    is p (exp(r) - 1 - r), which is positive and of second order. For small r it is a Taylor series."""
    r = (log2_q - log2_p) * LN_2
    series = 1.0 + r * (1.0 / 3 + r * (1.0 / 12 + r * (1.0 / 60 + r * (1.0 / 360 + r * (1.0 / 2520)))))
    near = 0.5 * p * r * r * series
    far = q - p - p * r
    return tl.where((tl.abs(r) < 0.25) & (p > 0), near, far)


@triton.jit
def grad_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    target,  # [B, PARTS, rows, L] fp32 or fp16, to be summed; or in blocks (target_blocks.py)
    packed_mask,  # [B, R, W] int32
    document_starts,  # [B, R] int32
    row_stats,  # [3, segments, B, tiles * BM] fp32, of the first pass
    first_keys,  # [B, tiles] int32, of the first pass
    row_sums,  # out: [1 + 2 HI, segments, B, tiles * BM] fp32: KL, sum_s G a_j, sum_s dz_j
    dq_parts,  # out: [segments, B, tiles, BLOCK_D, HI * BM] fp32
    dk_parts,  # out: [B, tiles, ceil(L / BN), BLOCK_D, BN] fp32
    R,
    L,
    W,
    query_start,
    row_start,
    num_rows,
    target_stride_b,
    target_stride_part,
    target_stride_row,
    scale,
    PARTS: tl.constexpr,
    TARGET_IN_BLOCKS: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SEGMENT: tl.constexpr,
    STRETCH: tl.constexpr,
    SPACING: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
):
    segment = tl.program_id(0)
    num_tiles = tl.num_programs(1)
    tile, b, local, valid, rows, row_index, last = rows_of_program(
        R, query_start, row_start, num_rows, BM, STRETCH, SPACING
    )

    first = 0
    starts = rows
    if HAS_STARTS:
        starts = tl.load(document_starts + row_index, mask=valid, other=L)
        first = tl.load(first_keys + b * num_tiles + tile)
    begin = tl.maximum(segment * SEGMENT, first // BN * BN)
    end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
    if begin < end:
        padded_rows = num_tiles * BM
        segment_stride = tl.num_programs(2).to(tl.int64) * padded_rows
        plane = tl.num_programs(0) * segment_stride
        row_offsets = b.to(tl.int64) * padded_rows + local
        lse, target_sum = merge_segments(
            row_stats, first // SEGMENT, last // SEGMENT, plane, segment_stride, row_offsets, BM
        )
        counted = target_sum > 0
        inverse_sum = tl.where(counted, 1.0 / tl.where(counted, target_sum, 1.0), 0.0)

        queries = load_queries(q_idx, row_index, valid, HI, DI, BLOCK_D)
        weights = load_head_weights(weight_logits, weight_bias, row_index, valid, HI, KIND, WEIGHT_BIAS)
        factor = tl.load(beta)
        scaled = ()
        dq = ()
        grad_a = ()
        grad_z = ()
        for j in tl.static_range(HI):
            scaled = scaled + (weights[j] * (factor * LOG2_E),)
            dq = dq + (tl.zeros([BLOCK_D, BM], tl.float32),)
            grad_a = grad_a + (tl.zeros([BM], tl.float32),)
            grad_z = grad_z + (tl.zeros([BM], tl.float32),)
        biases = load_biases(score_bias, HI, SCORE_BIAS)
        target_at = target_places(
            target, b, tile, target_stride_b, target_stride_row, BM, BN, TARGET_IN_BLOCKS
        )
        part_stride = tl.cast(target_stride_part, tl.int64)
        d = tl.arange(0, BLOCK_D)
        dk_tile = dk_parts + (b.to(tl.int64) * num_tiles + tile) * (tl.cdiv(L, BN) * (BLOCK_D * BN))
        dk_places = d[:, None] * BN + tl.arange(0, BN)[None, :]

        k_sequence = k_idx + b.to(tl.int64) * L * DI
        kl = tl.zeros([BM], tl.float32)
        for key in range(begin, end, BN):
            cols = key + tl.arange(0, BN)
            keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
            scores = score_tile(queries, keys, scaled, biases, scale, HI, KIND, PRECISION)
            attended = attended_tile(
                packed_mask, row_index, rows, cols, starts, key // 32, W, HAS_MASK, HAS_STARTS, BN
            )
            attended = attended & counted[:, None]
            p = load_target(target_at, part_stride, rows, key, L, attended, BN, PARTS, TARGET_IN_BLOCKS)
            p *= inverse_sum[:, None]
            log2_q = tl.where(attended, scores - lse[:, None], 0.0)
            q = tl.where(attended, tl.exp2(log2_q), 0.0)
            log2_p = log2_of(tl.where(p > 0, p, 1.0), KIND)
            kl += tl.sum(kl_terms(log2_q, q, p, log2_p), 1)

            if WITH_GRADIENTS:
                g = q - p
                keys_t = tl.trans(keys)
                dk_t = tl.zeros([BLOCK_D, BN], tl.float32)
                new_dq = ()
                new_grad_a = ()
                new_grad_z = ()
                for j in tl.static_range(HI):
                    # The product is recomputed, because HI tiles of activations do not fit the registers. "ieee" has no
                    # effect on 16-bit types, but keeps the compiler from merging this product with the first one.
                    product = tl.dot(queries[j], keys_t, input_precision="ieee")
                    a = activate(product, scale, biases[j], KIND)
                    dz = g * scaled[j][:, None] * slope(a, KIND)
                    new_grad_a = new_grad_a + (grad_a[j] + tl.sum(g * a, 1),)
                    new_grad_z = new_grad_z + ((grad_z[j] + tl.sum(dz, 1)) if SCORE_BIAS else grad_z[j],)
                    narrow = dz.to(keys.dtype)
                    new_dq = new_dq + (tl.dot(keys_t, tl.trans(narrow), dq[j], input_precision=PRECISION),)
                    dk_t = tl.dot(tl.trans(queries[j]), narrow, dk_t, input_precision=PRECISION)
                dq = new_dq
                grad_a = new_grad_a
                grad_z = new_grad_z
                tl.store(dk_tile + key * BLOCK_D + dk_places, dk_t)

        sums = row_sums + segment.to(tl.int64) * segment_stride + row_offsets
        tl.store(sums, kl)
        if WITH_GRADIENTS:
            dq_tile = (segment.to(tl.int64) * tl.num_programs(2) + b) * num_tiles + tile
            dq_rows = (
                dq_parts
                + dq_tile * (BLOCK_D * HI * BM)
                + (d * (HI * BM))[:, None]
                + tl.arange(0, BM)[None, :]
            )
            for j in tl.static_range(HI):
                tl.store(sums + (1 + j) * plane, grad_a[j])
                tl.store(sums + (1 + HI + j) * plane, grad_z[j])
                tl.store(dq_rows + j * BM, dq[j])


@triton.jit
def log2_of(x, KIND: tl.constexpr):
    """Return log2 of x >= 0 elementwise. If the scores are approximate, the hardware's approximate log2 is used."""
    if KIND == TANH:
        y = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y
