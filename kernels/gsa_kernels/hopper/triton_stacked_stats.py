"""Runs the first pass over a chunk of rows with stacked heads: the bf16 form of loss/triton_grad.py."""

import triton
import triton.language as tl

from gsa_kernels.hopper.triton_stacked import (
    exp2_of,
    expand_attended,
    load_mask_words,
    load_stacked_biases,
    load_stacked_weights,
    stacked_activations,
    sum_in_lanes,
)
from gsa_kernels.loss.triton_scores import NOT_A_SCORE, load_keys, load_target, target_places
from gsa_kernels.triton_constants import LOG2_E
from gsa_kernels.triton_rows import rows_of_program
from gsa_kernels.triton_stacks import load_stacked_queries, stack_slots


@triton.jit
def stacked_stats_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    target,  # [B, PARTS, rows, L] fp32 or fp16, to be summed; or in blocks (target_blocks.py)
    packed_mask,  # [B, R, W] int32
    document_starts,  # [B, R] int32
    row_stats,  # out: [3, segments, B, tiles * BM] fp32: maximum, sum of exponentials, sum of the target if not given
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
    HEADS: tl.constexpr,
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
    SUM_GIVEN: tl.constexpr,  # the sum of the target is known: it is not read
):
    """One program computes scores of BM rows for SEGMENT keys. Grid: (segments, tiles, B). A program writes no
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
        slots, exists = stack_slots(row_index, valid, HI, HEADS)
        queries = load_stacked_queries(q_idx, row_index, valid, HI, HEADS, DI, BLOCK_D)
        scaled = load_stacked_weights(weight_logits, weight_bias, slots, exists, HI, KIND, WEIGHT_BIAS)
        scaled = (scaled * (tl.load(beta) * LOG2_E))[:, :, None]
        biases = load_stacked_biases(score_bias, HI, HEADS, SCORE_BIAS)
        target_at = target_places(
            target, b, tile, target_stride_b, target_stride_row, BM, BN, TARGET_IN_BLOCKS
        )
        part_stride = tl.cast(target_stride_part, tl.int64)

        k_sequence = k_idx + b.to(tl.int64) * L * DI
        # Each of the four lanes that share a row has its own maximum: see `sum_in_lanes`.
        maximum = tl.full([BM, 4], NOT_A_SCORE, tl.float32)
        exp_sum = tl.zeros([BM, 4], tl.float32)
        target_sum = tl.zeros([BM, 4], tl.float32)
        tile_words = load_mask_words(packed_mask, row_index, rows, begin // 32, W, HAS_MASK, BN)
        for key in range(begin, end, BN):
            cols = key + tl.arange(0, BN)
            keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
            a = stacked_activations(queries, keys, biases, scale, KIND, PRECISION)
            scores = tl.sum(scaled * a, 0)
            attended = expand_attended(tile_words, rows, cols, starts, HAS_MASK, HAS_STARTS, BN)
            tile_words = load_mask_words(packed_mask, row_index, rows, (key + BN) // 32, W, HAS_MASK, BN)
            if not SUM_GIVEN:
                target_sum += sum_in_lanes(
                    load_target(target_at, part_stride, rows, key, L, attended, BN, PARTS, TARGET_IN_BLOCKS)
                )
            scores = tl.where(attended, scores, NOT_A_SCORE)
            # Until a lane's first attended key, exp_sum adds meaningless values. The first real score or the merge of
            # lanes and segments multiplies this sum by 0.
            of_lanes = tl.reshape(scores, [BM, BN // 8, 4, 2])
            new_maximum = tl.maximum(maximum, tl.max(tl.max(of_lanes, 3), 1))
            terms = exp2_of(of_lanes - new_maximum[:, None, :, None], KIND)
            exp_sum = exp_sum * tl.exp2(maximum - new_maximum) + tl.sum(tl.sum(terms, 3), 1)
            maximum = new_maximum

        row_maximum = tl.max(maximum, 1)
        exp_sum = exp_sum * tl.exp2(maximum - row_maximum[:, None])
        padded_rows = num_tiles * BM
        plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(2) * padded_rows
        out = row_stats + (segment.to(tl.int64) * tl.num_programs(2) + b) * padded_rows + local
        tl.store(out, row_maximum)
        tl.store(out + plane, tl.sum(exp_sum, 1))
        if not SUM_GIVEN:
            tl.store(out + 2 * plane, tl.sum(target_sum, 1))
