"""Defines device functions that the selection kernels share. They order scores, search for the k-th key, and compute
budgets."""

import triton
import triton.language as tl

KEYS_PER_WARP = 2048
"""Each thread holds 64 keys, in half of its registers. In each round of a search, every warp repeats the scalar work.
With fewer keys per warp, this work costs as much as the counting (docs/kernels.md, Tuning)."""

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)


def search_options(num_keys: int, min_warps: int = 4) -> dict[str, int]:
    """Return launch options of a kernel that keeps `num_keys` int32 keys in registers."""
    warps = min(max(num_keys // KEYS_PER_WARP, min_warps), 32)
    # A multiprocessor has 64K registers. The limit keeps at least 16 warps on it.
    return {"num_warps": warps, "maxnreg": min(128, 65536 // (32 * warps))}


@triton.jit
def order_key(x):
    """Map fp32 to int32 such that the order stays the same. Both -0.0 and 0.0 map to the same value. No input maps to
    INT_MAX, because `find_cut` needs a value above all keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.minimum(bits ^ ((bits >> 31) & 0x7FFFFFFF), INT_MAX - 1)


@triton.jit
def score_of_key(key):
    """Invert `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def normal_guess(mean, variance, num_valid, k):
    """Estimate the `order_key` of the score that k of num_valid scores reach, if the scores have a normal distribution.

    The estimate uses the quantile function of Tukey's lambda distribution with the constants 0.14 and 4.91. For shares
    from 0.5% to 99.5%, it differs from the normal quantiles by at most 0.01 standard deviations. The better the
    estimate, the fewer rounds `find_cut` needs.
    """
    share = tl.minimum(k.to(tl.float32) / tl.maximum(num_valid, 1).to(tl.float32), 1.0)
    deviations = 4.91 * (_power_014(1.0 - share) - _power_014(share))
    return order_key(mean + deviations * tl.sqrt(variance))


@triton.jit
def _power_014(x):
    return tl.exp2(0.14 * tl.log2(tl.maximum(x, 1e-6)))


@triton.jit
def find_cut(keys, indices, num_valid, k, guess=None, lowest=None):
    """Find the cut (threshold, last) such that exactly min(k, num_valid) entries are above it.

    An entry is above the cut if key > threshold, or if key == threshold and index <= last. The entries above the cut
    have the k largest keys. Of entries with equal keys, the entry with the lower index comes first. All entries stay in
    registers.

    The search keeps a lower and an upper bound of the threshold. Each round tries a value between the bounds, and
    counts the entries at or above this value. The value then becomes the lower bound if at least k entries reach it,
    and the upper bound otherwise. The search ends when exactly k entries reach the lower bound, or when no int32 is
    left between the bounds.

    The search interpolates the next value from the counts at the two bounds. The value should replace the bound whose
    count is further from k. To replace the lower bound, the search aims at a count slightly above k; to replace the
    upper bound, slightly below. If interpolation does not halve the entries between the bounds, the next value is the
    bounds' midpoint.

    Args:
        keys: int32 of any shape, INT_MIN where there is no entry
        indices: int32 of the same shape, distinct and not negative
        num_valid: int32 scalar, the number of entries
        k: int32 scalar
        guess: int32 scalar, the first threshold
        lowest: int32 scalar, the smallest key of an entry, if known

    Returns:
        threshold, last: int32 scalars; no INT_MIN key is above this cut
    """
    low = lowest
    if lowest is None:
        low = tl.min(tl.where(keys == INT_MIN, INT_MAX, keys))
    high = tl.max(keys) + 1
    count = num_valid
    count_high = num_valid * 0
    interpolate = num_valid > 0
    first = num_valid >= 0
    # Invariant: count >= k entries are >= low; count_high < k entries are >= high.
    while (count > k) & (high != low + 1):
        # The span is unsigned, because the distance of two int32 keys may exceed int32.
        span = (high - low).to(tl.uint32)
        between = (count - count_high).to(tl.float32)
        beyond = 0.25 * tl.sqrt(between)
        target = tl.where(count - k > k - count_high, k + beyond, k - beyond)
        target = tl.minimum(tl.maximum(target, count_high + 0.25), count - 0.25)
        step = (span.to(tl.float32) * ((count - target) / between)).to(tl.uint32)
        step = tl.minimum(tl.maximum(step, 1), span - 1)
        middle = low + tl.where(interpolate, step, span >> 1).to(tl.int32)
        if guess is not None:
            middle = tl.where(first, tl.minimum(tl.maximum(guess, low + 1), high - 1), middle)
            first = num_valid < 0
        found = tl.sum((keys >= middle).to(tl.int32))
        if found >= k:
            low = middle
            count = found
        else:
            high = middle
            count_high = found
        # Each two successive rounds halve the entries or the keys in between, so there are at most 2 * 32 + 17 rounds.
        interpolate = (interpolate == 0) | ((count - count_high) * 2 <= between)

    threshold = low
    last = count * 0 + INT_MAX
    if count > k:
        # More entries equal the threshold than fit. The same search runs over their indices.
        wanted = k - count_high
        below = count * 0 - 1
        last = tl.max(tl.where(keys == threshold, indices, 0))
        # Invariant: fewer than `wanted` of these entries have index <= below; at least `wanted` have index <= last.
        while last - below > 1:
            centre = below + ((last - below) >> 1)
            if tl.sum(((keys == threshold) & (indices <= centre)).to(tl.int32)) >= wanted:
                last = centre
            else:
                below = centre
    return threshold, last


@triton.jit
def above_cut(keys, indices, threshold, last):
    return (keys > threshold) | ((keys == threshold) & (indices <= last))


@triton.jit
def row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, dense_below, MODE: tl.constexpr):
    """Compute k_t as in `selection/budget.py`, with the quotient in fp64. Return an int32 scalar."""
    base = k_base.to(tl.float64)
    raw = base
    if MODE != "off":
        ema = tl.load(ema_ptr).to(tl.float64)
        var = variance.to(tl.float64)
        raw = base * ema / var if MODE == "inverse" else base * var / ema
        raw = tl.where((ema == 0.0) | (raw != raw), base, raw)
    # The value is clamped before the cast. The limits are positive whole numbers, so the cast is the floor.
    raw = tl.minimum(tl.maximum(raw, k_min.to(tl.float64)), k_max.to(tl.float64))
    k = tl.minimum(raw.to(tl.int32), num_visible)
    return tl.where(num_visible < dense_below, num_visible, k)


@triton.jit
def count_bits(words, ASM: tl.constexpr):
    """Count the set bits of each int32. ASM uses one instruction, which the interpreter does not support."""
    if ASM:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def window_words(word_index, first, row):
    """Return int32 words in which exactly the bits of the keys first .. row are set."""
    low = tl.minimum(tl.maximum(first - word_index * 32, 0), 32).to(tl.int64)
    high = tl.minimum(tl.maximum(row + 1 - word_index * 32, 0), 32).to(tl.int64)
    one = low * 0 + 1
    return tl.where(high > low, (one << high) - (one << low), 0).to(tl.int32)
