"""Scores that keep only the candidates of each row: the keys whose score reaches the row's threshold.

Beside the scores' own arithmetic this kernel leaves, per row, one bit per key (candidate or not), the sums that
the variance needs, and the candidates' scores, moved together at the start of each span of `columns_per_program`
columns. At 128K tokens that is a fifteenth of the bytes of all scores.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.indexer.triton_scores import (
    ScoreInputs,
    load_queries,
    score_options,
    score_tiles,
    tile_scores,
)
from gsa_kernels.selection.triton_search import count_bits, window_words


def columns_per_program(inputs: ScoreInputs) -> int:
    """Keys in the span of a program."""
    tiles = score_tiles(inputs)
    return tiles.cols * tiles.per_program


def write_candidates(
    inputs: ScoreInputs,
    rows: range,
    guesses: torch.Tensor,
    scores: torch.Tensor,
    words: torch.Tensor,
    words_start: int,
    sums: torch.Tensor,
) -> None:
    """Score `rows` against all keys they see, and keep what reaches guesses[..., 0].

    Args:
        guesses: fp32 [B, R, 2]: threshold and centre of each row
        scores: fp32 [B, R, columns]; of each span the candidates' scores in order, from the span's first column
        words: int32 [B, rows, W]: bit s % 32 of word s // 32 of row r - words_start is set if s is a candidate.
            Written up to the diagonal, except before the documents of all rows of a tile.
        sums: fp32 [B, R, P, 2]: over the visible keys of the p-th `columns_per_program` columns, the sum of
            x - centre and of its square; written up to the diagonal
    """
    batch, length, _, dim = inputs.q_idx.shape
    tiles = score_tiles(inputs)
    grid = (
        triton.cdiv(rows.stop, columns_per_program(inputs)),
        triton.cdiv(len(rows), tiles.rows),
        batch,
    )
    _candidates_kernel[grid](
        inputs.q_idx,
        inputs.k_idx,
        inputs.weight_logits,
        inputs.score_bias,
        inputs.weight_bias,
        inputs.document_starts,
        guesses,
        scores,
        words,
        sums,
        rows.start,
        rows.stop,
        words_start,
        length,
        words.shape[1],
        words.shape[2],
        sums.shape[2],
        scores.stride(0),
        scores.stride(1),
        dim**-0.5,
        **score_options(inputs),
    )


@triton.jit
def store_if(ptr, offset, value, condition, ASM: tl.constexpr):
    """ptr[offset] = value where condition is 1: fp32.

    `tl.store` would first move everything to threads that are neighbours in memory, though the offsets are not.
    """
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u64 a;
            setp.ne.s32 p, $4, 0;
            mad.wide.s32 a, $2, 4, $1;
            @p st.global.f32 [a], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,f,r",
            [ptr.to(tl.int64), offset, value, condition],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(ptr + offset, value, mask=condition != 0)


@triton.jit(
    do_not_specialize=[
        "row_start",
        "row_stop",
        "words_start",
        "length",
        "words_rows",
        "words_per_row",
        "sums_per_row",
    ]
)
def _candidates_kernel(
    q_ptr,
    k_ptr,
    weight_ptr,
    score_bias_ptr,
    weight_bias_ptr,
    starts_ptr,
    guesses_ptr,
    scores_ptr,
    words_ptr,
    sums_ptr,
    row_start,
    row_stop,
    words_start,
    length,
    words_rows,
    words_per_row,
    sums_per_row,
    scores_stride_b,
    scores_stride_r,
    scale,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TILES: tl.constexpr,
    SIGMOID: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_ROWS queries against up to TILES tiles of BLOCK_COLS keys."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = row_start + tl.program_id(1) * BLOCK_ROWS
    end_col = tl.minimum(first_row + BLOCK_ROWS, row_stop)
    first_col = tl.program_id(0) * (TILES * BLOCK_COLS)
    if first_col >= end_col:  # above the diagonal
        return
    end_col = tl.minimum(end_col, first_col + TILES * BLOCK_COLS)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    row_ok = rows < row_stop
    tokens = batch * length + rows
    starts = rows * 0
    last_start = first_row * 0
    if starts_ptr is not None:
        starts = tl.load(starts_ptr + tokens, mask=row_ok, other=2147483647)
        # Tiles before every query's document are skipped too.
        skipped = tl.maximum(tl.min(starts), first_col) // BLOCK_COLS * BLOCK_COLS
        first_col = tl.maximum(first_col, skipped)
        last_start = tl.max(tl.where(row_ok, starts, 0))

    queries, weights, biases, base = load_queries(
        q_ptr,
        weight_ptr,
        score_bias_ptr,
        weight_bias_ptr,
        tokens,
        row_ok,
        HI,
        DI,
        BLOCK_D,
        BLOCK_ROWS,
        SIGMOID,
        TANH,
    )
    chunk_rows = row_stop - row_start
    chunk_row = batch * chunk_rows + rows - row_start
    threshold = tl.load(guesses_ptr + chunk_row * 2, mask=row_ok, other=float("inf"))
    centre = tl.load(guesses_ptr + chunk_row * 2 + 1, mask=row_ok, other=0.0)
    # Scalars in 64 bits, offsets within the tile in 32.
    scores_ptr += batch * scores_stride_b + (first_row - row_start).to(tl.int64) * scores_stride_r
    words_ptr += (batch * words_rows + first_row - words_start) * words_per_row
    local_rows = tl.arange(0, BLOCK_ROWS)
    place = local_rows * scores_stride_r + tl.program_id(0) * (TILES * BLOCK_COLS)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS], dtype=tl.float32)

    for col in range(first_col, end_col, BLOCK_COLS):
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
        edge = (col + BLOCK_COLS > first_row + 1) | (col < last_start)
        if edge:
            visible = (cols[None, :] <= rows[:, None]) & (cols[None, :] >= starts[:, None])
            scores = tl.where(visible, scores, centre[:, None])  # adds nothing to the sums
        distance = scores - centre[:, None]
        total += tl.sum(distance, axis=1)
        squares += tl.sum(distance * distance, axis=1)

        # Not below, rather than at or above: a NaN stays a candidate.
        reaches = tl.where(scores < threshold[:, None], 0, 1) << (cols & 31)[None, :]
        # Distinct bits: their sum is their union, bit 31 included.
        words = tl.sum(tl.reshape(reaches, [BLOCK_ROWS, BLOCK_COLS // 32, 32]), axis=2)
        index = col // 32 + tl.arange(0, BLOCK_COLS // 32)
        if edge:
            words &= window_words(index[None, :], starts[:, None], rows[:, None])
        tl.store(
            words_ptr + local_rows[:, None] * words_per_row + index[None, :],
            words,
            mask=row_ok[:, None] & (index < words_per_row)[None, :],
        )

        # A candidate's place: after those of lower columns in its word, in the words and the tiles before.
        sizes = count_bits(words, TANH)
        before = place[:, None] + tl.cumsum(sizes, axis=1) - sizes
        bit = tl.arange(0, 32)
        lower = words[:, :, None] & ((1 << bit) - 1)[None, None, :]
        slot = before[:, :, None] + count_bits(lower, TANH)
        hit = (words[:, :, None] >> bit[None, None, :]) & 1
        store_if(scores_ptr, slot, tl.reshape(scores, [BLOCK_ROWS, BLOCK_COLS // 32, 32]), hit, TANH)
        place += tl.sum(sizes, axis=1)
    sums_ptrs = sums_ptr + (chunk_row * sums_per_row + tl.program_id(0)) * 2
    tl.store(sums_ptrs, total, mask=row_ok)
    tl.store(sums_ptrs + 1, squares, mask=row_ok)
