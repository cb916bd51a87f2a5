"""Runs both passes over the scores of a chunk of rows, one head at a time.

The first pass computes two values over the attended set: the log-sum-exp of the scores, and the sum of the target. The
second pass computes the KL and G, the gradient of the scores. G is the softmax of the scores minus the target. From G,
triton_grad_products.py computes all other gradients in separate kernels, because a program that accumulated the
gradients of all heads would spill registers.
"""

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import (
    NOT_A_SCORE,
    RELU,
    SIGMOID,
    TANH,
    attended_entries,
    attended_tile,
    load_head_weight,
    load_keys,
    load_target,
    score_tile,
)
from gsa_kernels.triton_constants import LN_2, LOG2_E
from gsa_kernels.triton_rows import rows_of_program

G_SCALE = tl.constexpr(2.0**14)
"""Factor by which G (the gradient of the scores) is multiplied in memory. In fp16, values of G above 4e-9 then keep 11
bits, and the largest value is 4."""


@triton.jit
def merge_segments(
    row_stats,
    first_segment,
    last_segment,
    plane,
    stride,
    offsets,
    BM: tl.constexpr,
):
    """Merge all segments of a row: log2-sum-exp2 of the scores, and the sum of the target."""
    maximum = tl.full([BM], NOT_A_SCORE, tl.float32)
    exp_sum = tl.zeros([BM], tl.float32)
    target_sum = tl.zeros([BM], tl.float32)
    for segment in range(first_segment, last_segment + 1):
        part = row_stats + segment * stride + offsets
        part_maximum = tl.load(part)
        new_maximum = tl.maximum(maximum, part_maximum)
        exp_sum = exp_sum * tl.exp2(maximum - new_maximum)
        exp_sum += tl.load(part + plane) * tl.exp2(part_maximum - new_maximum)
        target_sum += tl.load(part + 2 * plane)
        maximum = new_maximum
    return maximum + tl.log2(exp_sum), target_sum


@triton.jit
def kl_terms(log2_q, q, p, log2_p):
    """Compute q - p + p log(p / q) elementwise without cancellation. Where p is 0, the result is q.

    The target p and the softmax q both sum to 1 over the attended set. The differences q - p therefore sum to 0, and
    the results sum to the KL. With r = log(q / p), a result is p (exp(r) - 1 - r), which is never negative. For small
    r, it is about p r^2 / 2, and a Taylor series avoids the cancellation.
    """
    r = (log2_q - log2_p) * LN_2
    series = 1.0 + r * (1.0 / 3 + r * (1.0 / 12 + r * (1.0 / 60 + r * (1.0 / 360 + r * (1.0 / 2520)))))
    near = 0.5 * p * r * r * series
    far = q - p - p * r
    return tl.where((tl.abs(r) < 0.25) & (p > 0), near, far)


@triton.jit(do_not_specialize=["row_start", "num_rows"])  # all chunks run the same code
def score_pass_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    target,  # [B, rows, columns] fp32 or fp16
    packed_mask,  # [B, R, W] int32
    document_starts,  # [B, R] int32
    list_keys,  # int32, of the key lists, whose keys take the place of all causal keys; or None
    list_words,
    list_starts,  # [B, tiles]
    list_counts,  # [B, tiles]
    row_stats,  # [3, segments, B, tiles * BM] fp32: maximum, sum of exponentials, sum of the target; out: if FIRST
    R,
    L,
    columns,
    W,
    query_start,
    row_start,
    num_rows,
    target_stride_b,
    target_stride_row,
    scale,
    log_sum,  # [B, R] fp32, or None: the first pass computes it
    inverse_target_sum,  # if there is `log_sum`
    kl_parts,  # out: [segments, B, tiles * BM] fp32
    grad_scores,  # out: [B, tiles * BM, grad_stride] fp16 or fp32: G_SCALE times G; 0 off the attended set
    grad_stride,
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
    FIRST: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
):
    """One program computes the scores of BM rows for SEGMENT columns. A column is a key or, with key lists, an entry of
    the tile's list. The grid is (segments, tiles, B). If no key of the segment is causal for the program's rows, the
    program writes nothing. Scores are multiplied by log2(e), so that the kernel can use exp2.

    A program writes G, the gradient of the scores, for its segment's key tiles from the first causal key to the last.
    """
    segment = tl.program_id(0)
    num_tiles = tl.num_programs(1)
    tile, b, local, valid, rows, row_index, last = rows_of_program(
        R, query_start, row_start, num_rows, BM, STRETCH, SPACING
    )

    first = 0
    starts = rows
    if HAS_STARTS:
        starts = tl.load(document_starts + row_index, mask=valid, other=L)
        first = tl.min(starts, 0)
    if list_keys is not None:
        list_index = b.to(tl.int64) * num_tiles + tile
        list_start = tl.load(list_starts + list_index)
        count = tl.load(list_counts + list_index)
        last = tl.maximum(count, 1) - 1
    begin = tl.maximum(segment * SEGMENT, first // BN * BN)
    end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
    if begin < end:
        factor = tl.load(beta) * LOG2_E
        padded_rows = num_tiles * BM
        segment_stride = tl.num_programs(2).to(tl.int64) * padded_rows
        row_offsets = b.to(tl.int64) * padded_rows + local
        plane = tl.num_programs(0) * segment_stride
        if FIRST:
            maximum = tl.full([BM], NOT_A_SCORE, tl.float32)
            exp_sum = tl.zeros([BM], tl.float32)
            target_sum = tl.zeros([BM], tl.float32)
        elif log_sum is None:
            # Rows without a target get q = p = 0.
            lse, target_sum = merge_segments(
                row_stats, first // SEGMENT, last // SEGMENT, plane, segment_stride, row_offsets, BM
            )
            counted = target_sum > 0
            inverse_sum = tl.where(counted, 1.0 / tl.where(counted, target_sum, 1.0), 0.0)[:, None]
            lse = tl.where(counted, lse, -NOT_A_SCORE)
        else:
            inverse_sum = inverse_target_sum
            lse = tl.load(log_sum + row_index, mask=valid, other=0.0) * LOG2_E
            if KIND != SIGMOID and KIND != RELU:  # The log-sum belongs to scores with the constant of tanh.
                for head in range(HI):
                    lse -= factor * load_head_weight(
                        weight_logits, weight_bias, row_index, valid, head, HI, KIND, WEIGHT_BIAS
                    )

        target_rows = target + b.to(tl.int64) * target_stride_b + (tile * BM).to(tl.int64) * target_stride_row
        target_rows += tl.arange(0, BM) * target_stride_row
        grad_rows = grad_scores + row_offsets * grad_stride
        k_sequence = k_idx + b.to(tl.int64) * L * DI
        kl = tl.zeros([BM], tl.float32)
        for key in range(begin, end, BN):
            cols = key + tl.arange(0, BN)
            if list_keys is not None:
                entries = tl.load(list_keys + list_start + cols, mask=cols < count, other=0)
                word = tl.load(list_words + list_start + cols, mask=cols < count, other=0)
                keys = load_keys(k_sequence, entries, L, DI, BLOCK_D)
                attended = attended_entries(word, valid)
            else:
                keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
                attended = attended_tile(
                    packed_mask, row_index, rows, cols, starts, key // 32, W, HAS_MASK, HAS_STARTS, BN
                )
            scores = score_tile(
                q_idx, keys, weight_logits, score_bias, weight_bias, row_index, valid, factor, scale,
                HI, DI, BLOCK_D, KIND, PRECISION, SCORE_BIAS, WEIGHT_BIAS,
            )  # fmt: skip
            p = load_target(target_rows, rows, key, columns, attended, BN)
            if FIRST:
                target_sum += tl.sum(p, 1)
                scores = tl.where(attended, scores, NOT_A_SCORE)
                # Until a row's first attended key, exp_sum adds meaningless values. The first real score or the merge
                # of segments multiplies this sum by 0.
                new_maximum = tl.maximum(maximum, tl.max(scores, 1))
                exp_sum = exp_sum * tl.exp2(maximum - new_maximum) + tl.sum(
                    tl.exp2(scores - new_maximum[:, None]), 1
                )
                maximum = new_maximum
            else:
                log2_q = tl.where(attended, scores - lse[:, None], NOT_A_SCORE)
                q = tl.exp2(log2_q)
                if WITH_GRADIENTS:
                    g = tl.fma(p, -inverse_sum, q) * G_SCALE
                    tl.store(grad_rows[:, None] + cols[None, :], g.to(grad_scores.dtype.element_ty))
                p *= inverse_sum
                log2_p = log2_of(tl.where(p > 0, p, 1.0), KIND)
                kl += tl.sum(kl_terms(log2_q, q, p, log2_p), 1)
        place = segment * segment_stride + row_offsets
        if FIRST:
            tl.store(row_stats + place, maximum)
            tl.store(row_stats + place + plane, exp_sum)
            tl.store(row_stats + place + 2 * plane, target_sum)
        else:
            tl.store(kl_parts + place, kl)


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
