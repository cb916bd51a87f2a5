"""Computes the backward pass of attention over key lists. One loop over the lists gives the gradients of q, k and v.

Each program owns a tile of queries and writes the gradient of q for these queries. For each key in the tile's list, the
program also writes a partial row, which is the contribution of the tile's queries to dV and dK of this key.
`add_partials_by_key` sums the partial rows of each key in the order of the tiles, so results are deterministic.

To limit scratch memory, the tiles are processed in ranges, and memory holds the partial gradients of k and v of one
range at a time. If lists are long, a range may have fewer tiles than the device has multiprocessors. Several programs
then share a tile: each takes a segment of the tile's list, and computes this segment's part of the gradient of q. A
second kernel adds the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import AttentionInputs, GradientInputs
from gsa_kernels.attention.triton_backward import backward_rows
from gsa_kernels.attention.triton_gathered_forward import heads_per_program
from gsa_kernels.attention.triton_tiles import Tiles, count_multiprocessors, float_warps, input_precision
from gsa_kernels.devices import shared_memory
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_reduce_keys import TileRows, add_partials_by_key, find_key_hits, split_tiles
from gsa_kernels.limits import HOPPER_SHARED_BYTES, SEGMENT_KEYS, SEGMENT_WAVES, TILE_QUERIES, ceil_div
from gsa_kernels.triton_constants import LOG2_E


def count_segments(programs: int, wanted: int, keys: int) -> int:
    """Return how many programs share the list of a tile: the smallest number with the least expected time.

    The time is proportional to the launch's number of waves, times the number of keys per program.

    Args:
        programs: number of programs of the launch if each has a whole list
        wanted: number of programs that the device runs at the same time
        keys: approximate length of a list
    """
    if programs >= wanted:
        return 1
    most = max(1, min(keys // SEGMENT_KEYS, SEGMENT_WAVES * wanted // programs))
    return min(range(1, most + 1), key=lambda segments: ceil_div(programs * segments, wanted) / segments)


def backward_tiles(head_size: int, dtype: torch.dtype, shared: int = HOPPER_SHARED_BYTES) -> Tiles:
    """Return the tile shape for a GPU with `shared` bytes of shared memory per program.

    Its field `queries` is an upper bound on the rows, which are queries times heads.
    """
    if dtype == torch.float32:
        return Tiles(32, 32, float_warps(head_size), 1)
    if head_size > 128:
        # In 227 KiB of shared memory, 64 KiB hold q and the output's gradient, two stages of 32 KiB each hold k and v,
        # and 16 KiB hold probabilities and their gradients. A tile of 128 rows would leave no second stage. Hopper's
        # matrix instructions need at least 64 rows, so a tile has at least 64 keys.
        return Tiles(64, 64, 8, 2)
    # The wide tile needs 161 KiB with heads of 128.
    return Tiles(128, 64, 8, 3) if shared > 161 * 1024 else Tiles(64, 64, 8, 2)


def gathered_backward(
    grad: torch.Tensor,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: KeyLists,
    scratch_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute gradients of q, k, v and the gate logits from the gradient of `out`.

    `out` and `lse` come from the forward pass. Besides the returned gradients, this function needs memory for
    - fp32 accumulators of k's and v's gradients
    - the partial rows: up to `scratch_bytes`, or the partial rows of one tile if these are larger
    - each segment's part of the gradient of q, if programs share a list: up to `limits.segments_bytes`
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, num_keys, kv_heads, head_size = k.shape
    group = q.shape[2] // kv_heads
    tiles = backward_tiles(head_size, q.dtype, shared_memory(q.device))
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grad_attended, grad_gate, delta, lse2 = backward_rows(grad, out, lse, inputs.gate_logits)
    grad_q = torch.empty_like(q)
    sums = torch.zeros(batch, num_keys, kv_heads, 2 * head_size, dtype=torch.float32, device=q.device)
    shared = GradientInputs(grad_attended, q, k, v, delta, lse2)
    members = heads_per_program(group, tiles.queries)
    splits = ceil_div(group, members)
    rows = scratch_bytes // (2 * head_size * q.element_size())
    # A multiprocessor has room for one program, so a range fills whole waves.
    ranges = split_tiles(lists, rows, count_multiprocessors(q.device))
    scratch_rows = max(each.num_rows for each in ranges)
    # If memory allows, one launch takes several key-value heads. One head with short lists does not fill the device.
    divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    together = max(n for n in divisors if n == 1 or n * scratch_rows <= rows)
    scratch = torch.empty(together * scratch_rows, 2 * head_size, dtype=q.dtype, device=q.device)
    for each in ranges:
        hits = find_key_hits(lists, each)
        partials = scratch[: together * each.num_rows].view(together, each.num_rows, 2 * head_size)
        for first in range(0, kv_heads, together):
            for split in range(splits):
                _launch(shared, lists, grad_q, members, each, first * splits + split, partials)
                add_partials_by_key(partials, hits, sums[:, :, first : first + together])
    grad_v = torch.empty_like(v).copy_(sums[..., :head_size])
    grad_k = torch.empty_like(k).copy_(sums[..., head_size:])
    return grad_q, grad_k, grad_v, grad_gate


def _launch(
    inputs: GradientInputs,
    lists: KeyLists,
    grad_q: torch.Tensor,
    members: int,
    tile_rows: TileRows,
    part: int,
    partials: torch.Tensor,
) -> None:
    """Launch a range of tiles for one part of `members` query heads in each of N adjacent key-value heads.

    Args:
        part: S * g + j. The query heads of a key-value head are divided into S parts. The launch computes part j for
            the key-value heads g to g + N - 1.
        grad_q, partials: outputs, [B, L, H, D] and [N, tile_rows.num_rows, 2 * D]
    """
    q, k, v, grad, scale = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.scale
    length, heads, head_size = q.shape[1:]
    tiles = backward_tiles(head_size, q.dtype, shared_memory(q.device))
    group = heads // k.shape[2]
    splits = ceil_div(group, members)
    num_tiles = tile_rows.last - tile_rows.first
    programs = num_tiles * len(partials)
    segments = count_segments(programs, count_multiprocessors(q.device), tile_rows.num_rows // num_tiles)
    results = grad_q
    if segments > 1:
        shape = (len(partials), segments, num_tiles, members * TILE_QUERIES, head_size)
        results = torch.empty(shape, dtype=torch.float32, device=q.device)
    _backward_kernel[(programs * segments,)](
        q,
        k,
        v,
        grad,
        inputs.delta,
        inputs.lse2,
        lists.keys,
        lists.words,
        lists.starts,
        lists.counts,
        results,
        partials,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        *grad_q.stride()[:3],
        length,
        heads,
        lists.counts.shape[1],
        tile_rows.first,
        num_tiles,
        part,
        tile_rows.num_rows,
        tile_rows.starts,
        tile_rows.order,
        scale,
        scale * LOG2_E.value,
        segments,
        GROUP=group,
        MEMBERS=members,
        SPLITS=splits,
        D=head_size,
        QUERIES=TILE_QUERIES,
        KEYS=tiles.keys,
        SEGMENTED=segments > 1,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    if segments > 1:
        _add_segments_kernel[(programs * members,)](
            results,
            grad_q,
            *grad_q.stride()[:3],
            length,
            lists.counts.shape[1],
            tile_rows.first,
            num_tiles,
            part,
            tile_rows.order,
            segments,
            GROUP=group,
            MEMBERS=members,
            SPLITS=splits,
            D=head_size,
            QUERIES=TILE_QUERIES,
            num_warps=4,
        )


# Values from the data are not specialised, because each new list length would recompile and stop training.
@triton.jit(
    do_not_specialize=["first_tile", "num_tiles", "first_part", "num_rows", "row_starts", "order", "segments"]
)
def _backward_kernel(
    q, k, v, grad, delta, lse2, keys, words, starts, counts, grad_q, partials,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_ub, stride_ul, stride_uh,
    stride_db, stride_dl, stride_dh,
    length, heads, tiles_per_sequence, first_tile, num_tiles, first_part, num_rows, row_starts,
    order, scale, scale_log2, segments,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SEGMENTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program takes one tile of queries for MEMBERS heads. Row m of its matrices belongs to query m % QUERIES of
    the tile, and to head m // QUERIES of these heads.

    If SEGMENTED is true, the program takes only one segment of the tile's list. It then computes this segment's part of
    the gradient of q and writes the part to `grad_q`, which in this case is fp32
    [N, segments, num_tiles, MEMBERS * QUERIES, D]. `_add_segments_kernel` afterwards adds the parts of all segments.
    """
    slot = tl.load(order + tl.program_id(0) % num_tiles)
    number_of_head = tl.program_id(0) // num_tiles
    if SEGMENTED:
        segment = number_of_head % segments
        number_of_head = number_of_head // segments
    part = first_part + number_of_head * SPLITS
    number = first_tile + slot
    batch = number // tiles_per_sequence
    tile = number % tiles_per_sequence
    split = part % SPLITS
    kv_head = part // SPLITS
    batch64 = batch.to(tl.int64)

    row = tl.arange(0, MEMBERS * QUERIES)
    bit = row % QUERIES
    member = split * MEMBERS + row // QUERIES
    head = kv_head * GROUP + member
    token = tile * QUERIES + bit
    valid = (token < length) & (member < GROUP)
    dims = tl.arange(0, D)[None, :]
    token64, head64 = token.to(tl.int64)[:, None], head.to(tl.int64)[:, None]

    # Rows that do not exist are 0, so they add 0 to the gradients of the keys.
    pointers = q + batch64 * stride_qb + (token64 * stride_ql + head64 * stride_qh + dims)
    q_tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    pointers = grad + batch64 * stride_ub + (token64 * stride_ul + head64 * stride_uh + dims)
    u_tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    position = (batch64 * heads + head) * length + token
    row_lse2 = tl.load(lse2 + position, mask=valid, other=0.0)
    row_delta = tl.load(delta + position, mask=valid, other=0.0)

    k += batch64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v += batch64 * stride_vb + kv_head.to(tl.int64) * stride_vh
    start_of_list = tl.load(starts + number)
    keys += start_of_list
    words += start_of_list
    count = tl.load(counts + number)
    first_row = number_of_head.to(tl.int64) * num_rows + tl.load(row_starts + slot)
    target = partials + first_row * (2 * D)
    if SEGMENTED:
        # From here on, the list is this program's segment: whole steps, or nothing where the list is short.
        length_of_segment = tl.cdiv(tl.cdiv(count, KEYS), segments) * KEYS
        before = segment * length_of_segment
        keys += before
        words += before
        target += before.to(tl.int64) * (2 * D)
        count = tl.minimum(count - before, length_of_segment)

    acc = tl.zeros([MEMBERS * QUERIES, D], tl.float32)
    step = tl.arange(0, KEYS)
    mine = tl.full([1], 1, tl.int32) << bit
    # The keys of the next step are loaded one step ahead, so that its gathers need not wait for them.
    key = tl.load(keys + step, mask=step < count, other=0)
    for start in range(0, count, KEYS):
        entries = start + step
        next_key = tl.load(keys + KEYS + entries, mask=KEYS + entries < count, other=0)
        key64 = key.to(tl.int64)[:, None]
        k_tile = tl.load(k + (key64 * stride_kl + dims))
        v_tile = tl.load(v + (key64 * stride_vl + dims))
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        by_probs = tl.dot(u_tile, tl.trans(v_tile), input_precision=PRECISION)
        probs = tl.exp2(logits * scale_log2 - row_lse2[:, None])
        word = tl.load(words + entries, mask=entries < count, other=0)
        if start + length > 0:  # always true, as in the forward pass (triton_gathered_forward.py)
            probs = tl.where((word[None, :] & mine[:, None]) != 0, probs, 0.0)
        by_logits = (probs * (by_probs - row_delta[:, None])).to(k_tile.dtype)
        exists = (entries < count)[:, None]
        pushed = target + (entries.to(tl.int64)[:, None] * (2 * D) + dims)
        by_v = tl.dot(tl.trans(probs.to(u_tile.dtype)), u_tile, input_precision=PRECISION)
        if D > 128:  # the registers cannot hold the results of all three products
            tl.store(pushed, by_v.to(target.dtype.element_ty), mask=exists)
        by_k = tl.dot(tl.trans(by_logits), q_tile, input_precision=PRECISION) * scale
        if D > 128:
            tl.store(pushed + D, by_k.to(target.dtype.element_ty), mask=exists)
        # The product does not accumulate into acc. If it did, it would still run when the next iteration begins its
        # first product, and the compiler would then wait for each matrix instruction separately.
        acc += tl.dot(by_logits, k_tile, input_precision=PRECISION) * scale
        if D <= 128:
            tl.store(pushed, by_v.to(target.dtype.element_ty), mask=exists)
            tl.store(pushed + D, by_k.to(target.dtype.element_ty), mask=exists)
        key = next_key
    if SEGMENTED:
        pointers = grad_q + (tl.program_id(0) * (MEMBERS * QUERIES) + row)[:, None] * D + dims
        tl.store(pointers, acc)
    else:
        pointers = grad_q + batch64 * stride_db + (token64 * stride_dl + head64 * stride_dh + dims)
        tl.store(pointers, acc.to(grad_q.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "first_part", "order", "segments"])
def _add_segments_kernel(
    of_segments, grad_q, stride_db, stride_dl, stride_dh,
    length, tiles_per_sequence, first_tile, num_tiles, first_part, order, segments,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """For one tile and one head, one program adds the segments' parts of the gradient of q in a fixed order."""
    place = tl.program_id(0) // MEMBERS % num_tiles
    number_of_head = tl.program_id(0) // MEMBERS // num_tiles
    number = first_tile + tl.load(order + place)
    part = first_part + number_of_head * SPLITS
    member = part % SPLITS * MEMBERS + tl.program_id(0) % MEMBERS
    head = part // SPLITS * GROUP + member

    query, dims = tl.arange(0, QUERIES), tl.arange(0, D)[None, :]
    row = (number_of_head * segments * num_tiles + place) * MEMBERS + tl.program_id(0) % MEMBERS
    pointers = of_segments + (row * QUERIES + query)[:, None] * D + dims
    acc = tl.zeros([QUERIES, D], tl.float32)
    for _ in range(segments):
        acc += tl.load(pointers)
        pointers += num_tiles * (MEMBERS * QUERIES * D)
    batch = number // tiles_per_sequence
    token = number % tiles_per_sequence * QUERIES + query
    pointers = grad_q + batch.to(tl.int64) * stride_db + head.to(tl.int64) * stride_dh
    pointers += token.to(tl.int64)[:, None] * stride_dl + dims
    tl.store(pointers, acc.to(grad_q.dtype.element_ty), mask=((token < length) & (member < GROUP))[:, None])
