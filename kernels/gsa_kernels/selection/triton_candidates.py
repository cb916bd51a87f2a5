"""Scores rows and keeps only the candidates of each row: the keys whose score reaches the row's threshold. For each
row, the kernel writes one bit per key (candidate or not), the sums for the variance, and the index and score of each
candidate."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.indexer.triton_scores import (
    load_queries,
    load_weights,
    score_options,
    score_tensors,
    score_tiles,
    tile_scores,
)
from gsa_kernels.limits import ceil_div
from gsa_kernels.selection.criteria import Outputs
from gsa_kernels.selection.triton_guess import Guesses
from gsa_kernels.selection.triton_search import count_bits, order_key, score_of_key


class _Tile(NamedTuple):
    columns: int  # keys
    registers: int  # of a thread
    most_stages: int  # of the loop over keys
    spans: int  # spans of keys per program


_TILE, _TILE_OF_8_HEADS = _Tile(32, 128, 3, 1), _Tile(64, 168, 1, 4)
"""The second tile is for 5 to 8 heads of at most 64 in bf16. The queries of 8 heads of 64 fill so much shared memory
that only one stage lets three programs share a multiprocessor. Products with more keys read less shared memory, and
more spans load the queries less often."""

_TIED_SPANS = 8
"""Spans of keys per program in the kernel for tiles in which many scores equal the threshold. Such tiles are rare, and
fewer programs skip the other tiles faster."""

_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Smallest finite fp32. Keys that are not causal score -inf, so they are not candidates even without a threshold."""


def columns_per_program(inputs: ScoreInputs) -> int:
    """Return the number of keys in the span of a program."""
    tiles = score_tiles(inputs)
    return tiles.cols * tiles.per_program


@dataclass(frozen=True)
class Candidates:
    """Holds the candidates of a chunk of rows, from `write_candidates`."""

    entries: torch.Tensor
    """int64 [B, at least R in whole tiles of rows, C]: the 32 bits of the score, plus the key times 2^32, in an order
    that may differ from run to run. Rows with more than C candidates contain nothing of use."""

    counts: torch.Tensor
    """int32 [B, R]: zeros at first, then the number of candidates, which may exceed C."""

    sums: torch.Tensor
    """fp32 [B, R, P, 2]: sums of (score - centre) and of its square over the causal keys of each span of
    `columns_per_program` keys. Spans before the documents of a tile's rows, or after the diagonal, may be unwritten."""


def write_candidates(
    inputs: ScoreInputs, rows: range, guesses: Guesses, candidates: Candidates, outputs: Outputs
) -> None:
    """Score `rows` for all their causal keys, and keep the keys that reach the row's threshold.

    A key whose score equals the threshold is dropped if its tile begins after position `last`, a value in `guesses`.
    The kernel sets the candidates' bits in the packed mask. For each tile of rows, the kernel writes the packed mask
    from the start of the first row's document up to the diagonal.
    """
    tiles, packed_mask = score_tiles(inputs), outputs.packed_mask
    room = candidates.entries.shape[2]
    assert room >= _tile(inputs).columns, "a full list takes one more tile's candidates at its start"
    num_spans = ceil_div(inputs.position(rows.stop - 1) + 1, columns_per_program(inputs))
    # Two kernels run, because the code for tiles with many equal scores would slow down the other tiles by a third.
    for is_tied, spans in ((False, _tile(inputs).spans), (True, _TIED_SPANS)):
        # Row tiles are the first grid axis, so that programs that run side by side add to different counts.
        grid = (ceil_div(len(rows), tiles.rows), ceil_div(num_spans, spans), inputs.batch)
        _candidates_kernel[grid](
            *score_tensors(inputs),
            inputs.document_starts,
            guesses.of_rows,
            guesses.tied,
            candidates.entries,
            candidates.counts,
            packed_mask,
            candidates.sums,
            inputs.query_start,
            rows.start,
            rows.stop,
            outputs.first_row,
            inputs.num_rows,
            inputs.num_keys,
            *packed_mask.shape[1:],
            candidates.sums.shape[2],
            *candidates.entries.shape[1:],
            inputs.indexer.keys.shape[2] ** -0.5,
            TIED=is_tied,
            SPANS=spans,
            **score_options(inputs, tiles) | _options(inputs),
        )


def _tile(inputs: ScoreInputs) -> _Tile:
    queries = inputs.indexer.queries
    heads, dim = queries.shape[2:]
    return _TILE_OF_8_HEADS if 4 < heads <= 8 and dim <= 64 and queries.dtype == torch.bfloat16 else _TILE


def _options(inputs: ScoreInputs) -> dict[str, int]:
    tile = _tile(inputs)
    return {
        "BLOCK_COLS": tile.columns,
        "TILES": columns_per_program(inputs) // tile.columns,
        "maxnreg": tile.registers,
        "num_stages": min(tile.most_stages, score_tiles(inputs).stages),
    }


@triton.jit
def append(list_ptr, before, word, up_to, score, column, threshold, ASM: tl.constexpr):
    """Store list_ptr[before + rank] = (score, column) if `score` reaches `threshold`.

    `rank` is the number of candidates whose bits in `word` are lower than the bit of this column. In `up_to`, the bit
    of this column and all lower bits are set. The code avoids `tl.store`, which would first exchange the values between
    threads.
    """
    if ASM:
        # popc shares a slow pipe with tanh, so it runs only where it is needed.
        tl.inline_asm_elementwise(
            """{
            .reg .pred candidate;
            .reg .b32 place;
            .reg .b64 address;
            setp.geu.f32 candidate, $5, $7;
            and.b32 place, $3, $4;
            @candidate popc.b32 place, place;
            add.s32 place, place, $2;
            mad.wide.s32 address, place, 8, $1;
            @candidate st.global.v2.b32 [address], {$5, $6};
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,f,r,f",
            [list_ptr.to(tl.int64), before - 1, word, up_to, score, column, threshold],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        place = before - 1 + count_bits(word & up_to, ASM)
        bits = score.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(list_ptr + place, (column.to(tl.int64) << 32) | bits, mask=(score < threshold) == 0)


@triton.jit(
    do_not_specialize=[
        "query_start",
        "row_start",
        "row_stop",
        "words_start",
        "num_rows",
        "length",
        "words_rows",
        "words_per_row",
        "sums_per_row",
        "list_rows",
    ]
)
def _candidates_kernel(
    q_ptr, k_ptr, weight_ptr, score_bias_ptr, weight_bias_ptr, starts_ptr, guesses_ptr, tied_ptr,
    candidates_ptr, counts_ptr, words_ptr, sums_ptr, query_start, row_start, row_stop, words_start, num_rows,
    length, words_rows, words_per_row, sums_per_row, list_rows, room, scale,
    HI: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, TILES: tl.constexpr, SIGMOID: tl.constexpr, TANH: tl.constexpr,
    PRECISION: tl.constexpr, TIED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One program scores BLOCK_ROWS queries for SPANS spans, each of up to TILES tiles of BLOCK_COLS keys.

    There are two launches. The launch with TIED handles each tile of queries in which some query has a finite `last`.
    The launch without TIED handles all other tiles.
    """
    first_span = tl.program_id(1) * SPANS
    batch = tl.program_id(2).to(tl.int64)
    first_row = row_start + tl.program_id(0) * BLOCK_ROWS
    first_position = query_start + first_row
    end_position = query_start + tl.minimum(first_row + BLOCK_ROWS, row_stop)
    first_col = first_span * (TILES * BLOCK_COLS)
    is_tied = tl.load(tied_ptr + batch * tl.num_programs(0) + tl.program_id(0)) != 0
    if (first_col >= end_position) | (is_tied != TIED):  # above the diagonal, or a tile of the other kernel
        return

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    row_ok = rows < row_stop
    tokens = batch * num_rows + rows
    starts = rows * 0
    first_start = first_row * 0
    last_start = first_row * 0
    if starts_ptr is not None:
        starts = tl.load(starts_ptr + tokens, mask=row_ok, other=2147483647)
        first_start = tl.min(starts)
        last_start = tl.max(tl.where(row_ok, starts, 0))
        # The span may end before the documents of all queries.
        if first_col + SPANS * TILES * BLOCK_COLS <= first_start:
            return

    queries = load_queries(q_ptr, tokens, row_ok, HI, DI, BLOCK_D)
    weights, biases, base = load_weights(
        weight_ptr, score_bias_ptr, weight_bias_ptr, tokens, row_ok, scale, HI, BLOCK_ROWS, SIGMOID, TANH
    )
    chunk_rows = row_stop - row_start
    chunk_row = batch * chunk_rows + rows - row_start
    threshold = tl.load(guesses_ptr + chunk_row * 3, mask=row_ok, other=float("inf"))
    # A NaN guess also becomes the lowest threshold, so that comparisons with NaN scores are well defined.
    threshold = tl.where(threshold > _LOWEST, threshold, _LOWEST)
    centre = tl.load(guesses_ptr + chunk_row * 3 + 1, mask=row_ok, other=0.0)
    if TIED:
        last = tl.load(guesses_ptr + chunk_row * 3 + 2, mask=row_ok, other=float("inf"))
    # Rows after the last one have their own lists, because they have candidates if a key is NaN.
    candidates_ptr += (batch * list_rows + rows - row_start) * room
    # Scalars are 64-bit; offsets within the tile are 32-bit.
    words_ptr += (batch * words_rows + first_row - words_start) * words_per_row
    local_rows = tl.arange(0, BLOCK_ROWS)
    bits = 1 << (tl.arange(0, BLOCK_COLS) % 32)
    for span in range(first_span, first_span + SPANS):
        start_col = span * (TILES * BLOCK_COLS)
        end_col = tl.minimum(end_position, start_col + TILES * BLOCK_COLS)
        if starts_ptr is not None:
            # Tiles before the documents of all queries are skipped, too.
            start_col = tl.maximum(start_col, first_start) // BLOCK_COLS * BLOCK_COLS
        # A row has four sums. Each adds two of every eight keys, which one thread holds after a product on Hopper.
        total = tl.zeros([BLOCK_ROWS, 4], dtype=tl.float32)
        squares = tl.zeros([BLOCK_ROWS, 4], dtype=tl.float32)

        for col in range(start_col, end_col, BLOCK_COLS):
            scores = tile_scores(
                queries,
                weights,
                biases,
                base,
                k_ptr + batch * length * DI,
                col,
                length,
                scale,
                HI,
                DI,
                BLOCK_D,
                BLOCK_ROWS,
                BLOCK_COLS,
                SIGMOID,
                TANH,
                PRECISION,
            )
            cols = col + tl.arange(0, BLOCK_COLS)
            edge = (col + BLOCK_COLS > first_position + 1) | (col < last_start)
            if edge:
                # Columns are counted from the first query. Positions of the rows would take registers in all tiles.
                visible = ((cols - query_start)[None, :] <= rows[:, None]) & (
                    cols[None, :] >= starts[:, None]
                )
                scores = tl.where(visible, scores, float("-inf"))

            if TIED:
                # After `last`, only scores above the threshold count. An infinite threshold stays: the next value is
                # NaN, and no score is below NaN, so even keys that are not causal would become candidates.
                higher = score_of_key(order_key(threshold) + 1)
                threshold = tl.where((col > last) & (threshold < float("inf")), higher, threshold)
                last = tl.where(col > last, float("inf"), last)
            # The comparison is "not below" instead of "at or above", so that a NaN stays a candidate.
            reaches = tl.where(scores < threshold[:, None], 0, bits[None, :])
            # The bits are distinct, so their sum is their union, including bit 31.
            words = tl.sum(tl.reshape(reaches, [BLOCK_ROWS, BLOCK_COLS // 32, 32]), axis=2)
            # A candidate's place follows the earlier candidates and the lower columns of this tile.
            sizes = count_bits(words, TANH)
            found = tl.sum(sizes, axis=1)
            there = tl.atomic_add(counts_ptr + chunk_row, found, mask=row_ok & (found > 0), sem="relaxed")

            # This work does not depend on the counts and overlaps with their load.
            index = col // 32 + tl.arange(0, BLOCK_COLS // 32)
            tl.store(
                words_ptr + local_rows[:, None] * words_per_row + index[None, :],
                words,
                mask=row_ok[:, None] & (index < words_per_row)[None, :],
            )
            distance = scores - centre[:, None]
            if edge:
                visible = ((cols - query_start)[None, :] <= rows[:, None]) & (
                    cols[None, :] >= starts[:, None]
                )
                distance = tl.where(visible, distance, 0.0)
            distance = tl.reshape(distance, [BLOCK_ROWS, BLOCK_COLS // 8, 4, 2])
            total += tl.sum(tl.sum(distance, axis=3), axis=1)
            squares += tl.sum(tl.sum(distance * distance, axis=3), axis=1)

            # A full list fails its row. Overwriting the start of the list then does no harm.
            there = tl.where(row_ok & (there + found <= room), there, 0)
            before = there[:, None]
            if BLOCK_COLS > 32:
                before += tl.cumsum(sizes, axis=1) - sizes
            append(
                candidates_ptr[:, None, None],
                before[:, :, None],
                words[:, :, None],
                tl.reshape(bits * 2 - 1, [1, BLOCK_COLS // 32, 32]),
                tl.reshape(scores, [BLOCK_ROWS, BLOCK_COLS // 32, 32]),
                tl.reshape(cols, [1, BLOCK_COLS // 32, 32]),
                threshold[:, None, None],
                TANH,
            )
        sums_ptrs = sums_ptr + (chunk_row * sums_per_row + span) * 2
        up_to_diagonal = row_ok & (span * (TILES * BLOCK_COLS) < end_position)
        tl.store(sums_ptrs, tl.sum(total, axis=1), mask=up_to_diagonal)
        tl.store(sums_ptrs + 1, tl.sum(squares, axis=1), mask=up_to_diagonal)
