"""Selects the exact top-k of rows too long for registers, by the maxima of groups of 8 neighbouring keys.

The k groups with the highest maxima contain the k best keys, because any key outside these groups ranks after all k
maxima. (Of equal maxima, the lower group comes first.) A row of L keys has L / 8 groups. One kernel finds the k groups.
A second kernel selects among their 8 * k keys.

If registers cannot hold the L / 8 maxima, the first kernel forms clusters of 8 groups. The k clusters with the
highest maxima contain the k best groups. The row is read in full only once. The 8 keys of a group are one byte of the
row's packed mask.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import GROUP_KEYS as GROUP
from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.selection.criteria import Criteria, Outputs
from gsa_kernels.selection.triton_search import (
    INT_MIN,
    above_cut,
    find_cut,
    order_key,
    row_budget,
    search_options,
    window_words,
)

_TILE = 4096  # keys a program reads at a time
# Groups that a program searches at once, 32 per thread. With twice this number Triton spills a third of them.
_MOST_GROUPS = 32768
_SMALLEST_LIST = 64  # groups


def select_long_rows(
    criteria: Criteria,
    scores: torch.Tensor,
    chunk_start: int,
    rows: range,
    block: int,
    outputs: Outputs,
    wanted: torch.Tensor | None = None,
) -> None:
    """Select `rows`, whose positions are all below `block`. Arguments are as in `select_rows`.

    Args:
        wanted: int32 [B, R], of the chunk; rows with 0 are skipped
    """
    inputs, rule, packed_mask = criteria.inputs, criteria.rule, outputs.packed_mask
    batch, grid = inputs.batch, (len(rows), inputs.batch)
    padded_groups = ceil_div(ceil_div(inputs.position(rows.stop - 1) + 1, GROUP), 16) * 16
    list_length = max(next_power_of_2(rule.most_keys), _SMALLEST_LIST)
    num_groups = max(block // GROUP, 128)
    num_clusters = 0 if num_groups <= max(_MOST_GROUPS, list_length * GROUP) else num_groups // GROUP
    scratch = (batch, len(rows), padded_groups + num_clusters)
    group_keys = torch.empty(scratch, dtype=torch.int32, device=scores.device)
    group_list = torch.empty((batch, len(rows), list_length), dtype=torch.int32, device=scores.device)
    chunk_rows = 0 if wanted is None else wanted.shape[1]
    where = (inputs.query_start, rows.start, chunk_start, chunk_rows, inputs.num_rows)
    _best_groups_kernel[grid](
        scores,
        inputs.document_starts,
        wanted,
        criteria.variance_ema,
        group_keys,
        group_list,
        outputs.budget,
        outputs.variance,
        *where,
        *scores.stride()[:2],
        padded_groups,
        list_length,
        *rule.numbers,
        MODE=rule.adaptive_k,
        GROUP=GROUP,
        TILE=_TILE,
        NUM_GROUPS=num_groups,
        NUM_CLUSTERS=num_clusters,
        LIST=list_length,
        **search_options(max(num_clusters, list_length * GROUP) if num_clusters else num_groups, min_warps=8),
    )
    # Only the device knows the budget. Kernels of all sizes are launched, and each row belongs to one of them.
    sizes = [size for size in (list_length // 4, list_length // 2) if size >= _SMALLEST_LIST] + [list_length]
    if wanted is not None:  # few rows or none, so one launch suffices
        sizes = [list_length]
    for above, size in zip([0, *sizes[:-1]], sizes, strict=True):
        _select_in_groups_kernel[grid](
            scores,
            inputs.document_starts,
            wanted,
            group_list,
            outputs.budget,
            packed_mask,
            packed_mask.view(torch.uint8),
            *where,
            outputs.first_row,
            *packed_mask.shape[1:],
            *scores.stride()[:2],
            list_length,
            above,
            criteria.local_window,
            GROUP=GROUP,
            SIZE=size,
            **search_options(size * GROUP),
        )


@triton.jit(
    do_not_specialize=[
        "query_start",
        "first_row",
        "chunk_start",
        "chunk_rows",
        "num_rows",
        "k_base",
        "k_min",
        "k_max",
        "dense_below",
    ]
)
def _best_groups_kernel(
    scores_ptr, starts_ptr, wanted_ptr, ema_ptr, group_keys_ptr, group_list_ptr, budget_ptr, variance_ptr,
    query_start, first_row, chunk_start, chunk_rows, num_rows, stride_b, stride_r, padded_groups, list_length,
    k_base, k_min, k_max, dense_below,
    MODE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CLUSTERS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Compute the moments and the budget k of a row, and the ascending list of its k best groups.

    NUM_CLUSTERS is the number of clusters of 8 groups, starting at the row's first group. The kernel searches these
    clusters first. If NUM_CLUSTERS is 0, the kernel searches the groups directly.
    """
    row = first_row + tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    token = batch * num_rows + row
    position = query_start + row
    if wanted_ptr is not None:
        wanted = tl.load(wanted_ptr + batch * chunk_rows + row - chunk_start)
        if wanted == 0:
            return
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    num_visible = tl.maximum(position - start + 1, 0)
    row_ptr = scores_ptr + batch * stride_b + (row - chunk_start).to(tl.int64) * stride_r
    scratch_row = batch * tl.num_programs(0) + tl.program_id(0)
    group_keys_ptr += scratch_row * (padded_groups + NUM_CLUSTERS)
    cluster_keys_ptr = group_keys_ptr + padded_groups
    group_list_ptr += scratch_row * list_length

    tile_groups = tl.arange(0, TILE // GROUP)
    within = tl.arange(0, GROUP)[None, :]
    first_group = start // GROUP
    end_group = position // GROUP + 1
    divisor = tl.maximum(num_visible, 1).to(tl.float32)

    # Moments are relative to the mean of the first keys, which is near the row's mean. Nothing cancels, and equal
    # scores have variance 0 to the bit.
    origin = tl.load(row_ptr + tl.minimum(start, position))
    columns = (first_group + tile_groups)[:, None] * GROUP + within
    visible = (columns >= start) & (columns <= position)
    x = tl.load(row_ptr + columns, mask=((first_group + tile_groups) < end_group)[:, None], other=0.0)
    near = tl.sum(visible.to(tl.int32))
    centre = origin + tl.sum(tl.where(visible, x - origin, 0.0)) / tl.maximum(near, 1).to(tl.float32)

    sums = tl.zeros([TILE // GROUP, GROUP], dtype=tl.float32)
    squares = tl.zeros([TILE // GROUP, GROUP], dtype=tl.float32)
    for tile in range(first_group, end_group, TILE // GROUP):
        groups = tile + tile_groups
        columns = groups[:, None] * GROUP + within
        visible = (columns >= start) & (columns <= position)
        x = tl.load(row_ptr + columns, mask=(groups < end_group)[:, None], other=0.0)
        distance = tl.where(visible, x - centre, 0.0)
        sums += distance
        squares += distance * distance
        best = tl.max(tl.where(visible, x, float("-inf")), axis=1)
        best_keys = order_key(best)
        tl.store(group_keys_ptr + groups, best_keys, mask=groups < end_group)
        if NUM_CLUSTERS > 0:
            of_clusters = tl.max(tl.reshape(best_keys, [TILE // GROUP // GROUP, GROUP]), axis=1)
            clusters = (tile - first_group) // GROUP + tl.arange(0, TILE // GROUP // GROUP)
            tl.store(cluster_keys_ptr + clusters, of_clusters, mask=clusters < NUM_CLUSTERS)
    mean = tl.sum(sums) / divisor
    # This maximum keeps a NaN. A plain maximum on a GPU returns the number instead.
    variance = tl.maximum(tl.sum(squares) / divisor - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    k = row_budget(variance, ema_ptr, num_visible, k_base, k_min, k_max, dense_below, MODE)
    tl.store(budget_ptr + token, k)
    tl.store(variance_ptr + token, variance)

    tl.debug_barrier()  # other threads of this program wrote the maxima
    num_valid = tl.maximum(end_group - first_group, 0)
    if NUM_CLUSTERS > 0:
        clusters = tl.arange(0, NUM_CLUSTERS)
        valid_clusters = (num_valid + GROUP - 1) // GROUP
        keys = tl.load(cluster_keys_ptr + clusters, mask=clusters < valid_clusters, other=INT_MIN)
        threshold, last = find_cut(keys, clusters, valid_clusters, k)
        chosen = above_cut(keys, clusters, threshold, last)
        tl.debug_barrier()  # the list of the best clusters overwrites their maxima
        tl.store(cluster_keys_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, clusters, mask=chosen)
        tl.debug_barrier()
        num_listed = tl.minimum(k, valid_clusters)
        # Slots are in the order of the groups, so that ties go to the lower slot.
        slots = tl.arange(0, LIST * GROUP)
        groups = _listed_groups(cluster_keys_ptr, slots, num_listed, first_group, end_group, GROUP)
        keys = tl.load(group_keys_ptr + groups, mask=groups < end_group, other=INT_MIN)
        num_valid = tl.sum((groups < end_group).to(tl.int32))
    else:
        slots = tl.arange(0, NUM_GROUPS)
        groups = first_group + slots
        keys = tl.load(group_keys_ptr + groups, mask=groups < end_group, other=INT_MIN)
    threshold, last = find_cut(keys, slots, num_valid, k)
    chosen = above_cut(keys, slots, threshold, last)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    if NUM_CLUSTERS > 0:  # recomputed, because in registers they would take the room of the keys
        groups = _listed_groups(cluster_keys_ptr, slots, num_listed, first_group, end_group, GROUP)
    tl.store(group_list_ptr + place, groups, mask=chosen)


@triton.jit
def _listed_groups(list_ptr, slots, num_listed, first_group, end_group, GROUP: tl.constexpr):
    """Return the groups of the listed clusters, one per slot; `end_group` in empty slots."""
    place = slots // GROUP
    cluster = tl.load(list_ptr + place, mask=place < num_listed, other=0)
    return tl.where(
        place < num_listed, tl.minimum(first_group + cluster * GROUP + slots % GROUP, end_group), end_group
    )


@triton.jit(
    do_not_specialize=[
        "query_start",
        "first_row",
        "chunk_start",
        "chunk_rows",
        "num_rows",
        "words_start",
        "words_rows",
        "above",
        "local_window",
    ]
)
def _select_in_groups_kernel(
    scores_ptr, starts_ptr, wanted_ptr, group_list_ptr, budget_ptr, words_ptr, bytes_ptr, query_start,
    first_row, chunk_start, chunk_rows, num_rows, words_start, words_rows, words_per_row, stride_b, stride_r,
    list_length, above, local_window,
    GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Select among the keys of the listed groups, for rows with a budget k in (above, SIZE]."""
    row = first_row + tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    token = batch * num_rows + row
    position = query_start + row
    if wanted_ptr is not None:
        wanted = tl.load(wanted_ptr + batch * chunk_rows + row - chunk_start)
        if wanted == 0:
            return
    k = tl.load(budget_ptr + token)
    if (k <= above) | (k > SIZE):
        return
    start = row * 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    row_ptr = scores_ptr + batch * stride_b + (row - chunk_start).to(tl.int64) * stride_r
    group_list_ptr += (batch * tl.num_programs(0) + tl.program_id(0)) * list_length

    slots = tl.arange(0, SIZE)
    listed = slots < tl.minimum(k, position // GROUP - start // GROUP + 1)
    groups = tl.load(group_list_ptr + slots, mask=listed, other=0)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(row_ptr + columns, mask=listed[:, None], other=0.0)
    valid = listed[:, None] & (columns >= start) & (columns <= position)
    keys = tl.where(valid, order_key(x), INT_MIN)
    threshold, last = find_cut(keys, columns, tl.sum(valid.to(tl.int32)), k)
    selected = above_cut(keys, columns, threshold, last)
    bits = tl.sum(selected.to(tl.int32) << tl.arange(0, GROUP)[None, :], axis=1)
    first_word = (batch * words_rows + row - words_start) * words_per_row
    tl.store(bytes_ptr + first_word * 4 + groups, bits.to(tl.uint8), mask=listed)

    if local_window > 0:
        tl.debug_barrier()  # other threads wrote bytes of these words
        near = tl.maximum(position - local_window + 1, start)
        row_words_ptr = words_ptr + first_word
        for word in range(near // 32, position // 32 + 1, 128):
            index = word + tl.arange(0, 128)
            in_row = index <= position // 32
            old = tl.load(row_words_ptr + index, mask=in_row, other=0)
            tl.store(row_words_ptr + index, old | window_words(index, near, position), mask=in_row)
