"""Computes attention over key lists. For each tile of queries, a key list holds every key that at least one query of
the tile selects. A program gathers the keys of one tile for several query heads of one key-value head."""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import AttentionInputs
from gsa_kernels.attention.triton_tiles import FLOOR, MASKED, Tiles, input_precision
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import TILE_QUERIES, ceil_div, next_power_of_2
from gsa_kernels.triton_constants import LN_2, LOG2_E

_MAX_ROWS = 128


def forward_tiles(head_size: int, dtype: torch.dtype) -> Tiles:
    """Return the tile shape. Its field `queries` is an upper bound on the rows, which are queries times heads."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if head_size > 128:
        # One program runs per multiprocessor, because 128 registers of each thread hold the output. Shared memory holds
        # 64 KiB of q and three stages of 16 KiB each of k and of v. With 64 keys the compiler waits for each matrix
        # instruction.
        return Tiles(_MAX_ROWS, 32, 8, 3)
    # 128 registers leave room for two programs per multiprocessor. One multiplies while the other computes its
    # exponentials.
    return Tiles(_MAX_ROWS, 64, 8, 2, registers=128)


def heads_per_program(group: int, rows: int) -> int:
    """Return how many query heads of one key-value head share a program, a power of two."""
    return max(1, min(next_power_of_2(group), rows // TILE_QUERIES))


def gathered_forward(inputs: AttentionInputs, lists: KeyLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on inputs that `gathered_attention` has checked.

    Returns:
        out: [B, L, H, D], gated if there are gate logits, in the memory order of q
        lse: fp32 [B, H, L], natural logarithm
    """
    q, k, v, gate_logits = inputs.q, inputs.k, inputs.v, inputs.gate_logits
    batch, length, heads, head_size = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    tiles = forward_tiles(head_size, q.dtype)
    members = heads_per_program(group, tiles.queries)
    splits = ceil_div(group, members)
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    tiles_per_sequence = lists.counts.shape[1]
    _forward_kernel[(tiles_per_sequence * batch * kv_heads * splits,)](
        q,
        k,
        v,
        gate_logits,
        lists.keys,
        lists.words,
        lists.starts,
        lists.counts,
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *(gate_logits.stride()[:4] if gate_logits is not None else (0, 0, 0, 0)),
        *out.stride()[:3],
        length,
        heads,
        kv_heads,
        tiles_per_sequence,
        inputs.scale * LOG2_E.value,
        GROUP=group,
        MEMBERS=members,
        SPLITS=splits,
        D=head_size,
        QUERIES=TILE_QUERIES,
        KEYS=tiles.keys,
        COPIES=max(1, 32 * tiles.warps // tiles.keys),
        HAS_GATE=gate_logits is not None,
        PRECISION=input_precision(q.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    return out, lse


@triton.jit
def _forward_kernel(
    q, k, v, gate, keys, words, starts, counts, out, lse,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_gb, stride_gl, stride_gg, stride_gh,
    stride_ob, stride_ol, stride_oh,
    length, heads, kv_heads, tiles_per_sequence, scale_log2,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, COPIES: tl.constexpr, HAS_GATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program takes one tile of queries for MEMBERS heads. Row m of its matrices belongs to query m % QUERIES of
    the tile, and to head m // QUERIES of these heads.

    The programs of one key-value head are adjacent in the grid, so that the L2 cache holds the keys of this head.
    Within a head, the last tiles come first, because they have the longest lists.
    """
    tile = tiles_per_sequence - 1 - tl.program_id(0) % tiles_per_sequence
    part = tl.program_id(0) // tiles_per_sequence
    split = part % SPLITS
    kv_head = part // SPLITS % kv_heads
    batch = part // (SPLITS * kv_heads)
    batch64 = batch.to(tl.int64)

    row = tl.arange(0, MEMBERS * QUERIES)
    bit = row % QUERIES
    member = split * MEMBERS + row // QUERIES
    head = kv_head * GROUP + member
    token = tile * QUERIES + bit
    valid = (token < length) & (member < GROUP)
    dims = tl.arange(0, D)[None, :]
    token64, head64 = token.to(tl.int64)[:, None], head.to(tl.int64)[:, None]

    q += batch64 * stride_qb
    q_tile = tl.load(q + (token64 * stride_ql + head64 * stride_qh + dims), mask=valid[:, None], other=0.0)
    k += batch64 * stride_kb + kv_head.to(tl.int64) * stride_kh
    v += batch64 * stride_vb + kv_head.to(tl.int64) * stride_vh
    number = batch * tiles_per_sequence + tile
    start_of_list = tl.load(starts + number)
    keys += start_of_list
    words += start_of_list
    count = tl.load(counts + number)

    maximum = tl.full([MEMBERS * QUERIES], FLOOR, tl.float32)
    total = tl.zeros([MEMBERS * QUERIES], tl.float32)
    acc = tl.zeros([MEMBERS * QUERIES, D], tl.float32)
    step = tl.arange(0, KEYS)
    mine = tl.full([1], 1, tl.int32) << bit
    # The keys and words of the next step are loaded one step ahead, so that its gathers need not wait for them.
    key = tl.load(keys + step, mask=step < count, other=0)
    loaded = load_entry_words(words, step, count, COPIES)
    for start in range(0, count, KEYS):
        ahead = start + KEYS + step
        next_key = tl.load(keys + ahead, mask=ahead < count, other=0)
        next_loaded = load_entry_words(words, ahead, count, COPIES)
        key64 = key.to(tl.int64)[:, None]
        k_tile = tl.load(k + (key64 * stride_kl + dims))
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        # The condition is always true. Without a branch, the compiler tests the bits while the product runs and packs
        # the results into registers, so that a step has 16% more instructions.
        if start + length > 0:
            # Any operation on loaded words waits for the load, so this one comes a step after it.
            word = tl.max(loaded, 1)
            logits = tl.where((word[None, :] & mine[:, None]) != 0, logits, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * scale_log2)
        probs = tl.exp2(logits * scale_log2 - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(probs, 1)
        v_tile = tl.load(v + (key64 * stride_vl + dims))
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
        key, loaded = next_key, next_loaded

    # A row without keys, which no selection contains, gives 0 instead of NaN.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if HAS_GATE:
        gate += batch64 * stride_gb + kv_head.to(tl.int64) * stride_gg
        pointers = gate + (token64 * stride_gl + member.to(tl.int64)[:, None] * stride_gh + dims)
        logits = tl.load(pointers, mask=valid[:, None], other=0.0)
        acc = acc * tl.sigmoid(logits.to(tl.float32))
    pointers = out + batch64 * stride_ob + (token64 * stride_ol + head64 * stride_oh + dims)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=valid[:, None])
    lse += batch64 * heads * length
    tl.store(lse + head.to(tl.int64) * length + token, (maximum + tl.log2(total)) * LN_2, mask=valid)


@triton.jit
def load_entry_words(words, entries, count, COPIES: tl.constexpr):
    """Load the mask words of the entries (keys), in shape [entries, COPIES]. Words at or beyond `count` are 0.

    Each word is loaded COPIES times, so that every thread loads one element. Without copies, the compiler would use the
    register layout of the logits. In this layout, each thread would load and mask 16 words.
    """
    several = entries[:, None] + tl.zeros([1, COPIES], tl.int32)
    return tl.load(words + several, mask=several < count, other=0)
