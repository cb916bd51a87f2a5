"""Guesses a threshold for each row from a sample of its keys. Slightly more than k_t keys (the row's budget) should
reach it.

If the sigmoids of the indexer saturate, many scores may equal the threshold. The guess then also names a cut-off key.
Of the keys at the threshold, only those up to the cut-off key pass. The selection, too, prefers the lower index among
equal scores. If at least k_t keys pass, the k_t best keys are therefore among them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gsa_kernels import limits
from gsa_kernels.indexer.triton_scores import score_tiles
from gsa_kernels.selection.criteria import Criteria
from gsa_kernels.selection.triton_search import order_key, row_budget, score_of_key

FEWEST_SAMPLES = 64
"""Rows with fewer samples have the threshold -inf. All their causal keys become candidates."""

SLACK = tl.constexpr(limits.CANDIDATE_SLACK)
_MOST_ROUNDS = tl.constexpr(12)


@dataclass(frozen=True)
class Guesses:
    """Holds the thresholds of a chunk of rows, from `guess_thresholds`."""

    of_rows: torch.Tensor
    """fp32 [B, R, 3]: threshold, centre (the mean of the sample) and last. Keys whose score equals the threshold are
    candidates up to the key `last`, which is infinite if all of them are."""

    tied: torch.Tensor
    """int32 [B, tiles of rows]: 1 for tiles of the score kernel in which some row has a finite `last`, else 0."""


def guess_thresholds(
    criteria: Criteria,
    sample_scores: torch.Tensor,
    sampled: torch.Tensor,
    chunk_start: int,
    rows: range,
    block: int,
    guesses: Guesses,
) -> None:
    """Fill in the guesses of `rows`, whose positions are all below `block`.

    Args:
        sample_scores: fp32 [B, R, S], the chunk of rows from `chunk_start` on
        sampled: int32 [S], ascending positions of the sampled keys: one of each CANDIDATE_SAMPLE_STRIDE neighbours
    """
    inputs, rule = criteria.inputs, criteria.rule
    samples = max(block // limits.CANDIDATE_SAMPLE_STRIDE, 16)
    _guess_kernel[(len(rows), inputs.batch)](
        sample_scores,
        sampled,
        inputs.document_starts,
        criteria.variance_ema,
        guesses.tied,
        guesses.of_rows,
        inputs.query_start,
        rows.start,
        chunk_start,
        sample_scores.shape[1],
        sampled.shape[0],
        0 if inputs.document_starts is None else inputs.num_rows,
        *sample_scores.stride()[:2],
        *rule.numbers,
        MODE=rule.adaptive_k,
        TILE_ROWS=score_tiles(inputs).rows,
        KEY_STRIDE=limits.CANDIDATE_SAMPLE_STRIDE,
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
        "dense_below",
    ]
)
def _guess_kernel(
    scores_ptr, sampled_ptr, starts_ptr, ema_ptr, tied_ptr, guesses_ptr, query_start, first_row, chunk_start,
    chunk_rows, num_samples, num_rows, stride_b, stride_r, k_base, k_min, k_max, dense_below,
    MODE: tl.constexpr, TILE_ROWS: tl.constexpr, KEY_STRIDE: tl.constexpr, FEWEST: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
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

    # The sums are relative to one of the scores, so that the centre of equal scores is their value, to the bit.
    origin = tl.where(found > 0, tl.max(tl.where(visible, x, float("-inf"))), 0.0)
    divisor = tl.maximum(found, 1).to(tl.float32)
    distance = tl.where(visible, x - origin, 0.0)
    mean = tl.sum(distance) / divisor
    square = tl.where(visible, (distance - mean) * (distance - mean), 0.0)
    variance = tl.sum(square) / divisor
    deviation = tl.sqrt(variance)
    guess_ptr = guesses_ptr + (batch * chunk_rows + row - chunk_start) * 3
    tl.store(guess_ptr + 1, origin + mean)

    # The sample's variance estimates the row's variance with a relative error of sqrt((kurtosis - 1) / samples). The
    # guess allows three such errors towards the larger budget.
    kurtosis = tl.sum(square * square) / divisor / tl.maximum(variance * variance, 1e-30)
    error = 3 * tl.sqrt(tl.maximum(kurtosis - 1, 0.0) / divisor)
    if MODE == "inverse":
        variance = variance * tl.maximum(1 - error, 0.125)
    if MODE == "direct":
        variance = variance * (1 + error)
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, dense_below, MODE)
    # With this variance, the sample holds about `expected` of the k best keys, and more than `wanted` once in 1e6 rows.
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
    """Return a score and the number of sampled causal scores that reach it. This number is at least `wanted`, and at
    most `most` unless some scores are equal."""
    low = tl.min(tl.where(visible, x, float("inf")))
    high = tl.max(tl.where(visible, x, float("-inf")))
    count = found
    count_high = found * 0
    # The first guess assumes a normal distribution of the scores (Abramowitz and Stegun, 26.2.23).
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
    # If scores lie close together, the search bisects the floating-point numbers between them.
    low_bits, high_bits = order_key(low).to(tl.int64), order_key(high).to(tl.int64)
    high_bits += (count_high == 0).to(tl.int64)  # no score is above the maximum, but the search may end there
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
