"""A guess for each row, from a sample of its keys: a score that a little more than k_t keys reach.

Where that many keys have one score, as when an indexer's sigmoids are saturated, the guess has a key, too: of the keys
with just that score those up to it. As ties go to the lower index, what a guess lets through still holds the best keys
if it is enough.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import CANDIDATE_SLACK
from gsa_kernels.selection.triton_search import order_key, row_budget, score_of_key

FEWEST_SAMPLES = 64
"""Rows with fewer have no guess: the threshold is -inf. They see few keys, which then all are candidates."""

SLACK = tl.constexpr(CANDIDATE_SLACK)
_MOST_ROUNDS = tl.constexpr(12)


def guess_thresholds(
    sample_scores: torch.Tensor,
    sampled: torch.Tensor,
    query_start: int,
    rows: range,
    chunk_start: int,
    block: int,
    key_stride: int,
    document_starts: torch.Tensor | None,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    tile_rows: int,
    tied: torch.Tensor,
    guesses: torch.Tensor,
) -> None:
    """guesses[b, r - chunk_start] = threshold, centre, last for `rows`, whose positions are all below `block`.

    `last`: of the keys whose score is the threshold those up to this one; infinite if it is all of them.

    Args:
        sample_scores: fp32 [B, R, S], the chunk of rows from `chunk_start` on
        sampled: int32 [S], positions of the sampled keys, ascending: one of each `key_stride` neighbours
        query_start: position of row 0
        document_starts: int32 [B, L], of all rows
        tied: int32 [B, ceil(R / tile_rows)] of zeros; 1 for a tile of rows with one that has a finite `last`
        guesses: fp32 [B, R, 3]
    """
    k_base, k_min, k_max, mode = budget_rule
    samples = max(block // key_stride, 16)
    _guess_kernel[(len(rows), sample_scores.shape[0])](
        sample_scores,
        sampled,
        document_starts,
        variance_ema,
        tied,
        guesses,
        query_start,
        rows.start,
        chunk_start,
        sample_scores.shape[1],
        sampled.shape[0],
        0 if document_starts is None else document_starts.shape[1],
        sample_scores.stride(0),
        sample_scores.stride(1),
        k_base,
        k_min,
        k_max,
        MODE=mode,
        TILE_ROWS=tile_rows,
        KEY_STRIDE=key_stride,
        FEWEST=FEWEST_SAMPLES,
        SAMPLES=samples,
        num_warps=min(max(samples // 1024, 1), 16),
    )


@triton.jit(
    do_not_specialize=[
        "query_start",
        "first_row",
        "chunk_start",
        "chunk_rows",
        "num_samples",
        "num_rows",
        "k_base",
        "k_min",
        "k_max",
    ]
)
def _guess_kernel(
    scores_ptr,
    sampled_ptr,
    starts_ptr,
    ema_ptr,
    tied_ptr,
    guesses_ptr,
    query_start,
    first_row,
    chunk_start,
    chunk_rows,
    num_samples,
    num_rows,
    stride_b,
    stride_r,
    k_base,
    k_min,
    k_max,
    MODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    FEWEST: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    position = query_start + row
    batch = tl.program_id(1).to(tl.int64)
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch * num_rows + row)
    num_visible = tl.maximum(position - start + 1, 0)

    columns = tl.arange(0, SAMPLES)
    in_row = (columns >= start // KEY_STRIDE) & (columns <= position // KEY_STRIDE) & (columns < num_samples)
    sampled = tl.load(sampled_ptr + columns, mask=in_row, other=-1)
    visible = in_row & (sampled >= start) & (sampled <= position)
    row_ptr = scores_ptr + batch * stride_b + (row - chunk_start).to(tl.int64) * stride_r
    x = tl.load(row_ptr + columns, mask=visible, other=0.0)
    found = tl.sum(visible.to(tl.int32))

    # About one of the scores first: equal scores then have the centre for their value, to the bit.
    origin = tl.where(found > 0, tl.max(tl.where(visible, x, float("-inf"))), 0.0)
    divisor = tl.maximum(found, 1).to(tl.float32)
    distance = tl.where(visible, x - origin, 0.0)
    mean = tl.sum(distance) / divisor
    square = tl.where(visible, (distance - mean) * (distance - mean), 0.0)
    variance = tl.sum(square) / divisor
    deviation = tl.sqrt(variance)
    guess_ptr = guesses_ptr + (batch * chunk_rows + row - chunk_start) * 3
    tl.store(guess_ptr + 1, origin + mean)

    # The row's variance is the sample's to a relative error of sqrt((kurtosis - 1) / samples). Three of these,
    # on the side where the budget is larger.
    kurtosis = tl.sum(square * square) / divisor / tl.maximum(variance * variance, 1e-30)
    error = 3 * tl.sqrt(tl.maximum(kurtosis - 1, 0.0) / divisor)
    if MODE == "inverse":
        variance = variance * tl.maximum(1 - error, 0.125)
    if MODE == "direct":
        variance = variance * (1 + error)
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, MODE)
    # Of the row's k best keys the sample holds about `expected`, with that variance; more than `wanted` of
    # them once in 1e6 rows.
    expected = k.to(tl.float32) * divisor / tl.maximum(num_visible, 1).to(tl.float32)
    wanted = (expected + 5 * tl.sqrt(expected) + 3).to(tl.int32)
    threshold = float("-inf") + origin * 0
    last = float("inf") + origin * 0
    if (found >= FEWEST) & (wanted < found):
        most = wanted + (wanted.to(tl.float32) * SLACK).to(tl.int32)
        threshold, reached = _quantile(x, visible, found, wanted, most, origin + mean, deviation)
        if reached > most:
            equal = (visible & (x == threshold)).to(tl.int32)
            missing = wanted - (reached - tl.sum(equal))
            first = (equal == 1) & (tl.cumsum(equal, 0) == missing)
            last = tl.sum(tl.where(first, sampled, 0)).to(tl.float32)  # exact up to 2^24
    tl.store(guess_ptr, threshold)
    tl.store(guess_ptr + 2, last)
    tile = batch * tl.cdiv(chunk_rows, TILE_ROWS) + (row - chunk_start) // TILE_ROWS
    tl.store(tied_ptr + tile, 1, mask=last < float("inf"))


@triton.jit
def _quantile(x, visible, found, wanted, most, mean, deviation):
    """A score that at least `wanted` of the visible ones reach, and how many do: at most `most`, unless so many
    are equal."""
    low = tl.min(tl.where(visible, x, float("inf")))
    high = tl.max(tl.where(visible, x, float("-inf")))
    count = found
    count_high = found * 0
    # First where it would be if the scores were normal (Abramowitz and Stegun, 26.2.23).
    t = tl.sqrt(-2 * tl.log(tl.minimum(wanted.to(tl.float32) / found.to(tl.float32), 0.5)))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    middle = mean + z * deviation
    target = wanted.to(tl.float32) * (1 + 0.5 * SLACK)
    rounds = found * 0
    while (count > most) & (rounds < _MOST_ROUNDS):
        middle = tl.minimum(tl.maximum(middle, low), high)
        reached = tl.sum((visible & (x >= middle)).to(tl.int32))
        if reached >= wanted:
            low = middle
            count = reached
        else:
            high = middle
            count_high = reached
        share = (count.to(tl.float32) - target) / tl.maximum(count - count_high, 1).to(tl.float32)
        share = tl.where(rounds % 3 == 2, 0.5, tl.minimum(tl.maximum(share, 0.0625), 0.9375))
        middle = low + (high - low) * share
        rounds += 1
    # Scores that lie close together: by halves of the floating-point numbers in between.
    low_bits, high_bits = order_key(low).to(tl.int64), order_key(high).to(tl.int64)
    high_bits += (count_high == 0).to(tl.int64)  # nothing is above the maximum, but it may be what is sought
    while (count > most) & (low_bits + 1 < high_bits):
        middle_bits = low_bits + (high_bits - low_bits) // 2
        middle = score_of_key(middle_bits.to(tl.int32))
        reached = tl.sum((visible & (x >= middle)).to(tl.int32))
        if reached >= wanted:
            low = middle
            low_bits = middle_bits
            count = reached
        else:
            high_bits = middle_bits
    return low, count
