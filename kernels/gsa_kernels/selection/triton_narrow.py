"""From the candidates of each row to its exact top-k.

Two kernels, a program per row in both. The first reads only the candidates' bits and the sums: it knows the
row's variance and k_t, checks that at least k_t keys are candidates, and lists them. The second reads the
candidates' scores into registers, finds the k_t-th and clears the bits of the others.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.selection.triton_search import (
    INT_MIN,
    above_cut,
    count_bits,
    find_cut,
    order_key,
    row_budget,
    window_words,
)

MAX_POSITION = tl.constexpr(2**22)
"""A candidate is its key plus this times its place among the scores of its span: rows have fewer keys, and a
span at most 512."""

_SMALLEST_SIZE = 128
_SIZES = 3
_KEYS_PER_WARP = 512
"""16 in each thread, beside their addresses: with 32 the kernel takes over 200 registers, or spills."""


def list_candidates(
    words: torch.Tensor,
    words_start: int,
    guesses: torch.Tensor,
    sums: torch.Tensor,
    span: int,
    rows: range,
    chunk_start: int,
    block: int,
    candidates: torch.Tensor,
    counts: torch.Tensor,
    wanted: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor],
    document_starts: torch.Tensor | None,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
) -> None:
    """Budget, variance and the candidates of `rows`, all of them below `block`.

    Args:
        words, guesses, sums: as `write_candidates` leaves them; the words of rows that failed become 0
        span: columns of which `write_candidates` keeps the scores together
        candidates: int32 [B, R, C] of the chunk of rows from `chunk_start` on, ascending by key: see
            MAX_POSITION
        counts: int32 [B, R], 0 for a row that failed
        wanted: int32 [B, R], 1 for a row that failed: fewer than k_t candidates or more than C
        outputs: budget int32 [B, L] and variance fp32 [B, L]; left to `narrow_candidates` for a row whose
            threshold is -inf, since all its scores are candidates
    """
    budget, variance = outputs
    k_base, k_min, k_max, mode = budget_rule
    _list_candidates_kernel[(len(rows), budget.shape[0])](
        words,
        document_starts,
        variance_ema,
        guesses,
        sums,
        candidates,
        counts,
        wanted,
        budget,
        variance,
        rows.start,
        chunk_start,
        words_start,
        budget.shape[1],
        counts.shape[1],
        words.shape[1],
        words.shape[2],
        sums.shape[2],
        candidates.shape[2],
        k_base,
        k_min,
        k_max,
        MODE=mode,
        ASM=words.is_cuda,
        SPAN=span,
        SPANS=max(block // span, 1),
        num_warps=min(max(block // 8192, 1), 16),  # 8 words in each thread: 16 take 167 registers
    )


def narrow_candidates(
    scores: torch.Tensor,
    span: int,
    candidates: torch.Tensor,
    counts: torch.Tensor,
    guesses: torch.Tensor,
    rows: range,
    words: torch.Tensor,
    words_start: int,
    outputs: tuple[torch.Tensor, torch.Tensor],
    document_starts: torch.Tensor | None,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    local_window: int,
) -> None:
    """Turn the bits of candidates into the selection of `rows`, the rows of the chunk.

    Args:
        scores: fp32 [B, R, columns] as `write_candidates` leaves it, with its `span`
    """
    budget, variance = outputs
    k_base, k_min, k_max, mode = budget_rule
    # The number of candidates is known on the device only: all sizes are launched, and each row belongs to one.
    most = candidates.shape[2]
    sizes = [most >> shift for shift in reversed(range(_SIZES)) if most >> shift >= _SMALLEST_SIZE] or [most]
    for above, size in zip([0, *sizes[:-1]], sizes, strict=True):
        _narrow_kernel[(len(rows), budget.shape[0])](
            scores,
            candidates,
            counts,
            guesses,
            document_starts,
            variance_ema,
            words,
            budget,
            variance,
            rows.start,
            words_start,
            budget.shape[1],
            counts.shape[1],
            words.shape[1],
            words.shape[2],
            scores.stride(0),
            scores.stride(1),
            most,
            above,
            k_base,
            k_min,
            k_max,
            local_window,
            MODE=mode,
            SPAN=span,
            SIZE=size,
            num_warps=max(size // _KEYS_PER_WARP, 4),
        )


@triton.jit(
    do_not_specialize=[
        "first_row",
        "chunk_start",
        "words_start",
        "length",
        "chunk_rows",
        "words_rows",
        "words_per_row",
        "sums_per_row",
        "k_base",
        "k_min",
        "k_max",
    ]
)
def _list_candidates_kernel(
    words_ptr,
    starts_ptr,
    ema_ptr,
    guesses_ptr,
    sums_ptr,
    candidates_ptr,
    counts_ptr,
    wanted_ptr,
    budget_ptr,
    variance_ptr,
    first_row,
    chunk_start,
    words_start,
    length,
    chunk_rows,
    words_rows,
    words_per_row,
    sums_per_row,
    most,
    k_base,
    k_min,
    k_max,
    MODE: tl.constexpr,
    ASM: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    token = batch * length + row
    chunk_row = batch * chunk_rows + row - chunk_start
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    num_visible = tl.maximum(row - start + 1, 0)

    spans = tl.arange(0, SPANS)
    sums_ptrs = sums_ptr + (chunk_row * sums_per_row + spans) * 2
    in_row = (spans >= start // SPAN) & (spans <= row // SPAN)
    divisor = tl.maximum(num_visible, 1).to(tl.float32)
    mean = tl.sum(tl.load(sums_ptrs, mask=in_row, other=0.0)) / divisor
    square = tl.sum(tl.load(sums_ptrs + 1, mask=in_row, other=0.0)) / divisor
    # The centre is the mean of a sample, a part p of the row: (mean - centre)^2 <= variance (1 - p) / p, so that
    # no more than five bits cancel.
    variance = tl.maximum(square - mean * mean, 0.0)
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, MODE)
    tl.store(budget_ptr + token, k)
    tl.store(variance_ptr + token, variance)

    index = spans[:, None] * (SPAN // 32) + tl.arange(0, SPAN // 32)[None, :]
    words_ptr += (batch * words_rows + row - words_start) * words_per_row
    in_row = (index >= start // 32) & (index <= row // 32)
    rest = tl.load(words_ptr + index, mask=in_row, other=0)
    sizes = count_bits(rest, ASM)
    in_span = tl.sum(sizes, axis=1)
    count = tl.sum(in_span)
    everything = tl.load(guesses_ptr + chunk_row * 2) == float("-inf")
    fits = (count <= most) & ((count >= k) | everything)
    tl.store(counts_ptr + chunk_row, tl.where(fits, count, 0))
    tl.store(wanted_ptr + chunk_row, tl.where(fits, 0, 1))
    if fits:
        candidates_ptr += chunk_row * most
        rank = tl.cumsum(sizes, axis=1) - sizes
        place = rank + (tl.cumsum(in_span, axis=0) - in_span)[:, None]
        candidate = index * 32 + rank * MAX_POSITION
        left = tl.max(sizes)
        while left > 0:
            lowest = rest & -rest
            tl.store(candidates_ptr + place, candidate + count_bits(lowest - 1, ASM), mask=rest != 0)
            candidate += MAX_POSITION
            place += 1
            rest ^= lowest
            left -= 1
    else:
        tl.store(words_ptr + index, rest * 0, mask=in_row)


@triton.jit(
    do_not_specialize=[
        "first_row",
        "words_start",
        "length",
        "chunk_rows",
        "words_rows",
        "words_per_row",
        "above",
        "k_base",
        "k_min",
        "k_max",
        "local_window",
    ]
)
def _narrow_kernel(
    scores_ptr,
    candidates_ptr,
    counts_ptr,
    guesses_ptr,
    starts_ptr,
    ema_ptr,
    words_ptr,
    budget_ptr,
    variance_ptr,
    first_row,
    words_start,
    length,
    chunk_rows,
    words_rows,
    words_per_row,
    stride_b,
    stride_r,
    most,
    above,
    k_base,
    k_min,
    k_max,
    local_window,
    MODE: tl.constexpr,
    SPAN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """For rows with above < candidates <= SIZE."""
    row = first_row + tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    chunk_row = batch * chunk_rows + tl.program_id(0)
    count = tl.load(counts_ptr + chunk_row)
    if (count <= above) | (count > SIZE):
        return
    token = batch * length + row
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)

    slots = tl.arange(0, SIZE)
    listed = slots < count
    candidates_ptr += chunk_row * most
    # A limit that is known to be a multiple of 16 keeps the masked load 16 bytes wide.
    limit = (count + 15) // 16 * 16
    candidates = tl.load(candidates_ptr + slots, mask=slots < limit, other=0)
    columns = candidates & (MAX_POSITION - 1)
    row_ptr = scores_ptr + batch * stride_b + tl.program_id(0).to(tl.int64) * stride_r
    x = tl.load(row_ptr + columns // SPAN * SPAN + candidates // MAX_POSITION, mask=listed, other=0.0)
    k = tl.load(budget_ptr + token)
    if tl.load(guesses_ptr + chunk_row * 2) == float("-inf"):
        # All of the row is here. Two passes, from its largest score: equal scores have variance 0 to the bit.
        distance = tl.where(listed, x - tl.max(tl.where(listed, x, float("-inf"))), 0.0)
        mean = tl.sum(distance) / count.to(tl.float32)
        deviation = tl.where(listed, distance - mean, 0.0)
        variance = tl.sum(deviation * deviation) / count.to(tl.float32)
        k = row_budget(variance, ema_ptr, count, k_base, k_min, k_max, MODE)
        tl.store(budget_ptr + token, k)
        tl.store(variance_ptr + token, variance)

    # Slots ascend with the keys: ties go to the lower one.
    keys = tl.where(listed, order_key(x), INT_MIN)
    threshold, last = find_cut(keys, slots, count, k)
    near = row + 1
    if local_window > 0:
        near = tl.maximum(row - local_window + 1, start)
    dropped = listed & (above_cut(keys, slots, threshold, last) == 0)
    # Read again: over the search, registers are what limits the rows at work.
    columns = tl.load(candidates_ptr + slots, mask=slots < limit, other=0) & (MAX_POSITION - 1)
    dropped &= columns < near
    # Each bit is cleared or set by one thread, so that the order of these operations does not matter.
    words_ptr += (batch * words_rows + row - words_start) * words_per_row
    tl.atomic_and(words_ptr + columns // 32, ~(1 << (columns & 31)), mask=dropped, sem="relaxed")
    if local_window > 0:
        for word in range(near // 32, row // 32 + 1, 128):
            index = word + tl.arange(0, 128)
            window = window_words(index, near, row)
            tl.atomic_or(words_ptr + index, window, mask=index <= row // 32, sem="relaxed")
