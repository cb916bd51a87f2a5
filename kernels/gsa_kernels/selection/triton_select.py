"""Computes moments, budget and exact top-k of one row of scores in one program, which holds the row in registers."""

import torch
import triton
import triton.language as tl

from gsa_kernels.selection.criteria import Criteria, Outputs
from gsa_kernels.selection.triton_search import (
    INT_MAX,
    INT_MIN,
    find_cut,
    normal_guess,
    order_key,
    row_budget,
    score_of_key,
    search_options,
    window_words,
)
from gsa_kernels.triton_constants import LN_2, LOG2_E


def select_rows(
    criteria: Criteria, scores: torch.Tensor, chunk_start: int, rows: range, block: int, outputs: Outputs
) -> None:
    """Select `rows`, whose positions are all below `block`.

    Args:
        scores: fp32 [B, R, columns], the chunk of rows from `chunk_start` on; the row stride is a multiple of 16
        block: a power of two
        outputs: its packed mask contains zeros
    """
    inputs, rule, log_sums = criteria.inputs, criteria.rule, outputs.log_sums
    _select_rows_kernel[(len(rows), inputs.batch)](
        scores,
        inputs.document_starts,
        criteria.variance_ema,
        outputs.packed_mask,
        outputs.budget,
        outputs.variance,
        None if log_sums is None else log_sums.inverse_temperature,
        None if log_sums is None else log_sums.out,
        inputs.query_start,
        rows.start,
        chunk_start,
        inputs.num_rows,
        outputs.first_row,
        *outputs.packed_mask.shape[1:],
        *scores.stride()[:2],
        *rule.numbers,
        criteria.local_window,
        MODE=rule.adaptive_k,
        HAS_WINDOW=criteria.local_window > 0,
        BLOCK=block,
        **row_options(block),
    )


def row_options(block: int) -> dict[str, int]:
    """Return launch options. For rows of up to 4096 keys, a thread holds 32 keys in 96 registers, so more rows share a
    multiprocessor than with 64 keys per thread (docs/kernels.md, Tuning)."""
    if block > 4096:
        return search_options(block)
    return {"num_warps": 2 if block <= 2048 else 4, "maxnreg": 96}


@triton.jit(
    do_not_specialize=[
        "query_start",
        "first_row",
        "chunk_start",
        "num_rows",
        "words_start",
        "words_rows",
        "k_base",
        "k_min",
        "k_max",
        "dense_below",
        "local_window",
    ]
)
def _select_rows_kernel(
    scores_ptr, starts_ptr, ema_ptr, words_ptr, budget_ptr, variance_ptr, inverse_temperature_ptr,
    log_sum_ptr, query_start, first_row, chunk_start, num_rows, words_start, words_rows, words_per_row,
    stride_b, stride_r, k_base, k_min, k_max, dense_below, local_window,
    MODE: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    token = batch * num_rows + row
    position = query_start + row
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    num_visible = tl.maximum(position - start + 1, 0)
    columns = tl.arange(0, BLOCK)
    visible = (columns >= start) & (columns <= position)

    row_ptr = scores_ptr + batch * stride_b + (row - chunk_start).to(tl.int64) * stride_r
    # The compiler knows that `limit` is a multiple of 16, so the masked load stays 16 bytes wide.
    limit = (position // 16 + 1) * 16
    x = tl.load(row_ptr + columns, mask=columns < limit, other=0.0)

    # The variance takes two passes relative to the first causal score, which also replaces masked scores. Equal scores
    # therefore have a variance of exactly 0.
    origin = tl.load(row_ptr + tl.minimum(start, position))
    divisor = tl.maximum(num_visible, 1).to(tl.float32)
    x = tl.where(visible, x, origin)
    distance = x - origin
    mean = tl.sum(distance) / divisor
    deviation = tl.where(visible, distance - mean, 0.0)
    variance = tl.sum(deviation * deviation) / divisor
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, dense_below, MODE)

    keys = tl.where(visible, order_key(x), INT_MIN)
    threshold = k * 0 + (INT_MIN + 1)
    if k < num_visible:
        guess = normal_guess(origin + mean, variance, num_visible, k)
        threshold, last = find_cut(keys, columns, num_visible, k, guess, order_key(tl.min(x)))
        if last < INT_MAX:
            keys = tl.where((keys == threshold) & (columns > last), INT_MIN, keys)
    chosen = keys >= threshold
    bits = chosen.to(tl.int32) << (columns & 31)
    # The bits are distinct, so their sum is their union, including bit 31.
    words = tl.sum(tl.reshape(bits, [BLOCK // 32, 32]), axis=1)
    word_index = tl.arange(0, BLOCK // 32)
    window = tl.maximum(position - local_window + 1, start)
    if HAS_WINDOW:
        words |= window_words(word_index, window, position)
    words_ptr += (batch * words_rows + row - words_start) * words_per_row
    tl.store(words_ptr + word_index, words, mask=word_index < words_per_row)
    tl.store(budget_ptr + token, k)
    tl.store(variance_ptr + token, variance)
    if log_sum_ptr is not None:
        if HAS_WINDOW:
            # One unsigned comparison tests window <= column <= position, if there is a window.
            chosen |= (columns - window).to(tl.uint32) < (position + 1 - window).to(tl.uint32)
        # Scores are in units of log 2.
        log_base = tl.load(inverse_temperature_ptr) * LOG2_E
        highest = tl.where(num_visible > 0, score_of_key(tl.max(keys)) * log_base, 0.0)
        terms = tl.exp2(tl.where(chosen, x * log_base - highest, float("-inf")))
        total = tl.sum(terms)
        tl.store(log_sum_ptr + token, (highest + tl.log2(total)) * LN_2)
