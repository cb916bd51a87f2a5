"""Defines device code of the loss kernels that stack the indexer heads of a tile of rows (bf16 on Hopper).

One product of [HEADS * BM, DI] with the keys gives a tile of all heads, [HEADS, BM, BN] (triton_stacks.py). Each thread
has all heads of its rows, so a score needs no exchange between threads. For each key tile the gradient kernel waits for
only three products.
"""

# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import TANH, activate, head_weight
from gsa_kernels.triton_constants import LN_2, LOG2_E
from gsa_kernels.triton_stacks import unstack

TINY = tl.constexpr(1e-37)
"""Replaces a target of 0 in a logarithm. It is a normal number."""


@triton.jit
def load_stacked_weights(
    weight_logits, weight_bias, slots, exists, HI: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr
):
    """Load weights [HEADS, BM]; 0 where there is no row or head."""
    logits = tl.load(weight_logits + slots, mask=exists, other=0.0).to(tl.float32)
    if BIASED:
        heads = tl.arange(0, slots.shape[0])
        logits += tl.load(weight_bias + heads, mask=heads < HI, other=0.0).to(tl.float32)[:, None]
    return tl.where(exists, head_weight(logits, KIND), 0.0)


@triton.jit
def load_stacked_biases(score_bias, HI: tl.constexpr, HEADS: tl.constexpr, BIASED: tl.constexpr):
    """Load biases [HEADS, 1, 1]."""
    heads = tl.arange(0, HEADS)
    if BIASED:
        biases = tl.load(score_bias + heads, mask=heads < HI, other=0.0).to(tl.float32)
    else:
        biases = tl.zeros([HEADS], tl.float32)
    return biases[:, None, None]


@triton.jit
def stacked_activations(queries, keys, biases, scale, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the activations a_j of all indexer heads j, [HEADS, BM, BN]."""
    product = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    return activate(unstack(product, biases.shape[0]), scale, biases, KIND)


@triton.jit
def rounded_product(x, y, KIND: tl.constexpr):
    """Return x * y elementwise. If KIND is TANH, the compiler cannot fuse the product with a later addition."""
    if KIND == TANH:
        z = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        z = x * y
    return z


@triton.jit
def sum_of_heads(weights, a, KIND: tl.constexpr):
    """Return sum_j weights_j * a_j over the heads j, [BM, BN], for weights [HEADS, BM, 1] and a [HEADS, BM, BN]. The
    first head's product is rounded separately. Otherwise the compiler may fuse any product into an addition, which
    changes the last bit."""
    first = (tl.arange(0, weights.shape[0]) == 0)[:, None, None]
    return tl.sum(tl.where(first, rounded_product(weights, a, KIND), weights * a), 0)


@triton.jit
def exp2_of(x, KIND: tl.constexpr):
    """Return 2^x elementwise. If KIND is TANH, results below 2^-126 are 0."""
    if KIND == TANH:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def sum_in_lanes(x):
    """Sum [.., BM, BN] to [.., BM, 4] over the columns that one thread holds, without an exchange between lanes. Four
    lanes share a row of a product, and lane l of the four holds the columns 8 i + 2 l + {0, 1}."""
    if len(x.shape) == 3:
        parts = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 8, 4, 2])
        total = tl.sum(tl.sum(parts, 4), 2)
    else:
        parts = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
        total = tl.sum(tl.sum(parts, 3), 1)
    return total


@triton.jit
def as_held(x):
    """Reorder [D, keys] of a product to [D * keys], so that a thread stores its eight bf16 values at once.

    In each part of 16 dimensions and 16 keys, lane 4 i + l (i = 0 .. 7, l = 0 .. 3) holds dimensions i and i + 8 of
    keys 2 l, 2 l + 1, 2 l + 8 and 2 l + 9.
    """
    dims: tl.constexpr = x.shape[0]
    keys: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, [dims // 16, 2, 8, keys // 16, 2, 4, 2])
    return tl.reshape(tl.permute(parts, [3, 0, 2, 5, 4, 1, 6]), [dims * keys])


@triton.jit
def held_by_key(x, KEYS: tl.constexpr):
    """Undo `as_held` for a tile of 16 dimensions, and transpose the tile: [16 * KEYS] -> [KEYS, 16]."""
    parts = tl.reshape(x, [KEYS // 16, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 3, 2, 5, 4, 1]), [KEYS, 16])


@triton.jit
def by_key_as_held(x):
    """Invert `held_by_key`."""
    keys: tl.constexpr = x.shape[0]
    parts = tl.reshape(x, [keys // 16, 2, 4, 2, 2, 8])
    return tl.reshape(tl.permute(parts, [0, 5, 2, 1, 4, 3]), [16 * keys])


@triton.jit
def load_mask_words(packed_mask, row_index, rows, first_word, W, HAS_MASK: tl.constexpr, BN: tl.constexpr):
    """Load BN / 32 words of each row, beginning with `first_word`: a tuple with a tensor [BM] for each word.

    Call the function one iteration of the key loop ahead. Otherwise the compiler pipelines the loads, and loads each
    word twice.
    """
    tile = ()
    for i in tl.static_range(BN // 32):
        if HAS_MASK:
            here = first_word + i
            word = tl.load(packed_mask + row_index * W + here, mask=(rows >= 0) & (here < W), other=0)
            tile = tile + (word,)  # noqa: RUF005 (Triton has no starred tuples)
        else:
            tile = tile + (rows,)  # noqa: RUF005
    return tile


@triton.jit
def expand_attended(
    tile_words, rows, cols, starts, HAS_MASK: tl.constexpr, HAS_STARTS: tl.constexpr, BN: tl.constexpr
):
    """Return bool [BM, BN]: the query at position `rows` attends to key `cols`. Position -1 attends to no key. A
    packed mask contains only causal keys."""
    if HAS_MASK:
        # The shift has two parts, as `expand_words` in attention/triton_tiles.py explains.
        column = tl.arange(0, BN)
        for i in tl.static_range(BN // 32):
            bits = (tile_words[i][:, None] >> (column & 6)[None, :]) >> (column & 25)[None, :]
            if i == 0:  # noqa: SIM108 (the loaded words have no column axis yet)
                spread = bits
            else:
                spread = tl.where((column // 32 == i)[None, :], bits, spread)
        attended = (spread & 1) != 0
    else:
        attended = cols[None, :] <= rows[:, None]
        if HAS_STARTS:
            attended = attended & (cols[None, :] >= starts[:, None])
    return attended


@triton.jit
def stable_kl_terms(log2_q, log2_p, p, g):
    """Compute q - p + p log(p / q) elementwise without cancellation, for g = q - p. p is the target and q the softmax
    of the scores. Both sum to 1 over the attended set, so adding q - p does not change the sum. With r = log(q / p) the
    term is p (exp(r) - 1 - r), which is positive and of second order. If abs(r) < 1/4, the term is computed as p x^2
    times a polynomial in x = r / log 2, with a relative error up to 1.4e-6. Where p is 0, log2_p is the log of a tiny
    number, and the result is q."""
    x = log2_q - log2_p
    t = p * x
    near = t * x * (0.24022618 + x * (0.055504207 + x * (0.0096381735 + x * 0.0013340167)))
    far = g - LN_2 * t
    return tl.where(tl.abs(x) < 0.25 * LOG2_E, near, far)


@triton.jit
def log2_of_positive(x, KIND: tl.constexpr):
    """Return log2 of x >= TINY elementwise. If KIND is TANH, it is the hardware's approximation."""
    if KIND == TANH:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y
