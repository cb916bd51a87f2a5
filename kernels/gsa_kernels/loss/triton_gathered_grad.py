"""Computes the KL and all gradients of a chunk of tiles as partial sums. This is the second pass over key lists.

triton_grad_products.py has the formulas. Each program handles one tile of rows and one segment of the tile's key list.
Registers accumulate the KL and the gradients of queries and score bias until the segment ends. After every ENTRIES keys
the program stores the gradients of these keys, and a partial sum of the head weights' gradients.
"""

import triton
import triton.language as tl

from gsa_kernels.attention.triton_gathered_probs import load_entries
from gsa_kernels.loss.triton_gathered_scores import (
    activations,
    load_key_rows,
    load_rows,
    load_target,
    row_bits,
)
from gsa_kernels.loss.triton_grad import kl_terms, log2_of
from gsa_kernels.loss.triton_scores import NOT_A_SCORE, slope
from gsa_kernels.triton_constants import LN_2, LOG2_E


@triton.jit
def merge_segments(stats, segments, ROWS: tl.constexpr):
    """Merge the segments of a tile's list into log2-sum-exp2 of the scores and the sum of the target, for each row."""
    row = tl.arange(0, ROWS)
    maximum = tl.full([ROWS], NOT_A_SCORE, tl.float32)
    exp_sum = tl.zeros([ROWS], tl.float32)
    target_sum = tl.zeros([ROWS], tl.float32)
    for segment in range(segments):
        part = stats + segment * (3 * ROWS) + row
        part_maximum = tl.load(part)
        new_maximum = tl.maximum(maximum, part_maximum)
        exp_sum = exp_sum * tl.exp2(maximum - new_maximum)
        exp_sum += tl.load(part + ROWS) * tl.exp2(part_maximum - new_maximum)
        target_sum += tl.load(part + 2 * ROWS)
        maximum = new_maximum
    return maximum + tl.log2(tl.where(exp_sum > 0, exp_sum, 1.0)), target_sum


@triton.jit(do_not_specialize=["max_count"])
def gathered_grad_kernel(
    q_idx,  # [B, R, HI, DI]
    k_idx,  # [B, L, DI]
    weight_logits,  # [B, R, HI]
    score_bias,  # [HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    keys,  # int32, of the key lists; what follows to `counts` is of the chunk's N tiles, [B, N]
    words,
    starts,
    counts,
    tiles,  # [N] int32: their numbers
    target,  # [B, N, max_count, ROWS] fp32
    row_stats,  # [B, N, segments, 3, ROWS] fp32, of the first pass
    kl_parts,  # out: [B, N, segments, ROWS] fp32
    grad_a_parts,  # out: [B, N, segments * SEGMENT / ENTRIES, HP, ROWS] fp32: sum_s G a_j over each step
    grad_z_parts,  # out: [B, N, segments, HP] fp32: sum over rows and s of dz_j
    dq_parts,  # out: [B, N, segments, HP, ROWS, BLOCK_D] fp32
    dk_parts,  # out: [B, N, max_count, BLOCK_D] fp32
    L,
    R,
    max_count,
    scale,
    HI: tl.constexpr,
    HP: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SEGMENT: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
):
    segment = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * tl.num_programs(1) + tl.program_id(1)
    tile = tl.load(tiles + tl.program_id(1))
    count = tl.load(counts + unit)
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, count)
    if begin < end:
        num_segments = tl.num_programs(0)
        queries, weights, biases = load_rows(
            q_idx,
            weight_logits,
            score_bias,
            weight_bias,
            beta,
            batch * R + tile * ROWS,
            R - tile * ROWS,
            HI,
            HP,
            DI,
            BLOCK_D,
            ROWS,
            KIND,
            SCORE_BIAS,
            WEIGHT_BIAS,
            LOG2_E,
        )
        lse, target_sum = merge_segments(
            row_stats + unit * num_segments * (3 * ROWS), tl.cdiv(count, SEGMENT), ROWS
        )
        # The first pass stored 0 for rows after the last one, which attend to nothing, too.
        counted = target_sum > 0
        inverse_sum = tl.where(counted, 1.0 / tl.where(counted, target_sum, 1.0), 0.0)
        bits = row_bits(counted, ROWS)
        list_start = tl.load(starts + unit)
        k_sequence = k_idx + batch * L * DI
        target_unit = target + unit * max_count * ROWS
        dk_unit = dk_parts + unit * max_count * BLOCK_D
        d = tl.arange(0, BLOCK_D)
        head = tl.arange(0, HP)
        row = tl.arange(0, ROWS)
        steps = num_segments * (SEGMENT // ENTRIES)

        kl = tl.zeros([ENTRIES, ROWS], tl.float32)
        grad_z = tl.zeros([ENTRIES, HP], tl.float32)
        dq = tl.zeros([BLOCK_D, HP * ROWS], tl.float32)
        for first in range(begin, end, ENTRIES):
            entries = first + tl.arange(0, ENTRIES)
            key, word = load_entries(keys, words, list_start, entries, end)
            key_rows = load_key_rows(k_sequence, key, DI, BLOCK_D)
            a = activations(key_rows, queries, biases, scale, HP, ROWS, KIND, PRECISION)
            scores = tl.sum(a * weights, 1)
            attended = (word[:, None] & bits[None, :]) != 0
            p = load_target(target_unit + first * ROWS, attended, end - first, ENTRIES, ROWS)
            p *= inverse_sum[None, :]
            log2_q = tl.where(attended, scores - lse[None, :], 0.0)
            q = tl.where(attended, tl.exp2(log2_q), 0.0)
            log2_p = log2_of(tl.where(p > 0, p, 1.0), KIND)
            kl += kl_terms(log2_q, q, p, log2_p)

            if WITH_GRADIENTS:
                g = (q - p)[:, None, :]
                grad_a = grad_a_parts + (unit * steps + first // ENTRIES) * (HP * ROWS)
                tl.store(grad_a + head[:, None] * ROWS + row[None, :], tl.sum(g * a, 0))
                dz = g * weights * slope(a, KIND)
                grad_z += tl.sum(dz, 2)
                dz = tl.reshape(dz, [ENTRIES, HP * ROWS])
                narrow = dz.to(key_rows.dtype)
                dk = tl.dot(narrow, queries, input_precision=PRECISION)
                dq = tl.dot(tl.trans(key_rows), narrow, dq, input_precision=PRECISION)
                dk_step = dk_unit + first * BLOCK_D
                tl.store(
                    dk_step + (tl.arange(0, ENTRIES)[:, None] * BLOCK_D + d[None, :]),
                    dk * (scale * LN_2),
                    mask=(entries < end)[:, None],
                )

        part = unit * num_segments + segment
        tl.store(kl_parts + part * ROWS + row, tl.sum(kl, 0))
        if WITH_GRADIENTS:
            column = tl.arange(0, HP * ROWS)
            dq_part = dq_parts + (part * (HP * ROWS) + column)[None, :] * BLOCK_D + d[:, None]
            tl.store(dq_part, dq * (scale * LN_2))
            tl.store(grad_z_parts + part * HP + head, tl.sum(grad_z, 0) * LN_2)
