"""Computes indexer scores on the GPU (GSA, equation 7) in fp32 tiles of [queries, keys], causal tiles only.

Arithmetic limits the speed of this kernel, because each pair (query, key) needs one sigmoid per indexer head. For bf16
inputs, the kernel therefore computes sigmoid(z) as 1/2 + 1/2 tanh(z / 2), with the hardware's tanh instruction. The
relative error of this instruction is at most 2^-11. For fp32 inputs, the kernel computes the exact sigmoid and IEEE
products.
"""

# Tuples grow by addition, because Triton does not support starred expressions in tuples.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import kernels_use_sigmoid
from gsa_kernels.devices import shared_memory
from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.limits import SCORED_KEYS, TILE_QUERIES, ceil_div, next_power_of_2


class Tiles(NamedTuple):
    """Holds the shape of one program's work."""

    rows: int
    cols: int
    per_program: int  # key tiles that a program loops over, so that loading its queries costs little
    warps: int
    stages: int


BF16_TILES = Tiles(rows=64, cols=64, per_program=SCORED_KEYS[2] // 64, warps=4, stages=3)
FLOAT_TILES = Tiles(rows=32, cols=64, per_program=SCORED_KEYS[4] // 64, warps=4, stages=1)


def score_tiles(inputs: ScoreInputs) -> Tiles:
    """Return the tile shape. If the tiles of all heads do not fit in shared memory, the function first reduces the
    number of stages, and then the number of rows. Key lists need a multiple of TILE_QUERIES rows.

    Raises:
        ValueError: the smallest tile does not fit in shared memory.
    """
    queries = inputs.indexer.queries
    heads, dim = queries.shape[2:]
    tiles = BF16_TILES if queries.dtype == torch.bfloat16 else FLOAT_TILES
    found, vector_bytes = shared_memory(queries.device), next_power_of_2(dim) * queries.element_size()
    while (needed := (heads * tiles.rows + tiles.stages * tiles.cols) * vector_bytes) > found:
        if tiles.stages > 1:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.rows > TILE_QUERIES:
            tiles = tiles._replace(rows=tiles.rows // 2)
        else:
            raise ValueError(
                f"{heads} indexer heads of {dim} in {queries.dtype} need {needed // 1024} KiB of shared memory, and "
                f"the GPU has {found // 1024} KiB; pass implementation='reference' (training: "
                "gsa.attention_impl=reference)"
            )
    return tiles


def write_scores(
    inputs: ScoreInputs,
    row_start: int,
    row_stop: int,
    out: torch.Tensor,
    *,
    key_stride: int = 1,
    wanted: torch.Tensor | None = None,
) -> None:
    """Write out[b, r - row_start, s] = I[b, r, s], the score of key s for row r, with row_start <= r < row_stop.

    If any key of a tile is causal for any row of the tile, the kernel writes the tile up to the last column of `out`.
    Other elements keep their old values.

    Args:
        out: fp32 [B, row_stop - row_start, columns], unit stride in the last dimension
        key_stride: above 1 for sampled keys. keys[:, s] of the indexer is then the key at some position p of the
            sequence, with p // key_stride = s.
        wanted: int32 [B, row_stop - row_start], 0 for rows that need no scores. A tile of rows with only 0 is skipped.
    """
    batch, num_rows, _, dim = inputs.indexer.queries.shape
    rows, columns = row_stop - row_start, out.shape[2]
    tiles = score_tiles(inputs)
    key_tiles = ceil_div(inputs.position(row_stop - 1) // key_stride + 1, tiles.cols)
    grid = (ceil_div(key_tiles, tiles.per_program), ceil_div(rows, tiles.rows), batch)
    _scores_kernel[grid](
        *score_tensors(inputs),
        inputs.document_starts,
        wanted,
        out,
        inputs.query_start,
        row_start,
        row_stop,
        columns,
        num_rows,
        inputs.num_keys,
        out.stride(0),
        out.stride(1),
        dim**-0.5,
        KEY_STRIDE=key_stride,
        **score_options(inputs, tiles),
    )


def score_tensors(inputs: ScoreInputs) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of one indexer in the order of the kernels' arguments."""
    x = inputs.indexer
    return (x.queries, x.keys, x.head_weight_logits, x.score_bias, x.head_weight_bias)


def score_options(inputs: ScoreInputs, tiles: Tiles) -> dict[str, int | str]:
    """Return constants and launch options for all kernels that compute scores."""
    queries = inputs.indexer.queries
    heads, dim = queries.shape[2:]
    bf16 = queries.dtype == torch.bfloat16
    return {
        "HI": heads,
        "DI": dim,
        "BLOCK_D": next_power_of_2(dim),
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_COLS": tiles.cols,
        "TILES": tiles.per_program,
        "SIGMOID": kernels_use_sigmoid(inputs.indexer.activation),
        # The interpreter runs on the CPU and does not support inline assembly.
        "TANH": bf16 and queries.is_cuda,
        "PRECISION": "tf32" if bf16 else "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def fast_tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def load_queries(q_ptr, tokens, row_ok, HI: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries, a tuple of [BLOCK_ROWS, BLOCK_D] per head."""
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DI
    queries = ()
    for head in tl.static_range(HI):
        query_ptrs = q_ptr + (tokens[:, None] * HI + head) * DI + dims[None, :]
        query = tl.load(query_ptrs, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
        queries = queries + (query,)
    return queries


@triton.jit
def load_weights(
    weight_ptr,
    score_bias_ptr,
    weight_bias_ptr,
    tokens,
    row_ok,
    scale,
    HI: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    TANH: tl.constexpr,
):
    """Load each head's weights [BLOCK_ROWS] and bias. Also return the constant term of each row's scores. With ReLU,
    the weights include `scale`, because relu(scale z) = scale relu(z)."""
    weights = ()
    biases = ()
    base = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    for head in tl.static_range(HI):
        weight = tl.load(weight_ptr + tokens * HI + head, mask=row_ok, other=0.0).to(tl.float32)
        bias = 0.0
        if SIGMOID:
            if weight_bias_ptr is not None:
                weight += tl.load(weight_bias_ptr + head).to(tl.float32)
            weight = tl.sigmoid(weight)
            if score_bias_ptr is not None:
                bias = tl.load(score_bias_ptr + head).to(tl.float32)
        if not SIGMOID:
            weight = weight * scale
        if SIGMOID and TANH:  # w sigmoid(z) = w/2 + w/2 tanh(z/2)
            weight = weight * 0.5
            bias = bias * 0.5
            base += weight
        weights = weights + (weight,)
        biases = biases + (bias,)
    return weights, biases, base


@triton.jit
def tile_scores(
    queries,
    weights,
    biases,
    base,
    key_ptr,
    col,
    length,
    scale,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SIGMOID: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute scores [BLOCK_ROWS, BLOCK_COLS] of the keys from `col` on, with the same bits in every kernel.

    Args:
        key_ptr: the sequence's keys [length, DI]
    """
    cols = col + tl.arange(0, BLOCK_COLS)
    dims = tl.arange(0, BLOCK_D)
    key_ptrs = key_ptr + cols[:, None] * DI + dims[None, :]
    keys = tl.load(key_ptrs, mask=(cols < length)[:, None] & (dims < DI)[None, :], other=0.0)
    keys = tl.trans(keys)
    if TANH and SIGMOID:
        scale = scale * 0.5
    scores = tl.zeros([BLOCK_ROWS, BLOCK_COLS], dtype=tl.float32)
    if TANH and SIGMOID:
        scores += base[:, None]
    for head in tl.static_range(HI):
        logits = tl.dot(queries[head], keys, input_precision=PRECISION)
        if SIGMOID:
            logits = logits * scale + biases[head]
            activated = fast_tanh(logits) if TANH else tl.sigmoid(logits)
        else:
            # This maximum keeps a NaN. A plain maximum on a GPU returns the number instead.
            activated = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores += weights[head][:, None] * activated
    return scores


# Row ranges vary from launch to launch. Specialising on them would only compile more variants.
@triton.jit(do_not_specialize=["query_start", "row_start", "row_stop", "num_rows", "length"])
def _scores_kernel(
    q_ptr,
    k_ptr,
    weight_ptr,
    score_bias_ptr,
    weight_bias_ptr,
    starts_ptr,
    wanted_ptr,
    out_ptr,
    query_start,
    row_start,
    row_stop,
    columns,
    num_rows,
    length,
    out_stride_b,
    out_stride_r,
    scale,
    KEY_STRIDE: tl.constexpr,
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
    """One program scores BLOCK_ROWS queries against up to TILES tiles of BLOCK_COLS keys."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = row_start + tl.program_id(1) * BLOCK_ROWS
    last_position = query_start + tl.minimum(first_row + BLOCK_ROWS, row_stop) - 1
    end_col = last_position // KEY_STRIDE + 1
    first_col = tl.program_id(0) * (TILES * BLOCK_COLS)
    if first_col >= end_col:  # above the diagonal
        return
    end_col = tl.minimum(end_col, first_col + TILES * BLOCK_COLS)

    rows = first_row + tl.arange(0, BLOCK_ROWS)
    row_ok = rows < row_stop
    tokens = batch * num_rows + rows
    if wanted_ptr is not None:
        wanted = tl.load(wanted_ptr + batch * (row_stop - row_start) + rows - row_start, mask=row_ok, other=0)
        if tl.max(wanted) == 0:
            return
    if starts_ptr is not None:
        starts = tl.load(starts_ptr + tokens, mask=row_ok, other=2147483647) // KEY_STRIDE
        # Tiles before the first document of all queries are skipped, too.
        skipped = tl.maximum(tl.min(starts), first_col) // BLOCK_COLS * BLOCK_COLS
        first_col = tl.maximum(first_col, skipped)
        if first_col >= end_col:
            return

    queries = load_queries(q_ptr, tokens, row_ok, HI, DI, BLOCK_D)
    weights, biases, base = load_weights(
        weight_ptr, score_bias_ptr, weight_bias_ptr, tokens, row_ok, scale, HI, BLOCK_ROWS, SIGMOID, TANH
    )
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
        out_ptrs = (
            out_ptr
            + batch * out_stride_b
            + (rows - row_start).to(tl.int64)[:, None] * out_stride_r
            + cols[None, :]
        )
        tl.store(out_ptrs, scores, mask=row_ok[:, None] & (cols < columns)[None, :])
