"""Defines device code that the loss kernels over key lists share: a tile of indexer scores for entries of a key list.

An entry is one key of the list. The matrix product of keys and queries has the entries as its rows. Its columns are
pairs of an indexer head and a row of the loss, ordered by head. The number of heads is padded to a power of two. The
sum of [entries, heads, rows] over heads needs no exchange between threads.
"""

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import activate, head_weight


@triton.jit
def load_rows(
    q_idx,
    weight_logits,
    score_bias,
    weight_bias,
    beta,
    first_row,
    rows_left,
    HI: tl.constexpr,
    HP: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Load queries [HP * ROWS, BLOCK_D], weights * beta * FACTOR [1, HP, ROWS] and biases [1, HP, 1] of ROWS rows.

    Args:
        first_row: b * R + the first row, int64; `rows_left` rows exist
    """
    column = tl.arange(0, HP * ROWS)
    d = tl.arange(0, BLOCK_D)
    valid = (column // ROWS < HI) & (column % ROWS < rows_left)
    pointers = q_idx + ((first_row + column % ROWS) * HI + column // ROWS)[:, None] * DI + d[None, :]
    if DI == BLOCK_D:
        queries = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        queries = tl.load(pointers, mask=valid[:, None] & (d < DI)[None, :], other=0.0)

    head = tl.arange(0, HP)[None, :, None]
    row = tl.arange(0, ROWS)[None, None, :]
    present = (head < HI) & (row < rows_left)
    logits = tl.load(weight_logits + (first_row + row) * HI + head, mask=present, other=0.0).to(tl.float32)
    if WEIGHT_BIAS:
        logits += tl.load(weight_bias + head, mask=head < HI, other=0.0).to(tl.float32)
    weights = tl.where(present, head_weight(logits, KIND), 0.0) * (tl.load(beta) * FACTOR)
    if SCORE_BIAS:
        biases = tl.load(score_bias + head, mask=head < HI, other=0.0).to(tl.float32)
    else:
        biases = tl.zeros([1, HP, 1], tl.float32)
    return queries, weights, biases


@triton.jit
def load_key_rows(k_sequence, key, DI: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the tile [ENTRIES, BLOCK_D] of the keys `key` [ENTRIES]."""
    d = tl.arange(0, BLOCK_D)
    pointers = k_sequence + key.to(tl.int64)[:, None] * DI + d[None, :]
    return tl.load(pointers) if DI == BLOCK_D else tl.load(pointers, mask=(d < DI)[None, :], other=0.0)


@triton.jit
def activations(
    key_rows,
    queries,
    biases,
    scale,
    HP: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute activations a [ENTRIES, HP, ROWS] (triton_scores.py). A score is the sum of weight * a over heads."""
    product = tl.dot(key_rows, tl.trans(queries), input_precision=PRECISION)
    return activate(tl.reshape(product, [key_rows.shape[0], HP, ROWS]), scale, biases, KIND)


@triton.jit
def row_bits(counted, ROWS: tl.constexpr):
    """Return int32 [ROWS]: each row's bit in an entry's word, 0 if not computed."""
    return tl.where(counted, tl.full([ROWS], 1, tl.int32) << tl.arange(0, ROWS), 0)


@triton.jit
def load_target(target_step, attended, left, ENTRIES: tl.constexpr, ROWS: tl.constexpr):
    """Load target probabilities [ENTRIES, ROWS], 0 off the attended set, where the memory is unspecified.

    Args:
        target_step: pointer to the first of `left` entries
    """
    entry = tl.arange(0, ENTRIES)
    p = tl.load(
        target_step + (entry[:, None] * ROWS + tl.arange(0, ROWS)[None, :]),
        mask=(entry < left)[:, None],
        other=0.0,
    )
    return tl.where(attended, p, 0.0)
