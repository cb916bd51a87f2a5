"""Computes indexer scores of one query per sequence, their moments and a histogram in one pass over the cached keys.

Increments of one histogram bin run one after the other, so a histogram of all scores would be slow if many scores were
similar. Each program therefore counts only scores in bins above a floor. More than k keys are expected to score
above the floor. To find the floor, each program first scores the same small sample of keys, spread evenly over the
sequence. If the floor is too high, the selection is slower, but still exact.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.checks import kernels_use_sigmoid
from gsa_kernels.decode.state import BINS, BINS_PER_OCTAVE, CHUNK, SAMPLE, DecodeWorkspace, LayerCache
from gsa_kernels.decode.triton_select import bin_slot, score_bin
from gsa_kernels.indexer.triton_scores import fast_tanh
from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.selection.triton_search import INT_MAX, order_key
from gsa_kernels.types import Indexer

_SAMPLES_ABOVE = tl.constexpr(6)
"""The floor is such that the sample's share of 2 k_max keys, and this number of sampled keys more, are above it. If
keys are in random order, fewer than 1 floor in 10^4 is too high."""
_LEAST_HEADS = 8  # the smallest number of columns of a product
_WARPS = 4
_FLOAT_WARPS = 16  # exact products keep more values in registers
_COPIED_BYTES = 64 * 1024
"""Largest number of bytes of keys in flight to shared memory, so that several programs share a multiprocessor."""


def score_keys(
    indexer: Indexer,
    cache: LayerCache,
    k_max: int,
    workspace: DecodeWorkspace,
    chained: bool,
) -> None:
    """Fill the workspace's scores, histogram and chunk_moments as far as each sequence's length.

    `decode_select` describes and checks `indexer` and `cache`. If `chained`, kernels may overlap:
    - The next kernel may start before this kernel ends.
    - With `cache.in_chain`, this kernel starts early and waits until the previous kernel ends.
    - With `cache.settled` too, this kernel starts loading keys before it waits, except each sequence's newest key.
    """
    early = chained and cache.in_chain
    queries, keys, weight_logits = indexer.queries[:, 0], indexer.keys, indexer.head_weight_logits[:, 0]
    batch, heads, dim = queries.shape
    table = cache.block_table
    bf16 = queries.dtype == torch.bfloat16
    block_d = next_power_of_2(dim)
    _score_kernel[(ceil_div(cache.max_length, CHUNK), batch)](
        queries,
        keys,
        weight_logits,
        indexer.score_bias,
        indexer.head_weight_bias,
        cache.lengths,
        cache.starts,
        table,
        workspace.scores,
        workspace.histogram,
        workspace.borderline_counts,
        workspace.plan,
        *workspace.chunk_moments,
        *queries.stride()[:2],
        *keys.stride()[:2],
        0 if table is None else table.stride(0),
        weight_logits.stride(0),
        workspace.scores.shape[1],
        cache.max_length,
        k_max,
        dim**-0.5,
        PAGE=cache.page_size,
        HI=heads,
        DI=dim,
        BLOCK_H=max(_LEAST_HEADS, next_power_of_2(heads)),
        BLOCK_D=block_d,
        CHUNK=CHUNK,
        SAMPLE=SAMPLE,
        BINS=BINS,
        BINS_PER_OCTAVE=BINS_PER_OCTAVE,
        SIGMOID=kernels_use_sigmoid(indexer.activation),
        # The interpreter runs on the CPU and does not support inline assembly.
        TANH=bf16 and queries.is_cuda,
        PRECISION="tf32" if bf16 else "ieee",
        CHAINED=chained,
        SETTLED=cache.settled,
        STAGES=min(CHUNK // SAMPLE + 2, _COPIED_BYTES // (SAMPLE * block_d * queries.element_size()) + 1),
        num_warps=_WARPS if bf16 else _FLOAT_WARPS,
        **({"launch_pdl": True} if early else {}),
    )


@triton.jit(do_not_specialize=["max_length", "k_max"])
def _score_kernel(
    q_ptr,
    k_ptr,
    weight_ptr,
    score_bias_ptr,
    weight_bias_ptr,
    lengths_ptr,
    starts_ptr,
    table_ptr,
    scores_ptr,
    histogram_ptr,
    list_counts_ptr,
    plan_ptr,
    means_ptr,
    squares_ptr,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_tb,
    stride_wb,
    columns,
    max_length,
    k_max,
    scale,
    PAGE: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_OCTAVE: tl.constexpr,
    SIGMOID: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
    SETTLED: tl.constexpr,
    STAGES: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), max_length)
    first = chunk * CHUNK
    idle = first >= length
    # All programs wait before any of them returns, because later kernels rely on it (row_product/op.py).
    if CHAINED:
        if not SETTLED:  # noqa: SIM114 - decided when the kernel is compiled
            gdc_wait()
        elif idle:
            gdc_wait()
    # Loads that do not depend on the length run at the same time as the load of the length.
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DI
    heads = tl.arange(0, BLOCK_H)
    head_ok = heads < HI
    q_ptr += batch * stride_qb
    weight_ptr += batch * stride_wb
    queries = tl.zeros([BLOCK_D, BLOCK_H], q_ptr.dtype.element_ty)
    weights = tl.zeros([BLOCK_H], tl.float32)
    if not SETTLED:
        queries = _load_queries(q_ptr, heads, dims, stride_qh, HI, DI)
        weights = _load_weights(weight_ptr, weight_bias_ptr, heads, HI, SIGMOID)
    bias = tl.zeros([BLOCK_H], tl.float32)
    if SIGMOID:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if score_bias_ptr is not None:
            bias = tl.load(score_bias_ptr + heads, mask=head_ok, other=0.0).to(tl.float32)
    lanes = tl.arange(0, SAMPLE)
    own_pages = ()
    if PAGE > 0:
        table_ptr += batch * stride_tb
        for own in tl.static_range(CHUNK // SAMPLE):
            keys = first + own * SAMPLE + lanes
            pages = load_pages(table_ptr, keys, keys < max_length, PAGE)
            own_pages = own_pages + (pages,)  # type: ignore[assignment] # noqa: RUF005
    if idle:
        return

    # The sample is a tile like the program's own tiles of keys. The loop lets Triton load all tiles before it uses the
    # first. Loading the program's own keys takes most of the time, and the floor is computed meanwhile.
    sampled = (lanes.to(tl.int64) * length // SAMPLE).to(tl.int32)
    end = length
    if SETTLED:  # the newest key is handled after the wait
        end = length - 1
        sampled = tl.minimum(sampled, tl.maximum(end - 1, 0))
    has_newest = (end >= first) & (end < first + CHUNK)
    new_lanes = tl.arange(0, 16)  # rows of the smallest product
    new_tile = tl.zeros([16, BLOCK_D], k_ptr.dtype.element_ty)
    if PAGE == 0:
        k_ptr += batch * stride_kb
    if starts_ptr is not None:
        k_ptr += tl.load(starts_ptr + batch).to(tl.int64) * stride_kl
    sampled_pages = load_pages(table_ptr, sampled, sampled < end, PAGE)
    floor = length * 0
    origin = 0.0
    total = tl.zeros([SAMPLE], tl.float32)
    squares = tl.zeros([SAMPLE], tl.float32)
    for tile in tl.range(0, CHUNK // SAMPLE + 1, num_stages=STAGES):
        keys = tl.where(tile == 0, sampled, first + (tile - 1) * SAMPLE + lanes)
        valid = keys < end
        pages = sampled_pages
        if PAGE > 0:
            for own in tl.static_range(CHUNK // SAMPLE):
                pages = tl.where(tile == own + 1, own_pages[own], pages)
        key_rows = row_offsets(pages, keys, stride_kb, stride_kl, PAGE)
        key_ptrs = k_ptr + key_rows[:, None] + dims[None, :]
        key_tile = tl.load(key_ptrs, mask=valid[:, None] & dim_ok[None, :], other=0.0)
        if SETTLED:  # noqa: SIM102 - decided when the kernel is compiled
            if tile == 0:
                if CHAINED:
                    gdc_wait()
                queries = _load_queries(q_ptr, heads, dims, stride_qh, HI, DI)
                weights = _load_weights(weight_ptr, weight_bias_ptr, heads, HI, SIGMOID)
                new_ok = (new_lanes == 0) & has_newest
                new_pages = load_pages(table_ptr, end + new_lanes, new_ok, PAGE)
                new_rows = row_offsets(new_pages, end + new_lanes, stride_kb, stride_kl, PAGE)
                new_ptrs = k_ptr + new_rows[:, None] + dims[None, :]
                new_tile = tl.load(new_ptrs, mask=new_ok[:, None] & dim_ok[None, :], other=0.0)
        scores = _score_tile(key_tile, queries, weights, bias, scale, SIGMOID, TANH, PRECISION)
        ordered = order_key(scores)
        if tile == 0:
            # The floor is chosen such that about twice k_max keys, and a few more, are expected above it.
            above = tl.sum((ordered[None, :] > ordered[:, None]).to(tl.int32), axis=1)
            rank = 2 * SAMPLE * k_max // length + _SAMPLES_ABOVE
            floor_key = tl.min(tl.where(above < rank, ordered, INT_MAX))
            floor = tl.where(rank < SAMPLE, tl.maximum(score_bin(floor_key, not SIGMOID) - 1, 0), 0)
            origin = tl.sum(scores) / SAMPLE
        else:
            tl.store(scores_ptr + batch * columns + keys, scores, mask=valid)
            # The counts are integers, so that their sums do not depend on the order.
            bin = score_bin(ordered, not SIGMOID)
            slots = histogram_ptr + batch * BINS + bin_slot(bin, BINS, BINS_PER_OCTAVE)
            tl.atomic_add(slots, 1, mask=valid & (bin > floor), sem="relaxed")
            distance = tl.where(valid, scores - origin, 0.0)
            total += distance
            squares += distance * distance
    if SETTLED:  # noqa: SIM102 - decided when the kernel is compiled
        if has_newest:
            new_scores = _score_tile(new_tile, queries, weights, bias, scale, SIGMOID, TANH, PRECISION)
            score = tl.sum(tl.where(new_lanes == 0, new_scores, 0.0))
            origin = tl.where(end == 0, score, origin)  # if it is the only key, its variance is 0
            tl.store(scores_ptr + batch * columns + end, score)
            bin = score_bin(order_key(score), not SIGMOID)
            slot = histogram_ptr + batch * BINS + bin_slot(bin, BINS, BINS_PER_OCTAVE)
            tl.atomic_add(slot, 1, mask=bin > floor, sem="relaxed")
            distance = tl.where(lanes == 0, score - origin, 0.0)
            total += distance
            squares += distance * distance

    if chunk == 0:
        tl.store(list_counts_ptr + batch, 0)
        tl.store(plan_ptr + batch * 3, floor)
    # Moments are relative to the sample's mean, which is at most sqrt(length / SAMPLE) standard deviations from the
    # row's. If scores are equal, the mean is exactly the score, so that the variance is 0.
    count = tl.minimum(length - first, CHUNK).to(tl.float32)
    total_sum, squares_sum = tl.reduce((total, squares), 0, _add_pairs)
    mean = total_sum / count
    slot = batch * (columns // CHUNK) + chunk
    tl.store(means_ptr + slot, origin + mean)
    tl.store(
        squares_ptr + slot, tl.maximum(squares_sum - total_sum * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    )


@triton.jit
def load_pages(table_ptr, tokens, valid, PAGE: tl.constexpr):
    """Load the page number of each token where `valid` is true. If PAGE (tokens per page) is 0, the cache has no pages,
    and the result is zeros."""
    pages = tokens * 0
    if PAGE > 0:
        pages = tl.load(table_ptr + tokens // PAGE, mask=valid, other=0)
    return pages


@triton.jit
def row_offsets(pages, tokens, stride_page, stride_row, PAGE: tl.constexpr):
    """Return the int64 offset of each token's row from the start of the first page. If PAGE is 0, offsets count from
    the start of the sequence's cache."""
    if PAGE == 0:
        offsets = tokens.to(tl.int64) * stride_row
    else:
        offsets = pages.to(tl.int64) * stride_page + (tokens % PAGE).to(tl.int64) * stride_row
    return offsets


@triton.jit
def _load_queries(q_ptr, heads, dims, stride_qh, HI: tl.constexpr, DI: tl.constexpr):
    """Load the queries [BLOCK_D, BLOCK_H]."""
    ptrs = q_ptr + heads[None, :] * stride_qh + dims[:, None]
    return tl.load(ptrs, mask=(heads < HI)[None, :] & (dims < DI)[:, None], other=0.0)


@triton.jit
def _load_weights(weight_ptr, bias_ptr, heads, HI: tl.constexpr, SIGMOID: tl.constexpr):
    """Load the heads' weights, fp32 [BLOCK_H], and apply their sigmoid if there is one."""
    weights = tl.load(weight_ptr + heads, mask=heads < HI, other=0.0).to(tl.float32)
    if SIGMOID:
        if bias_ptr is not None:
            weights += tl.load(bias_ptr + heads, mask=heads < HI, other=0.0).to(tl.float32)
        weights = tl.where(heads < HI, tl.sigmoid(weights), 0.0)
    return weights


@triton.jit
def _add_pairs(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def _score_tile(
    keys, queries, weights, bias, scale, SIGMOID: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr
):
    """Score keys [N, BLOCK_D] for queries [BLOCK_D, BLOCK_H] with weights and bias [BLOCK_H]: fp32 [N]."""
    logits = tl.dot(keys, queries, input_precision=PRECISION) * scale + bias[None, :]
    if not SIGMOID:
        # This maximum keeps a NaN. A plain maximum on a GPU returns the number instead.
        activated = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif TANH:  # sigmoid(z) = 1/2 + 1/2 tanh(z/2)
        activated = 0.5 + 0.5 * fast_tanh(logits * 0.5)
    else:
        activated = tl.sigmoid(logits)
    return tl.sum(weights[None, :] * activated, axis=1)
