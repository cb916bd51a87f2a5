"""Selects the exact top-k from each row's candidates. Each program holds the scores of one row in registers."""

import torch
import triton
import triton.language as tl

from gsa_kernels.selection.criteria import Criteria, Outputs
from gsa_kernels.selection.triton_candidates import Candidates, columns_per_program
from gsa_kernels.selection.triton_guess import Guesses
from gsa_kernels.selection.triton_search import (
    INT_MIN,
    above_cut,
    find_cut,
    order_key,
    row_budget,
    window_words,
)

_SMALLEST_SIZE = 128
_SIZES = 3
_KEYS_PER_WARP = 512
_SPANS = 128  # candidates read at a time, one by each thread
_MAX_REGISTERS = 64  # per thread, so that several rows share a multiprocessor


def narrow_candidates(
    criteria: Criteria,
    rows: range,
    candidates: Candidates,
    guesses: Guesses,
    outputs: Outputs,
    failed: torch.Tensor,
) -> None:
    """Turn the bits of candidates into the selection of `rows`, the rows of the chunk.

    Args:
        candidates, outputs: results of `write_candidates`
        failed: int32 [B, R], set to 1 for a row with fewer than k_t candidates or more than the list holds. The row's
            packed mask becomes 0, and its budget and variance are not written.
    """
    inputs, rule, packed_mask = criteria.inputs, criteria.rule, outputs.packed_mask
    # Only the device knows the number of candidates, so kernels of all sizes run, and each row belongs to one.
    most = candidates.entries.shape[2]
    sizes = [most >> shift for shift in reversed(range(_SIZES)) if most >> shift >= _SMALLEST_SIZE] or [most]
    for above, size in zip([-1, *sizes[:-1]], sizes, strict=True):
        _narrow_kernel[(len(rows), inputs.batch)](
            candidates.entries,
            candidates.counts,
            guesses.of_rows,
            candidates.sums,
            inputs.document_starts,
            criteria.variance_ema,
            packed_mask,
            outputs.budget,
            outputs.variance,
            failed,
            inputs.query_start,
            rows.start,
            outputs.first_row,
            inputs.num_rows,
            candidates.counts.shape[1],
            *packed_mask.shape[1:],
            candidates.sums.shape[2],
            candidates.entries.shape[1],
            above,
            *rule.numbers,
            criteria.local_window,
            MODE=rule.adaptive_k,
            SPAN=columns_per_program(inputs),
            SPANS=_SPANS,
            MOST=most,
            SIZE=size,
            num_warps=max(size // _KEYS_PER_WARP, 4),
            maxnreg=_MAX_REGISTERS,
        )


@triton.jit(
    do_not_specialize=[
        "query_start",
        "first_row",
        "words_start",
        "num_rows",
        "chunk_rows",
        "words_rows",
        "words_per_row",
        "sums_per_row",
        "list_rows",
        "above",
        "k_base",
        "k_min",
        "k_max",
        "dense_below",
        "local_window",
    ]
)
def _narrow_kernel(
    candidates_ptr, counts_ptr, guesses_ptr, sums_ptr, starts_ptr, ema_ptr, words_ptr, budget_ptr,
    variance_ptr, failed_ptr, query_start, first_row, words_start, num_rows, chunk_rows, words_rows,
    words_per_row, sums_per_row, list_rows, above, k_base, k_min, k_max, dense_below, local_window,
    MODE: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Select in each row whose number of candidates is more than `above` and at most SIZE.

    The kernel with the largest SIZE also takes the rows with more than SIZE candidates.
    """
    row = first_row + tl.program_id(0)
    position = query_start + row
    batch = tl.program_id(1).to(tl.int64)
    chunk_row = batch * chunk_rows + tl.program_id(0)
    count = tl.load(counts_ptr + chunk_row)
    if (count <= above) | ((count > SIZE) & (SIZE < MOST)):
        return
    token = batch * num_rows + row
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    num_visible = tl.maximum(position - start + 1, 0)
    everything = tl.load(guesses_ptr + chunk_row * 3) == float("-inf")

    slots = tl.arange(0, SIZE)
    listed = slots < count
    candidates_ptr += (batch * list_rows + tl.program_id(0)) * MOST
    # The compiler knows that `limit` is a multiple of 16, so the masked load stays 16 bytes wide.
    limit = (count + 15) // 16 * 16
    entries = tl.load(candidates_ptr + slots, mask=slots < limit, other=0)
    if everything & (count == num_visible) & (count <= SIZE):
        # Candidates are sorted by key, so that the sums below do not depend on the order in which they were stored.
        tl.debug_barrier()
        tl.store(candidates_ptr + (entries >> 32) - start, entries, mask=listed)
        tl.debug_barrier()
        entries = tl.load(candidates_ptr + slots, mask=slots < limit, other=0)
    x = entries.to(tl.int32).to(tl.float32, bitcast=True)
    columns = (entries >> 32).to(tl.int32)

    divisor = tl.maximum(num_visible, 1).to(tl.float32)
    if everything:
        # All keys of the row are candidates. The variance takes two passes, relative to the largest score, so that
        # equal scores have variance 0 to the bit.
        distance = tl.where(listed, x - tl.max(tl.where(listed, x, float("-inf"))), 0.0)
        mean = tl.sum(distance) / divisor
        deviation = tl.where(listed, distance - mean, 0.0)
        variance = tl.sum(deviation * deviation) / divisor
    else:
        # Steps have a fixed size, so that the order of the sums depends only on the row, not on the chunk.
        total = tl.zeros([SPANS], dtype=tl.float32)
        squares = tl.zeros([SPANS], dtype=tl.float32)
        sums_ptr += chunk_row * sums_per_row * 2
        for first in range(0, position // SPAN + 1, SPANS):
            spans = first + tl.arange(0, SPANS)
            in_row = (spans >= start // SPAN) & (spans <= position // SPAN)
            total += tl.load(sums_ptr + spans * 2, mask=in_row, other=0.0)
            squares += tl.load(sums_ptr + spans * 2 + 1, mask=in_row, other=0.0)
        mean = tl.sum(total) / divisor
        square = tl.sum(squares) / divisor
        # The centre is the mean of a fraction p of the row, so (mean - centre)^2 <= variance (1 - p) / p. At most five
        # bits cancel. This maximum keeps a NaN. A plain maximum on a GPU returns the number instead.
        variance = tl.maximum(square - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, dense_below, MODE)
    words_ptr += (batch * words_rows + row - words_start) * words_per_row
    fits = (count <= SIZE) & (count >= tl.where(everything, num_visible, k))
    tl.store(failed_ptr + chunk_row, tl.where(fits, 0, 1))
    if fits:
        tl.store(budget_ptr + token, k)
        tl.store(variance_ptr + token, variance)
        keys = tl.where(listed, order_key(x), INT_MIN)
        threshold, last = find_cut(keys, columns, count, k)
        near = position + 1
        if local_window > 0:
            near = tl.maximum(position - local_window + 1, start)
        dropped = listed & (above_cut(keys, columns, threshold, last) == 0) & (columns < near)
        # Each bit is cleared or set by one thread, so the order of these operations does not matter.
        tl.atomic_and(words_ptr + columns // 32, ~(1 << (columns & 31)), mask=dropped, sem="relaxed")
        if local_window > 0:
            for word in range(near // 32, position // 32 + 1, 128):
                index = word + tl.arange(0, 128)
                window = window_words(index, near, position)
                tl.atomic_or(words_ptr + index, window, mask=index <= position // 32, sem="relaxed")
    else:
        for word in range(start // 32, position // 32 + 1, 1024):
            index = word + tl.arange(0, 1024)
            tl.store(words_ptr + index, index * 0, mask=index <= position // 32)
