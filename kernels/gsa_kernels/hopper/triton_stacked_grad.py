"""Runs the second pass over a chunk of rows with stacked heads, in bf16. triton_grad_products.py has the formulas."""

import triton
import triton.language as tl

from gsa_kernels.hopper.triton_stacked import (
    TINY,
    as_held,
    exp2_of,
    expand_attended,
    load_mask_words,
    load_stacked_biases,
    load_stacked_weights,
    log2_of_positive,
    rounded_product,
    stable_kl_terms,
    stacked_activations,
    sum_in_lanes,
    sum_of_heads,
)
from gsa_kernels.loss.triton_grad import merge_segments
from gsa_kernels.loss.triton_scores import (
    NOT_A_SCORE,
    RELU,
    SIGMOID,
    TANH,
    load_keys,
    load_target,
    slope,
    target_places,
)
from gsa_kernels.triton_constants import LOG2_E
from gsa_kernels.triton_rows import rows_of_program
from gsa_kernels.triton_stacks import load_stacked_queries, stack, stack_slots


@triton.jit
def stacked_grad_kernel(
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
    first_keys,  # [B, tiles] int32, of the first pass; out: if there was none
    row_sums,  # out: [1 + 2 HI, segments, B, tiles * BM] fp32: KL if WITH_VALUE, sum_s G a_j, sum_s dz_j
    dq_parts,  # out: [segments, B, tiles, HEADS * BM, BLOCK_D] fp32, heads and rows as in a stack
    dk_parts,  # out: [B, tiles, ceil(L / BN), BLOCK_D * BN] bf16 or fp32, `as_held`
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
    log_sum,  # [B, R] fp32, or None: the first pass has it
    inverse_target_sum,  # if SUM_GIVEN
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
    SUM_GIVEN: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
    WITH_VALUE: tl.constexpr,
):
    """Compute the KL and all gradients of a chunk. `stacked_stats_kernel` describes grid and segments.

    Gradients have the same bits whether the KL is computed or not. To ensure this, the code leaves the compiler no
    choice between one fused instruction and two. With ReLU the KL is always computed and stored.
    """
    counts_kl: tl.constexpr = WITH_VALUE or KIND == RELU
    segment = tl.program_id(0)
    num_tiles = tl.num_programs(1)
    tile, b, local, valid, rows, row_index, last = rows_of_program(
        R, query_start, row_start, num_rows, BM, STRETCH, SPACING
    )

    first = 0
    starts = rows
    if HAS_STARTS:
        starts = tl.load(document_starts + row_index, mask=valid, other=L)
        if log_sum is None:  # noqa: SIM108 (known at compile time)
            first = tl.load(first_keys + b * num_tiles + tile)
        else:
            first = tl.min(starts, 0)
    if log_sum is not None:
        tl.store(first_keys + b * num_tiles + tile, first, mask=segment == 0)
    begin = tl.maximum(segment * SEGMENT, first // BN * BN)
    end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
    if begin < end:
        padded_rows = num_tiles * BM
        segment_stride = tl.num_programs(2).to(tl.int64) * padded_rows
        plane = tl.num_programs(0) * segment_stride
        row_offsets = b.to(tl.int64) * padded_rows + local
        if log_sum is None:
            lse, target_sum = merge_segments(
                row_stats,
                first // SEGMENT,
                last // SEGMENT,
                plane,
                segment_stride,
                row_offsets,
                BM,
                not SUM_GIVEN,
            )
        else:
            lse = tl.load(log_sum + row_index, mask=valid, other=0.0) * LOG2_E
        # Rows without a target get q = p = 0.
        inverse_sum = inverse_target_sum
        if not SUM_GIVEN:
            counted = target_sum > 0
            inverse_sum = tl.where(counted, 1.0 / tl.where(counted, target_sum, 1.0), 0.0)[:, None]
            lse = tl.where(counted, lse, -NOT_A_SCORE)

        slots, exists = stack_slots(row_index, valid, HI, HEADS)
        queries = load_stacked_queries(q_idx, row_index, valid, HI, HEADS, DI, BLOCK_D)
        weights = load_stacked_weights(weight_logits, weight_bias, slots, exists, HI, KIND, WEIGHT_BIAS)
        # With tanh the derivative has a factor of 1/2. Applying it here lets one set of weights serve both uses.
        factor: tl.constexpr = 2.0 if KIND == TANH else 1.0
        beta_log2 = tl.load(beta) * (LOG2_E / factor)
        # The log-sum belongs to the whole scores. Scores by tanh lack the term sum_j weight_j.
        by_tanh: tl.constexpr = KIND != SIGMOID and KIND != RELU
        if by_tanh and log_sum is not None:
            lse -= factor * (tl.sum(weights, 0) * beta_log2)
        scaled = (weights * beta_log2)[:, :, None]
        biases = load_stacked_biases(score_bias, HI, HEADS, SCORE_BIAS)
        dq = tl.zeros([HEADS * BM, BLOCK_D], tl.float32)
        grad_a = tl.zeros([HEADS, BM, 4], tl.float32)
        grad_z = tl.zeros([HEADS, BM, 4], tl.float32)
        target_at = target_places(
            target, b, tile, target_stride_b, target_stride_row, BM, BN, TARGET_IN_BLOCKS
        )
        part_stride = tl.cast(target_stride_part, tl.int64)
        dk_tile = dk_parts + (b.to(tl.int64) * num_tiles + tile) * (tl.cdiv(L, BN) * (BLOCK_D * BN))
        dk_places = tl.arange(0, BLOCK_D * BN)

        k_sequence = k_idx + b.to(tl.int64) * L * DI
        kl = tl.zeros([BM, 4], tl.float32)
        tile_words = load_mask_words(packed_mask, row_index, rows, begin // 32, W, HAS_MASK, BN)
        for key in range(begin, end, BN):
            cols = key + tl.arange(0, BN)
            keys = load_keys(k_sequence, cols, L, DI, BLOCK_D)
            a = stacked_activations(queries, keys, biases, scale, KIND, PRECISION)
            scores = sum_of_heads(scaled, a, KIND)
            attended = expand_attended(tile_words, rows, cols, starts, HAS_MASK, HAS_STARTS, BN)
            tile_words = load_mask_words(packed_mask, row_index, rows, (key + BN) // 32, W, HAS_MASK, BN)
            p = load_target(target_at, part_stride, rows, key, L, attended, BN, PARTS, TARGET_IN_BLOCKS)
            log2_q = tl.where(attended, tl.fma(scores, factor, -lse[:, None]), NOT_A_SCORE)
            g = tl.fma(p, -inverse_sum, exp2_of(log2_q, KIND))
            if counts_kl:
                p *= inverse_sum
                log2_p = log2_of_positive(tl.maximum(p, TINY), KIND)
                kl += sum_in_lanes(stable_kl_terms(log2_q, log2_p, p, g))

            if WITH_GRADIENTS:
                g = g[None, :, :]
                g_a = rounded_product(g, a, KIND)
                grad_a += sum_in_lanes(g_a)
                dz = rounded_product(scaled, g - g_a * a if KIND == TANH else g * slope(a, KIND), KIND)
                if SCORE_BIAS:
                    grad_z += sum_in_lanes(dz)
                dz = stack(dz).to(keys.dtype)
                # dz comes from registers here, while it is stored to shared memory for the other product.
                dq = tl.dot(dz, keys, dq, input_precision=PRECISION)
                dk_t = tl.dot(tl.trans(queries), dz, input_precision=PRECISION)
                tl.store(dk_tile + key * BLOCK_D + dk_places, as_held(dk_t.to(dk_parts.dtype.element_ty)))

        sums = row_sums + segment.to(tl.int64) * segment_stride + row_offsets
        if counts_kl:
            tl.store(sums, tl.sum(kl, 1))
        if WITH_GRADIENTS:
            heads = tl.arange(0, HEADS)[:, None]
            of_heads = sums[None, :] + (1 + heads) * plane
            tl.store(of_heads, tl.sum(grad_a, 2), mask=heads < HI)
            tl.store(of_heads + HI * plane, tl.sum(grad_z, 2), mask=heads < HI)
            dq_tile = (segment.to(tl.int64) * tl.num_programs(2) + b) * num_tiles + tile
            columns: tl.constexpr = HEADS * BM
            place = tl.arange(0, columns)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            tl.store(dq_parts + dq_tile * (BLOCK_D * columns) + place, dq)
