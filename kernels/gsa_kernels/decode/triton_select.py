"""Computes the budget and the exact top-k of one row of scores per sequence, written as ascending indices.

`score_keys` has counted the scores above a floor in a histogram. Each program has one span of a sequence's keys:
1. In the first kernel, a program finds the bin that contains the k-th highest score. It counts its span's keys in
   higher bins, and appends its span's keys in this bin to a list of the whole sequence.
2. In the second kernel, a program finds the exact k-th highest score in the list, and writes the indices of its span's
   selected keys. The counts and the list give the number of selected keys in earlier spans, and thus where to write.
No program waits for another. The order of the list depends on timing, but the result does not.

Each kernel lets the next kernel start when about half of its own work is done (programmatic dependent launch).
Exception: a kernel that `LayerCache.beside` launches between this module's two kernels may start as soon as the kernel
of `score_keys` has ended.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.decode.state import BINS, BINS_PER_OCTAVE, CHUNK, SPAN, DecodeWorkspace, LayerCache
from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.selection.triton_search import INT_MAX, INT_MIN, above_cut, order_key, row_budget
from gsa_kernels.types import BudgetRule

# Bins divide octaves evenly, from 2^-20 to 2^12. Scores of sigmoids are positive. Other scores can be negative, and
# negative scores take the first half of the bins. Bins at the end of a range also hold all values beyond.
_BIN_SHIFT = tl.constexpr(23 - (BINS_PER_OCTAVE.bit_length() - 1))
_FIRST_BIN = tl.constexpr((127 - 20) * BINS_PER_OCTAVE)
_BINS = tl.constexpr(BINS)
_WARPS = 4
_FEW_PROGRAMS = 128
"""Approximate number of multiprocessors of an H200. If fewer programs would run, each takes half as many keys, which is
faster."""


def _span(batch: int, max_length: int) -> int:
    return SPAN // 2 if batch * ceil_div(max_length, SPAN) <= _FEW_PROGRAMS else SPAN


def select_indices(
    cache: LayerCache,
    workspace: DecodeWorkspace,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    chained: bool,
    signed: bool,
) -> None:
    """Fill the cache's selection from the results of `score_keys` in the workspace. Clear the histogram for the next
    call.

    Args:
        rule: its k_min and k_max are at most L_max
        chained: start before `score_keys` has ended, and wait for it on the device
        signed: whether scores can be negative
    """
    lengths, selection = cache.lengths, cache.selection
    columns = workspace.scores.shape[1]
    max_length = cache.max_length
    span = _span(lengths.shape[0], max_length)
    grid = (ceil_div(max_length, span), lengths.shape[0])
    options = {"num_warps": _WARPS, **({"launch_pdl": True} if chained else {})}
    _find_bin_kernel[grid](
        workspace.scores,
        workspace.histogram,
        *workspace.chunk_moments,
        lengths,
        variance_ema,
        *workspace.borderline,
        workspace.borderline_counts,
        workspace.span_counts,
        workspace.plan,
        selection.counts,
        selection.variance,
        columns,
        max_length,
        *rule.numbers,
        MODE=rule.adaptive_k,
        CHUNK=CHUNK,
        CHUNKS=next_power_of_2(ceil_div(max_length, CHUNK)),
        SPAN=span,
        BINS=BINS,
        BINS_PER_OCTAVE=BINS_PER_OCTAVE,
        SIGNED=signed,
        CHAINED=chained,
        RELEASES_AT_ONCE=cache.beside is not None,
        **options,
    )
    if cache.beside is not None:
        cache.beside()
    _write_indices_kernel[grid](
        workspace.scores,
        workspace.histogram,
        lengths,
        *workspace.borderline,
        workspace.borderline_counts,
        workspace.span_counts,
        workspace.plan,
        selection.indices,
        columns,
        selection.indices.shape[1],
        max_length,
        SPAN=span,
        SPANS=next_power_of_2(ceil_div(max_length, span)),
        BINS=BINS,
        SIGNED=signed,
        CHAINED=chained,
        **options,
    )


@triton.jit
def score_bin(key, SIGNED: tl.constexpr):
    """Return the bin of an `order_key`; a higher bin holds higher scores."""
    if SIGNED:
        half: tl.constexpr = _BINS // 2
        size = tl.where(key < 0, ~key, key)
        step = tl.minimum(tl.maximum((size >> (_BIN_SHIFT + 1)) - _FIRST_BIN // 2, 0), half - 1)
        bin = tl.where(key < 0, half - 1 - step, half + step)
    else:
        bin = tl.minimum(tl.maximum((key >> _BIN_SHIFT) - _FIRST_BIN, 0), _BINS - 1)
    return bin


@triton.jit
def bin_start(bin, SIGNED: tl.constexpr):
    """Return the lowest `order_key` of a bin, or INT_MAX for the number of bins."""
    if SIGNED:
        step = bin - _BINS // 2
        size = (tl.abs(step) + _FIRST_BIN // 2) << (_BIN_SHIFT + 1)
        start = tl.where(step == 0, 0, tl.where(step < 0, -size, size))
    else:
        start = (bin + _FIRST_BIN) << _BIN_SHIFT
    return tl.where(bin == 0, INT_MIN, tl.where(bin == _BINS, INT_MAX, start))


@triton.jit
def bin_above(key, floor, SIGNED: tl.constexpr):
    """Return the bin of an `order_key`, with all bins up to the floor merged into bin 0."""
    bin = score_bin(key, SIGNED)
    return tl.where(bin > floor, bin, 0)


@triton.jit
def bin_slot(bin, BINS: tl.constexpr, BINS_PER_OCTAVE: tl.constexpr):
    """Return the histogram index of a bin's count. Neighbouring bins are in different cache lines, so that programs can
    increment them simultaneously."""
    return (bin % BINS_PER_OCTAVE) * (BINS // BINS_PER_OCTAVE) + bin // BINS_PER_OCTAVE


@triton.jit(do_not_specialize=["max_length", "k_base", "k_min", "k_max", "dense_below"])
def _find_bin_kernel(
    scores_ptr,
    histogram_ptr,
    means_ptr,
    squares_ptr,
    lengths_ptr,
    ema_ptr,
    list_keys_ptr,
    list_positions_ptr,
    list_counts_ptr,
    span_counts_ptr,
    plan_ptr,
    counts_ptr,
    variance_ptr,
    columns,
    max_length,
    k_base,
    k_min,
    k_max,
    dense_below,
    MODE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_OCTAVE: tl.constexpr,
    SIGNED: tl.constexpr,
    CHAINED: tl.constexpr,
    RELEASES_AT_ONCE: tl.constexpr,
):
    """Each program finds the budget k and the bin that contains the k-th highest score. In its span of keys,
    it counts the keys above this bin, and appends the keys in this bin to the list."""
    span = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), max_length)
    if CHAINED:
        gdc_wait()
        if RELEASES_AT_ONCE:
            gdc_launch_dependents()
    first = span * SPAN
    if (length <= 0) & (span == 0):
        tl.store(counts_ptr + batch, 0)
        tl.store(variance_ptr + batch, 0.0)
    if first >= length:
        return

    # All loads come before the first use, so that the program waits for memory once.
    positions = first + tl.arange(0, SPAN)
    valid = positions < length
    scores = tl.load(scores_ptr + batch * columns + positions, mask=valid, other=0.0)
    octaves = tl.arange(0, BINS // BINS_PER_OCTAVE)
    within = tl.arange(0, BINS_PER_OCTAVE)
    histogram_ptr += batch * BINS
    in_bins = tl.load(histogram_ptr + within[:, None] * (BINS // BINS_PER_OCTAVE) + octaves[None, :])
    chunks = tl.arange(0, CHUNKS)
    in_row = chunks < tl.cdiv(length, CHUNK)
    first_chunk = batch * (columns // CHUNK)
    means = tl.load(means_ptr + first_chunk + chunks, mask=in_row, other=0.0)
    squares = tl.load(squares_ptr + first_chunk + chunks, mask=in_row, other=0.0)
    origin = tl.load(means_ptr + first_chunk)
    floor = tl.load(plan_ptr + batch * 3)

    # The row's moments follow from the moments of its chunks, relative to the first chunk's mean.
    sizes = tl.where(in_row, tl.minimum(length - chunks * CHUNK, CHUNK), 0).to(tl.float32)
    distance = tl.where(in_row, means - origin, 0.0)
    mean = tl.sum(sizes * distance) / length.to(tl.float32)
    squares += sizes * (distance - mean) * (distance - mean)
    variance = tl.sum(squares) / length.to(tl.float32)
    k = row_budget(variance, ema_ptr, length, k_base, k_min, k_max, dense_below, MODE)

    # Find the last bin such that this bin and all higher bins hold at least k scores. First find its octave. Bin 0 is
    # not counted, because it holds all other scores.
    per_octave = tl.sum(in_bins, axis=0)
    from_octave = tl.sum(per_octave) - tl.cumsum(per_octave, axis=0) + per_octave
    octave = tl.maximum(tl.sum((from_octave >= k).to(tl.int32)) - 1, 0)
    after_octave = tl.sum(tl.where(octaves > octave, per_octave, 0))
    of_octave = tl.load(histogram_ptr + within * (BINS // BINS_PER_OCTAVE) + octave)
    after_bin = after_octave + tl.sum(of_octave) - tl.cumsum(of_octave, axis=0)
    in_octave = tl.maximum(tl.sum((after_bin + of_octave >= k).to(tl.int32)) - 1, 0)
    threshold_bin = octave * BINS_PER_OCTAVE + in_octave
    wanted = k - tl.sum(tl.where(within == in_octave, after_bin, 0))

    if CHAINED and not RELEASES_AT_ONCE:
        gdc_launch_dependents()
    keys = order_key(scores)
    bin = bin_above(keys, floor, SIGNED)
    tl.store(
        span_counts_ptr + batch * (columns // SPAN) + span,
        tl.sum((valid & (bin > threshold_bin)).to(tl.int32)),
    )
    borderline = valid & (bin == threshold_bin)
    found = tl.sum(borderline.to(tl.int32))
    if found > 0:
        place = tl.atomic_add(list_counts_ptr + batch, found)
        place += tl.cumsum(borderline.to(tl.int32), axis=0) - 1
        tl.store(list_keys_ptr + batch * columns + place, keys, mask=borderline)
        tl.store(list_positions_ptr + batch * columns + place, positions, mask=borderline)
    if span == 0:
        tl.store(plan_ptr + batch * 3 + 1, threshold_bin)
        tl.store(plan_ptr + batch * 3 + 2, wanted)
        tl.store(counts_ptr + batch, k)
        tl.store(variance_ptr + batch, variance)


@triton.jit(do_not_specialize=["max_length"])
def _write_indices_kernel(
    scores_ptr,
    histogram_ptr,
    lengths_ptr,
    list_keys_ptr,
    list_positions_ptr,
    list_counts_ptr,
    span_counts_ptr,
    plan_ptr,
    indices_ptr,
    columns,
    k_cap,
    max_length,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BINS: tl.constexpr,
    SIGNED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program finds the exact cut in the list, and writes the selected positions of one span."""
    span = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), max_length)
    if CHAINED:
        gdc_wait()
    first = span * SPAN
    if first >= length:
        return
    positions = first + tl.arange(0, SPAN)
    valid = positions < length
    scores = tl.load(scores_ptr + batch * columns + positions, mask=valid, other=0.0)
    spans = tl.arange(0, SPANS)
    span_counts_ptr += batch * (columns // SPAN)
    before = tl.load(span_counts_ptr + spans, mask=spans < span, other=0)
    floor = tl.load(plan_ptr + batch * 3)
    threshold_bin = tl.load(plan_ptr + batch * 3 + 1)
    wanted = tl.load(plan_ptr + batch * 3 + 2)
    size = tl.load(list_counts_ptr + batch)
    list_keys_ptr += batch * columns
    list_positions_ptr += batch * columns
    slots = tl.arange(0, SPAN)
    # The first SPAN entries, usually the whole list, stay in registers.
    list_keys = tl.load(list_keys_ptr + slots, mask=slots < size, other=INT_MIN)
    list_positions = tl.load(list_positions_ptr + slots, mask=slots < size, other=INT_MAX)

    cut, last = _find_cut_in_list(
        list_keys,
        list_positions,
        list_keys_ptr,
        list_positions_ptr,
        size,
        wanted,
        threshold_bin,
        floor,
        length,
        SPAN,
        SIGNED,
    )
    if CHAINED:
        gdc_launch_dependents()
    earlier = above_cut(list_keys, list_positions, cut, last) & (list_positions < first)
    offset = tl.sum(before) + tl.sum(earlier.to(tl.int32))
    for start in range(SPAN, size, SPAN):
        in_list = start + slots < size
        more = tl.load(list_keys_ptr + start + slots, mask=in_list, other=INT_MIN)
        where = tl.load(list_positions_ptr + start + slots, mask=in_list, other=INT_MAX)
        offset += tl.sum((above_cut(more, where, cut, last) & (where < first)).to(tl.int32))

    keys = order_key(scores)
    bin = bin_above(keys, floor, SIGNED)
    borderline = (bin == threshold_bin) & above_cut(keys, positions, cut, last)
    selected = valid & ((bin > threshold_bin) | borderline)
    place = offset + tl.cumsum(selected.to(tl.int32), axis=0) - 1
    tl.store(indices_ptr + batch * k_cap + place, positions, mask=selected)
    if span == 0:
        tl.store(histogram_ptr + batch * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))


@triton.jit
def _find_cut_in_list(
    keys,
    positions,
    keys_ptr,
    positions_ptr,
    size,
    wanted,
    threshold_bin,
    floor,
    length,
    TILE: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Run `find_cut` (triton_search.py) for the `wanted` best keys of a list. All its keys are in `threshold_bin`.

    Args:
        keys, positions: int32 [TILE], the start of the list; INT_MIN and INT_MAX after its end
        keys_ptr, positions_ptr: pointers to the whole list, `size` entries in any order
    """
    low = bin_start(threshold_bin, SIGNED)
    high = bin_start(tl.maximum(threshold_bin, floor) + 1, SIGNED)  # bin 0 reaches up to the floor
    slots = tl.arange(0, TILE)
    count = size
    count_high = size * 0
    interpolate = size > 0
    # Invariant: count >= wanted entries are >= low; count_high < wanted entries are >= high.
    while (count > wanted) & (high != low + 1):
        # The distance is unsigned, because the distance of two int32 keys may exceed int32.
        distance = (high - low).to(tl.uint32)
        between = (count - count_high).to(tl.float32)
        # The target is slightly beyond `wanted`, so that the end whose count is further from `wanted` moves.
        beyond = 0.25 * tl.sqrt(between)
        target = tl.where(count - wanted > wanted - count_high, wanted + beyond, wanted - beyond)
        target = tl.minimum(tl.maximum(target, count_high + 0.25), count - 0.25)
        step = (distance.to(tl.float32) * ((count - target) / between)).to(tl.uint32)
        step = tl.minimum(tl.maximum(step, 1), distance - 1)
        middle = low + tl.where(interpolate, step, distance >> 1).to(tl.int32)
        found = tl.sum((keys >= middle).to(tl.int32))
        for start in range(TILE, size, TILE):
            more = tl.load(keys_ptr + start + slots, mask=start + slots < size, other=INT_MIN)
            found += tl.sum((more >= middle).to(tl.int32))
        if found >= wanted:
            low = middle
            count = found
        else:
            high = middle
            count_high = found
        # Each two successive rounds halve the entries or the keys in between, so there are at most 2 * 32 + 17 rounds.
        interpolate = (interpolate == 0) | ((count - count_high) * 2 <= between)

    last = count * 0 + INT_MAX
    if count > wanted:
        # More entries equal the cut than fit. The same search finds the lower positions.
        of_equal = wanted - count_high
        below = count * 0 - 1
        last = length - 1
        # Invariant: fewer than `of_equal` of these have positions <= below; at least `of_equal` have positions <= last.
        while last - below > 1:
            centre = below + ((last - below) >> 1)
            found = tl.sum(((keys == low) & (positions <= centre)).to(tl.int32))
            for start in range(TILE, size, TILE):
                in_list = start + slots < size
                more = tl.load(keys_ptr + start + slots, mask=in_list, other=INT_MIN)
                where = tl.load(positions_ptr + start + slots, mask=in_list, other=INT_MAX)
                found += tl.sum(((more == low) & (where <= centre)).to(tl.int32))
            if found >= of_equal:
                last = centre
            else:
                below = centre
    return low, last
