"""Computes attention of one query per sequence over selected keys and its local window, split along the keys.

The rows of a matrix product are the query heads of one key-value head. The keys are divided into parts, and each
program computes attention to one part. For each key-value head, the program that finishes last joins the results of all
parts in a fixed order and applies gate G1.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.attention.triton_tiles import FLOOR, MASKED, input_precision
from gsa_kernels.decode.state import DecodeWorkspace, LayerCache
from gsa_kernels.decode.triton_score import load_pages, row_offsets
from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.row_product.triton_counter import count_one
from gsa_kernels.triton_constants import LOG2_E


class Tile(NamedTuple):
    """Describes how many keys a program takes at a time."""

    keys: int
    warps: int
    stages: int


# If parts fit in one tile, all their keys and values load at once. Measured on an H200.
ONE_TILE = (Tile(64, 4, 1), Tile(128, 4, 1))
LONG_TILE = Tile(64, 4, 2)
FLOAT_TILE = Tile(32, 4, 1)
WIDE_TILE, WIDE_LONG_TILE = Tile(64, 8, 1), Tile(32, 4, 2)
"""Tiles for heads of 256: eight warps hold 64 keys and values in registers. Longer parts use tiles in two stages."""
STRIP = 16
"""Number of slots in a strip. A slot is a key to attend to, and parts take strips in turns. The slots of a part thus do
not depend on the number of selected keys, so a program can load its keys' indices and this number at the same time."""


def attend_to_indices(
    q: torch.Tensor,
    cache: LayerCache,
    workspace: DecodeWorkspace,
    local_window: int,
    gate_logits: torch.Tensor | None,
    out: torch.Tensor,
    chain: tuple[bool, bool],
) -> None:
    """Launch the kernel with the arguments of `decode_attend`, which has checked them.

    The flags of `chain` say whether this kernel starts before the previous kernel ends, and whether the previous kernel
    belongs to the selection. In the latter case, the kernels that wrote q and the gate have already ended, so this
    kernel reads q and the gate before its wait.
    """
    chained, behind_selection = chain
    batch, heads, dim = q.shape
    k, v, selection, table = cache.k, cache.v, cache.selection, cache.block_table
    kv_heads = k.shape[2]
    group = heads // kv_heads
    k_cap = selection.indices.shape[1]
    splits = workspace.splits
    most_keys = k_cap + local_window
    tile = _tile(q, ceil_div(most_keys, splits * STRIP) * STRIP)
    _attend_kernel[(splits, kv_heads, batch)](
        q,
        k,
        v,
        gate_logits,
        cache.lengths,
        cache.starts,
        table,
        selection.indices,
        selection.counts,
        workspace.partial_out,
        *workspace.partial_stats,
        workspace.arrivals,
        workspace.written if cache.counted else None,
        out,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        0 if table is None else table.stride(0),
        *(gate_logits.stride()[:2] if gate_logits is not None else (0, 0)),
        *out.stride()[:2],
        k_cap,
        cache.max_length,
        local_window,
        dim**-0.5 * LOG2_E.value,
        PAGE=cache.page_size,
        GROUP=group,
        BLOCK_G=next_power_of_2(group),
        ROWS=max(next_power_of_2(group), 16),
        D=dim,
        KEYS=tile.keys,
        SPLITS=splits,
        STRIP=STRIP,
        HAS_GATE=gate_logits is not None,
        PRECISION=input_precision(q.dtype),
        CHAINED=chained,
        AFTER_SELECTION=behind_selection,
        IN_CHAIN=chained and cache.in_chain,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if chained else {}),
    )


def _tile(q: torch.Tensor, part: int) -> Tile:
    if q.dtype == torch.float32:
        return FLOAT_TILE
    if q.shape[2] > 128:
        return WIDE_TILE if part <= WIDE_TILE.keys else WIDE_LONG_TILE
    return next((tile for tile in ONE_TILE if part <= tile.keys), LONG_TILE)


@triton.jit(do_not_specialize=["max_length", "local_window"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    lengths_ptr,
    starts_ptr,
    table_ptr,
    indices_ptr,
    counts_ptr,
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    arrivals_ptr,
    written_ptr,
    out_ptr,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    stride_vb,
    stride_vl,
    stride_vh,
    stride_tb,
    stride_gb,
    stride_gh,
    stride_ob,
    stride_oh,
    k_cap,
    max_length,
    local_window,
    scale_log2,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    STRIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
    AFTER_SELECTION: tl.constexpr,
    IN_CHAIN: tl.constexpr,
):
    """One program takes one part of the keys of one key-value head of one sequence.

    The next kernel may start at one of three times:
    - if IN_CHAIN is true, after this kernel's wait
    - otherwise, if the previous kernel belongs to the selection, at the end of this kernel
    - otherwise, after the loop over the keys
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    # Tensors that the previous kernel does not write are loaded while it still runs.
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + batch), max_length), 0)
    if CHAINED and not AFTER_SELECTION:
        gdc_wait()
    # The first slots are the top-k, without keys inside the window. Then come the keys of the window.
    lane = tl.arange(0, KEYS)
    slot = (lane // STRIP) * (STRIP * SPLITS) + split * STRIP + lane % STRIP
    dims = tl.arange(0, D)
    indices_ptr += batch * k_cap
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    if PAGE == 0:
        k_ptr += batch * stride_kb
        v_ptr += batch * stride_vb
    else:
        table_ptr += batch * stride_tb
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch).to(tl.int64)
        k_ptr += start * stride_kl
        v_ptr += start * stride_vl
    window_first = tl.maximum(length - local_window, 0)
    rows = tl.arange(0, ROWS)
    row_ok = rows < GROUP
    q_ptr += batch * stride_qb + kv_head * GROUP * stride_qh
    q_tile = tl.load(q_ptr + rows[:, None] * stride_qh + dims[None, :], mask=row_ok[:, None], other=0.0)
    out_rows = tl.arange(0, ROWS if SPLITS == 1 else BLOCK_G)
    gate = tl.zeros([ROWS if SPLITS == 1 else BLOCK_G, D], tl.float32)
    if HAS_GATE:
        gate_ptr += batch * stride_gb + kv_head * GROUP * stride_gh
        gate_ptrs = gate_ptr + out_rows[:, None] * stride_gh + dims[None, :]
        gate = tl.load(gate_ptrs, mask=(out_rows < GROUP)[:, None], other=0.0).to(tl.float32)

    maximum = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if IN_CHAIN and not AFTER_SELECTION:
        gdc_launch_dependents()
    if CHAINED and AFTER_SELECTION:
        # The selection's kernels have waited for all earlier kernels, including the one that wrote q.
        gdc_wait()
        if IN_CHAIN:
            gdc_launch_dependents()
    top = tl.load(indices_ptr + slot, mask=slot < k_cap, other=0)
    count = tl.minimum(tl.load(counts_ptr + batch), k_cap)
    slots = count + length - window_first
    for _ in range(split * STRIP, slots, KEYS * SPLITS):
        of_top = slot < count
        hit = (slot < slots) & ((of_top == 0) | (top < window_first))
        index = tl.where(of_top, top, window_first + slot - count)
        pages = load_pages(table_ptr, index, hit, PAGE)
        k_rows = row_offsets(pages, index, stride_kb, stride_kl, PAGE)
        v_rows = row_offsets(pages, index, stride_vb, stride_vl, PAGE)
        k_tile = tl.load(k_ptr + k_rows[:, None] + dims[None, :], mask=hit[:, None], other=0.0)
        v_tile = tl.load(v_ptr + v_rows[:, None] + dims[None, :], mask=hit[:, None], other=0.0)
        slot += KEYS * SPLITS
        top = tl.load(indices_ptr + slot, mask=slot < count, other=0)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        logits = tl.where(hit[None, :], logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * scale_log2)
        probs = tl.exp2(logits * scale_log2 - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    if CHAINED and not (IN_CHAIN or AFTER_SELECTION):
        gdc_launch_dependents()

    out_ptr += batch * stride_ob + kv_head * GROUP * stride_oh
    if SPLITS == 1:
        _store_gated(acc, total, gate, out_ptr, stride_oh, GROUP, ROWS, D, HAS_GATE)
        if written_ptr is not None:
            count_one(written_ptr)
    else:
        head = batch * tl.num_programs(1) + kv_head
        mine = (head * SPLITS + split) * GROUP + rows
        tl.store(partial_max_ptr + mine, maximum, mask=row_ok)
        tl.store(partial_sum_ptr + mine, total, mask=row_ok)
        tl.store(partial_out_ptr + mine[:, None] * D + dims[None, :], acc, mask=row_ok[:, None])
        tl.debug_barrier()  # all threads have stored their results before one thread announces them
        if tl.atomic_add(arrivals_ptr + head, 1) == SPLITS - 1:
            tl.store(arrivals_ptr + head, 0)  # for the next call
            sum_all, out_all = _join_parts(
                partial_out_ptr, partial_max_ptr, partial_sum_ptr, head * SPLITS, SPLITS, GROUP, BLOCK_G, D
            )
            _store_gated(out_all, sum_all, gate, out_ptr, stride_oh, GROUP, BLOCK_G, D, HAS_GATE)
            if written_ptr is not None:
                count_one(written_ptr)


@triton.jit
def _join_parts(
    partial_out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    first,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
):
    """Join the parts of one key-value head: (sum of probabilities [BLOCK_G], unnormalised output [BLOCK_G, D])."""
    rows = tl.arange(0, BLOCK_G)
    row_ok = rows < GROUP
    dims = tl.arange(0, D)
    # All loads come before the first use, so that the program waits for memory once. They bypass the first-level cache,
    # which does not see other programs' stores. Tuples grow by addition, because Triton has no starred tuples.
    maxima = ()
    sums = ()
    outs = ()
    for split in tl.static_range(SPLITS):
        part = (first + split) * GROUP + rows
        part_max = tl.load(partial_max_ptr + part, mask=row_ok, other=FLOOR, cache_modifier=".cg")
        part_sum = tl.load(partial_sum_ptr + part, mask=row_ok, other=0.0, cache_modifier=".cg")
        out_ptrs = partial_out_ptr + part[:, None] * D + dims[None, :]
        part_out = tl.load(out_ptrs, mask=row_ok[:, None], other=0.0, cache_modifier=".cg")
        maxima = maxima + (part_max,)  # type: ignore[assignment] # noqa: RUF005
        sums = sums + (part_sum,)  # type: ignore[assignment] # noqa: RUF005
        outs = outs + (part_out,)  # type: ignore[assignment] # noqa: RUF005
    maximum = tl.full([BLOCK_G], FLOOR, tl.float32)
    for split in tl.static_range(SPLITS):
        maximum = tl.maximum(maximum, maxima[split])
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for split in tl.static_range(SPLITS):
        share = tl.exp2(maxima[split] - maximum)
        total += sums[split] * share
        acc += outs[split] * share[:, None]
    return total, acc


@triton.jit
def _store_gated(
    acc,
    total,
    gate,
    out_ptr,
    stride_oh,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Store `acc` [ROWS, D] / `total` [ROWS], multiplied by the sigmoid of `gate` [ROWS, D]. `out_ptr` points to the
    output of the first head, which is row 0."""
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, D)[None, :]
    # A sequence without keys gives 0 instead of NaN.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_GATE:
        out = out * tl.sigmoid(gate)
    tl.store(out_ptr + rows * stride_oh + dims, out.to(out_ptr.dtype.element_ty), mask=rows < GROUP)
