"""Computes the joined projection of one row and then `enter_token` on its result, in one launch.

A program takes pairs of the weight's rows, such as two channels that rotate together, or a value and its gate. It
therefore needs no results of other programs, except for the indexer's norms, which need whole heads. The last of the
indexer's programs to finish applies these norms.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.decode.entry_reference import AngleTable, Entered, EntryCache, EntrySizes, JoinedProduct
from gsa_kernels.decode.triton_entry import enter_index
from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.row_product.triton_product import load_piece, load_rows, pieces


class PairTiling(NamedTuple):
    """Describes how a launch divides the weight."""

    pairs: int
    """Number of pairs of rows that a program multiplies at a time, a power of two."""
    programs: int
    """Largest number of programs, which take tiles in turns and load the next tile while they multiply."""


DEFAULT_TILING = PairTiling(2, 528)
"""Chosen by measurements of the product alone on an H200."""

_WARPS, _MOST_REGISTERS = 4, 128
"""Warps per program and registers per thread, so that 528 programs run at once on an H100 or H200."""


HEADS, GATE, INDEX = "heads", "gate", "index"


class Part(NamedTuple):
    """Describes which rows of the joined product a launch computes."""

    sections: tuple[str, ...]
    """Some of HEADS (queries, keys, values, G2), GATE (G1) and INDEX (the indexer). A layer may lack some of these
    sections."""

    into: Entered | None = None
    """Tensors into which to write the results that attention and selection need; None allocates all of them."""

    beside: bool = False
    """Whether to run at the same time as the previous kernel. The previous kernel must let this launch start only after
    its own wait. It must neither write x nor read what this launch writes."""

    waits: bool = True
    """If False, with `beside`, this launch never waits for the previous kernel. The next kernel must then wait for this
    launch and, by a counter, for the previous kernel (rule 5 of row_product/op.py)."""

    restarts: torch.Tensor | None = None
    """int32 [1]: a counter that this launch sets to 0 after all previous kernels have ended; not with `beside`."""

    arrivals: torch.Tensor | None = None
    """int32 [1], 0 between launches: a counter that INDEX with norms of the indexer needs; not with `beside`."""


def launch_joined(
    x: torch.Tensor,
    product: JoinedProduct,
    sizes: EntrySizes,
    table: AngleTable,
    cache: EntryCache,
    slot: torch.Tensor,
    out: Entered,
    tiling: PairTiling,
    part: Part,
    chained: bool,
) -> None:
    """Launch the kernel with the checked arguments of `enter_row`. If `chained`, it starts before the previous kernel
    ends."""
    columns = x.shape[1]
    first, second = pieces(columns)
    values_from, gates_from, index_from, weights_from, tiles = _sections(sizes, tiling.pairs, part.sections)
    programs = min(tiling.programs, tiles)
    has_index = sizes.index_heads > 0
    index_keys = cache.index_keys if has_index else None
    index_norms: tuple[torch.Tensor | float | None, ...] = (None, None, None, None, None)
    if has_index and INDEX in part.sections and product.index_norms is not None:
        raw = x.new_empty((1 + sizes.index_heads) * sizes.index_dim, dtype=torch.float32)
        index_norms = (*product.index_norms, sizes.eps, raw, part.arrivals)
    _joined_kernel[(programs,)](
        x,
        product.weight,
        product.norm.weight,
        product.bias,
        table.values,
        table.lengths,
        slot,
        part.restarts,
        *index_norms,
        *out,
        cache.k,
        cache.v,
        index_keys,
        cache.k.stride(1),
        cache.k.stride(2),
        cache.v.stride(1),
        cache.v.stride(2),
        index_keys.stride(1) if index_keys is not None else 0,
        product.norm.eps,
        COLUMNS=columns,
        TILE=tiling.pairs,
        FIRST=first,
        SECOND=second,
        Q=sizes.q,
        K=sizes.k,
        VALUE_GATE=sizes.value_gate,
        GATE=sizes.gate,
        D=sizes.head_dim,
        HI=sizes.index_heads,
        DI=max(sizes.index_dim, 2),
        BLOCK_H=next_power_of_2(max(sizes.index_heads, 1)),
        BLOCK_D=next_power_of_2(max(sizes.index_dim, 2)),
        CHANNELS=table.channels,
        INDEX_CHANNELS=table.index_channels,
        VALUES_FROM=values_from,
        GATES_FROM=gates_from,
        INDEX_FROM=index_from,
        WEIGHTS_FROM=weights_from,
        TILES=tiles,
        LOOPS=programs < tiles,
        CHAINED=chained,
        BESIDE=part.beside,
        WAITS=part.waits,
        num_warps=_WARPS,
        maxnreg=_MOST_REGISTERS,
        **({"launch_pdl": True} if chained else {}),
    )


def _sections(sizes: EntrySizes, tile: int, wanted: tuple[str, ...]) -> tuple[int, int, int, int, int]:
    """Return the first tile of each of four sections, and the end of the last section.

    A section outside `wanted` is empty. The section of attention's q and k comes first, at tile 0. The four others
    follow: the values, the gate G1, the indexer's projections and the indexer's head weights.
    """
    values, heads = sizes.value_gate or sizes.k // 2, sizes.index_heads
    of_indexer = (1 + heads) * sizes.index_dim if heads else 0
    ends = [0]
    for pairs in (
        (sizes.q + sizes.k) // 2 * (HEADS in wanted),
        values * (HEADS in wanted),
        sizes.gate // 2 * (GATE in wanted),
        of_indexer // 2 * (INDEX in wanted),
        (heads + 1) // 2 * (INDEX in wanted),
    ):
        ends.append(ends[-1] + ceil_div(pairs, tile))
    return ends[1], ends[2], ends[3], ends[4], ends[5]


@triton.jit
def _pairs_of(
    tile,
    TILE: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    VALUE_GATE: tl.constexpr,
    GATE: tl.constexpr,
    D: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    VALUES_FROM: tl.constexpr,
    GATES_FROM: tl.constexpr,
    INDEX_FROM: tl.constexpr,
    WEIGHTS_FROM: tl.constexpr,
):
    """Return, for each pair of rows: the first row, the second row, the end of their section, the indices of the cosine
    and the sine in the table, and whether the pair rotates.

    All results are [TILE]. The first `channels` rows of a head rotate in pairs (i, i + channels / 2). The other n
    rows form unrotated pairs (i, i + n / 2). If values have gates, the K value rows precede the K gate rows, and rows i
    and i + K form a pair.
    """
    VALUES: tl.constexpr = Q + K
    GATES: tl.constexpr = VALUES + K + VALUE_GATE
    INDEX: tl.constexpr = GATES + GATE
    WEIGHTS: tl.constexpr = INDEX + (1 + HI) * DI if HI else INDEX
    VALUE_UNIT: tl.constexpr = 2 * K if VALUE_GATE else D
    is_values = tile >= VALUES_FROM
    is_gates = tile >= GATES_FROM
    is_index = tile >= INDEX_FROM
    is_weights = tile >= WEIGHTS_FROM
    before = tl.where(is_values, VALUES_FROM, 0)
    before = tl.where(is_gates, GATES_FROM, before)
    before = tl.where(is_index, INDEX_FROM, before)
    before = tl.where(is_weights, WEIGHTS_FROM, before)
    start = tl.where(is_values, VALUES, 0)
    start = tl.where(is_gates, GATES, start)
    start = tl.where(is_index, INDEX, start)
    start = tl.where(is_weights, WEIGHTS, start)
    end = tl.where(is_values, GATES, VALUES)
    end = tl.where(is_gates, INDEX, end)
    end = tl.where(is_index, WEIGHTS, end)
    end = tl.where(is_weights, WEIGHTS + HI, end)
    half = tl.where(is_values, VALUE_UNIT // 2, D // 2)
    half = tl.where(is_gates, D // 2, half)
    half = tl.where(is_index, DI // 2, half)
    half = tl.where(is_weights, 1, half)
    turning = tl.where(is_values, 0, CHANNELS // 2)
    turning = tl.where(is_index, INDEX_CHANNELS // 2, turning)
    turning = tl.where(is_weights, 0, turning)
    pairs = (tile - before) * TILE + tl.arange(0, TILE)
    within = pairs % half
    turns = within < turning
    first = start + pairs // half * (2 * half) + tl.where(turns, within, within + turning)
    second = first + tl.where(turns, turning, half - turning)
    cos_at = tl.where(is_index, 2 * CHANNELS, 0) + within
    return first, second, end, cos_at, cos_at + 2 * turning, turns & (first < end)


@triton.jit
def _joined_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    table_ptr,
    lengths_ptr,
    slot_ptr,
    restarts_ptr,
    norm_index_q_ptr,
    norm_index_k_ptr,
    index_eps,
    raw_index_ptr,
    arrivals_ptr,
    q_ptr,
    gate_ptr,
    index_queries_ptr,
    index_weights_ptr,
    k_ptr,
    v_ptr,
    index_keys_ptr,
    stride_kh,
    stride_kl,
    stride_vh,
    stride_vl,
    stride_il,
    eps,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    VALUE_GATE: tl.constexpr,
    GATE: tl.constexpr,
    D: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    VALUES_FROM: tl.constexpr,
    GATES_FROM: tl.constexpr,
    INDEX_FROM: tl.constexpr,
    WEIGHTS_FROM: tl.constexpr,
    TILES: tl.constexpr,
    LOOPS: tl.constexpr,
    CHAINED: tl.constexpr,
    BESIDE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """One program takes the tiles start, start + programs, ... of TILE pairs of rows."""
    if CHAINED:
        gdc_launch_dependents()
    start = tl.program_id(0)
    step = tl.num_programs(0)
    TURNED: tl.constexpr = INDEX_CHANNELS if norm_index_q_ptr is None else 0  # norms come before the rotation
    # The weight is loaded before the wait, because no kernel of the chain writes it, and kept in registers.
    first, second, end, cos_at, sin_at, turns = _pairs_of(
        start, TILE, Q, K, VALUE_GATE, GATE, D, HI, DI, CHANNELS, TURNED,
        VALUES_FROM, GATES_FROM, INDEX_FROM, WEIGHTS_FROM,
    )  # fmt: skip
    w = load_rows(weight_ptr, first, first < end, COLUMNS, 0, FIRST)
    other = load_rows(weight_ptr, second, second < end, COLUMNS, 0, FIRST)
    if SECOND:
        w_second = load_rows(weight_ptr, first, first < end, COLUMNS, FIRST, SECOND)
        other_second = load_rows(weight_ptr, second, second < end, COLUMNS, FIRST, SECOND)
    norm = load_piece(norm_ptr, COLUMNS, 0, FIRST, "")
    if SECOND:
        norm_second = load_piece(norm_ptr, COLUMNS, FIRST, SECOND, "")
    table_ptr += tl.load(lengths_ptr).to(tl.int64) * (2 * CHANNELS + 2 * INDEX_CHANNELS)
    cos = tl.load(table_ptr + cos_at, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(table_ptr + sin_at, mask=turns, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr).to(tl.int64)
    k_ptr += slot * stride_kl
    v_ptr += slot * stride_vl
    if HI:
        index_keys_ptr += slot * stride_il
    if CHAINED and not BESIDE:
        gdc_wait()
    if restarts_ptr is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if start == 0:
            tl.store(restarts_ptr, 0)

    # If the previous kernel still runs, loads bypass the first-level cache, which may hold old values.
    CACHE: tl.constexpr = ".cg" if BESIDE else ""
    x = load_piece(x_ptr, COLUMNS, 0, FIRST, CACHE)
    squares = tl.sum(x * x)
    x *= norm
    if SECOND:
        x_second = load_piece(x_ptr, COLUMNS, FIRST, SECOND, CACHE)
        squares += tl.sum(x_second * x_second)
        x_second *= norm_second
    scale = tl.rsqrt(squares / COLUMNS + eps)

    VALUES: tl.constexpr = Q + K
    GATES: tl.constexpr = VALUES + K + VALUE_GATE
    INDEX: tl.constexpr = GATES + GATE
    for tile in range(start, TILES, step):
        if LOOPS:  # load the next tile; nothing is read beyond the last one
            next_first, next_second, next_end, cos_at, sin_at, turns = _pairs_of(
                tile + step, TILE, Q, K, VALUE_GATE, GATE, D, HI, DI, CHANNELS, TURNED,
                VALUES_FROM, GATES_FROM, INDEX_FROM, WEIGHTS_FROM,
            )  # fmt: skip
            next_w = load_rows(weight_ptr, next_first, next_first < next_end, COLUMNS, 0, FIRST)
            next_other = load_rows(weight_ptr, next_second, next_second < next_end, COLUMNS, 0, FIRST)
            if SECOND:
                next_w_second = load_rows(
                    weight_ptr, next_first, next_first < next_end, COLUMNS, FIRST, SECOND
                )
                next_other_second = load_rows(
                    weight_ptr, next_second, next_second < next_end, COLUMNS, FIRST, SECOND
                )
            next_cos = tl.load(table_ptr + cos_at, mask=turns, other=1.0).to(tl.float32)
            next_sin = tl.load(table_ptr + sin_at, mask=turns, other=0.0).to(tl.float32)
        a = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        b = tl.sum(other.to(tl.float32) * x[None, :], axis=1)
        if SECOND:
            a += tl.sum(w_second.to(tl.float32) * x_second[None, :], axis=1)
            b += tl.sum(other_second.to(tl.float32) * x_second[None, :], axis=1)
        a *= scale
        b *= scale
        if bias_ptr is not None:
            a += tl.load(bias_ptr + first, mask=first < end, other=0.0).to(tl.float32)
            b += tl.load(bias_ptr + second, mask=second < end, other=0.0).to(tl.float32)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned

        if tile < VALUES_FROM:
            _put_turned(a, first, end, q_ptr, k_ptr, stride_kh, Q, D)
            _put_turned(b, second, end, q_ptr, k_ptr, stride_kh, Q, D)
        elif tile < GATES_FROM:
            if VALUE_GATE:
                _put_in_heads(a * tl.sigmoid(b), first - VALUES, first < VALUES + K, v_ptr, stride_vh, D)
            else:
                _put_in_heads(a, first - VALUES, first < end, v_ptr, stride_vh, D)
                _put_in_heads(b, second - VALUES, second < end, v_ptr, stride_vh, D)
        elif tile < INDEX_FROM:
            if GATE:
                tl.store(gate_ptr + first - GATES, a.to(gate_ptr.dtype.element_ty), mask=first < end)
                tl.store(gate_ptr + second - GATES, b.to(gate_ptr.dtype.element_ty), mask=second < end)
        else:
            if HI:
                if norm_index_q_ptr is None:
                    index_ptrs = (index_keys_ptr, index_queries_ptr, index_weights_ptr)
                else:
                    index_ptrs = (raw_index_ptr, raw_index_ptr + DI, index_weights_ptr)
                _put_index(a, first - INDEX, end - INDEX, index_ptrs, HI, DI)
                _put_index(b, second - INDEX, end - INDEX, index_ptrs, HI, DI)
                if norm_index_q_ptr is not None:  # noqa: SIM102 - decided when the kernel is compiled
                    if tile < WEIGHTS_FROM:
                        tl.debug_barrier()  # all threads have stored their results before one thread announces them
                        if tl.atomic_add(arrivals_ptr, 1) == WEIGHTS_FROM - INDEX_FROM - 1:
                            tl.store(arrivals_ptr, 0)  # for the next launch
                            # The loads bypass the first-level cache, which does not see other programs' stores.
                            cos_ptr = table_ptr + 2 * CHANNELS
                            sin_ptr = cos_ptr + INDEX_CHANNELS
                            enter_index(
                                raw_index_ptr, norm_index_q_ptr, norm_index_k_ptr, cos_ptr, sin_ptr,
                                index_queries_ptr, index_keys_ptr, 0,
                                index_eps, HI, DI, BLOCK_H, BLOCK_D, INDEX_CHANNELS, False, ".cg",
                            )  # fmt: skip
        if LOOPS:
            first = next_first
            second = next_second
            end = next_end
            w = next_w
            other = next_other
            cos = next_cos
            sin = next_sin
            if SECOND:
                w_second = next_w_second
                other_second = next_other_second
    if CHAINED and BESIDE and WAITS:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if start == 0:
            gdc_wait()


@triton.jit
def _put_in_heads(value, place, ok, ptr, stride_h, D: tl.constexpr):
    """Store channels. `place` is their index in all heads together."""
    ptrs = ptr + (place // D).to(tl.int64) * stride_h + place % D
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def _put_turned(value, row, end, q_ptr, k_ptr, stride_kh, Q: tl.constexpr, D: tl.constexpr):
    """Store queries where attention reads them, and keys in the cache."""
    tl.store(q_ptr + row, value.to(q_ptr.dtype.element_ty), mask=row < Q)
    _put_in_heads(value, row - Q, (row >= Q) & (row < end), k_ptr, stride_kh, D)


@triton.jit
def _put_index(value, place, end, ptrs, HI: tl.constexpr, DI: tl.constexpr):
    """Store values of the indexer. `place` counts its key, then its queries and head weights."""
    key_ptr, queries_ptr, weights_ptr = ptrs
    WEIGHTS: tl.constexpr = (1 + HI) * DI
    rounded = value.to(key_ptr.dtype.element_ty)
    ok = place < end
    tl.store(queries_ptr + place - DI, rounded, mask=ok & (place >= DI) & (place < WEIGHTS))
    weights = value.to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + place - WEIGHTS, weights, mask=ok & (place >= WEIGHTS))
    tl.store(key_ptr + place, rounded, mask=ok & (place < DI))
