"""Runs the first of two passes of the indexer loss over key lists, for a chunk of tiles.

The loss is a KL divergence between the softmax of the indexer's scores and the target (attention's probabilities). For
each query this pass computes the log-sum-exp of the scores and the sum of the target over the attended keys. The second
pass (triton_gathered_grad.py) computes the loss and its gradients.
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
from gsa_kernels.loss.triton_scores import NOT_A_SCORE
from gsa_kernels.triton_constants import LOG2_E


@triton.jit(do_not_specialize=["max_count"])
def gathered_stats_kernel(
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
    row_stats,  # out: [B, N, segments, 3, ROWS] fp32: maximum, sum of exponentials, sum of the target
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
):
    """One program computes the scores of a tile's rows for one segment of its key list. Grid: (segments, N, B). Scores
    are multiplied by log2(e), for exp2."""
    segment = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * tl.num_programs(1) + tl.program_id(1)
    tile = tl.load(tiles + tl.program_id(1))
    count = tl.load(counts + unit)
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, count)
    if begin < end:
        rows_left = R - tile * ROWS
        queries, weights, biases = load_rows(
            q_idx,
            weight_logits,
            score_bias,
            weight_bias,
            beta,
            batch * R + tile * ROWS,
            rows_left,
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
        list_start = tl.load(starts + unit)
        k_sequence = k_idx + batch * L * DI
        target_unit = target + unit * max_count * ROWS
        bits = row_bits(tl.arange(0, ROWS) < rows_left, ROWS)

        # The maximum is kept per place in a tile of entries. The places are merged once after the loop.
        maximum = tl.full([ENTRIES, ROWS], NOT_A_SCORE, tl.float32)
        exp_sum = tl.zeros([ENTRIES, ROWS], tl.float32)
        target_sum = tl.zeros([ENTRIES, ROWS], tl.float32)
        for first in range(begin, end, ENTRIES):
            entries = first + tl.arange(0, ENTRIES)
            key, word = load_entries(keys, words, list_start, entries, end)
            key_rows = load_key_rows(k_sequence, key, DI, BLOCK_D)
            a = activations(key_rows, queries, biases, scale, HP, ROWS, KIND, PRECISION)
            attended = (word[:, None] & bits[None, :]) != 0
            target_step = target_unit + first * ROWS
            target_sum += load_target(target_step, attended, end - first, ENTRIES, ROWS)
            scores = tl.where(attended, tl.sum(a * weights, 1), NOT_A_SCORE)
            new_maximum = tl.maximum(maximum, scores)
            added = tl.where(attended, tl.exp2(scores - new_maximum), 0.0)
            exp_sum = exp_sum * tl.exp2(maximum - new_maximum) + added
            maximum = new_maximum

        row_maximum = tl.max(maximum, 0)
        row_exp_sum = tl.sum(exp_sum * tl.exp2(maximum - row_maximum[None, :]), 0)
        out = row_stats + (unit * tl.num_programs(0) + segment) * (3 * ROWS) + tl.arange(0, ROWS)
        tl.store(out, row_maximum)
        tl.store(out + ROWS, row_exp_sum)
        tl.store(out + 2 * ROWS, tl.sum(target_sum, 0))
