"""Runs the first pass over a chunk of rows: log-sum-exp of the scores and sum of the target over the attended set."""

# Tuples grow by addition, because Triton does not support starred expressions in tuples.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import (
    NOT_A_SCORE,
    attended_tile,
    load_biases,
    load_head_weights,
    load_keys,
    load_queries,
    load_target,
    score_tile,
    target_places,
)
from gsa_kernels.triton_constants import LOG2_E
from gsa_kernels.triton_rows import rows_of_program


@triton.jit
def stats_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    target,  # [B, PARTS, rows, L] fp32 or fp16, to be summed; or in blocks (target_blocks.py)
    packed_mask,  # [B, R, W] int32
    document_starts,  # [B, R] int32
    row_stats,  # out: [3, segments, B, tiles * BM] fp32: maximum, sum of exponentials, sum of the target
    first_keys,  # out: [B, tiles] int32, the first causal key of any row of the tile
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
):
    """One program computes scores of BM rows for SEGMENT keys. The grid is (segments, tiles, B). A program writes no
    statistics if its segment has no causal key of the rows. Scores are multiplied by log2(e), for exp2."""
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
    if segment == 0:
        tl.store(first_keys + b * num_tiles + tile, first)

    begin = tl.maximum(segment * SEGMENT, first // BN * BN)
    end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
    if begin < end:
        queries = load_queries(q_idx, row_index, valid, HI, DI, BLOCK_D)
        weights = load_head_weights(weight_logits, weight_bias, row_index, valid, HI, KIND, WEIGHT_BIAS)
        factor = tl.load(beta) * LOG2_E
        scaled = ()
        for j in tl.static_range(HI):
            scaled = scaled + (weights[j] * factor,)
        biases = load_biases(score_bias, HI, SCORE_BIAS)
        target_at = target_places(
            target, b, tile, target_stride_b, target_stride_row, BM, BN, TARGET_IN_BLOCKS
        )
        part_stride = tl.cast(target_stride_part, tl.int64)

        k_sequence = k_idx + b.to(tl.int64) * L * DI
        maximum = tl.full([BM], NOT_A_SCORE, tl.float32)
        exp_sum = tl.zeros([BM], tl.float32)
        target_sum = tl.zeros([BM], tl.float32)
        for key in range(begin, end, BN):
            cols = key + tl.arange(0, BN)
            keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
            scores = score_tile(queries, keys, scaled, biases, scale, HI, KIND, PRECISION)
            attended = attended_tile(
                packed_mask, row_index, rows, cols, starts, key // 32, W, HAS_MASK, HAS_STARTS, BN
            )
            target_sum += tl.sum(
                load_target(target_at, part_stride, rows, key, L, attended, BN, PARTS, TARGET_IN_BLOCKS),
                1,
            )
            scores = tl.where(attended, scores, NOT_A_SCORE)
            # Until a row's first attended key, exp_sum adds meaningless values. The first real score or the merge of
            # segments multiplies this sum by 0.
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            exp_sum = exp_sum * tl.exp2(maximum - new_maximum) + tl.sum(
                tl.exp2(scores - new_maximum[:, None]), 1
            )
            maximum = new_maximum

        padded_rows = num_tiles * BM
        plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(2) * padded_rows
        out = row_stats + (segment.to(tl.int64) * tl.num_programs(2) + b) * padded_rows + local
        tl.store(out, maximum)
        tl.store(out + plane, exp_sum)
        tl.store(out + 2 * plane, target_sum)
