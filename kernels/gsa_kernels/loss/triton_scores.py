"""Defines device code that the kernels share: a tile of indexer scores, and its attended set.

A score is sum_j weight_j * a_j over the indexer heads j. For head j, z is the scaled product of query and key plus the
bias b_j, and w + c is the logit of the head weight. There are three forms:
    SIGMOID      a = sigmoid(z)       weight = sigmoid(w + c)
    TANH         a = tanh(z / 2)      weight = sigmoid(w + c) / 2
    RELU         a = relu(z)          weight = w
A TANH score equals the SIGMOID score minus a constant of the row, sum_j sigmoid(w + c) / 2. The constant does
not change the softmax, KL or gradients.
"""

# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

SIGMOID = tl.constexpr(0)
TANH = tl.constexpr(1)
"""Computes sigmoid by one hardware instruction instead of exp and a division."""
TANH_PLAIN = tl.constexpr(2)
"""Computes the same as TANH without inline assembly, for the interpreter."""
RELU = tl.constexpr(3)

NOT_A_SCORE = tl.constexpr(-1e30)
"""Replaces a score off the attended set. It is finite, because the difference of two of them must not be NaN."""


@triton.jit
def activate(product, scale, bias, KIND: tl.constexpr):
    """Compute a of z = product * scale + bias, elementwise."""
    if KIND == SIGMOID:
        a = tl.sigmoid(product * scale + bias)
    elif KIND == TANH:
        a = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;",
            "=f,f",
            [product * (0.5 * scale) + 0.5 * bias],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif KIND == TANH_PLAIN:
        a = 2.0 * tl.sigmoid(product * scale + bias) - 1.0
    else:
        # This maximum keeps a NaN. A plain maximum on a GPU returns the number instead.
        a = tl.maximum(product * scale, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return a


@triton.jit
def slope(a, KIND: tl.constexpr):
    """Return da/dz as a function of a."""
    if KIND == SIGMOID:
        d = a * (1.0 - a)
    elif KIND == RELU:
        d = tl.where(a > 0, 1.0, 0.0)
    else:
        d = 0.5 - 0.5 * a * a
    return d


@triton.jit
def times_slope(g, product, a, KIND: tl.constexpr):
    """Compute g * da/dz. For ReLU, only the sign of `product` matters, so `a` need not be computed.

    With ReLU, the result for a NaN `product` is g: NaN if the row attends to the key, else 0.
    """
    return tl.where(product <= 0, 0.0, g) if KIND == RELU else g * slope(a, KIND)


@triton.jit
def head_weight(logit, KIND: tl.constexpr):
    """Return the weight of one head from w + c."""
    if KIND == RELU:
        weight = logit
    elif KIND == SIGMOID:
        weight = tl.sigmoid(logit)
    else:
        weight = 0.5 * tl.sigmoid(logit)
    return weight


@triton.jit
def head_weight_slope(weight, KIND: tl.constexpr):
    """Return d weight / d w as a function of the weight."""
    if KIND == RELU:
        d = tl.where(weight == weight, 1.0, weight)  # 1, and NaN for NaN
    elif KIND == SIGMOID:
        d = weight * (1.0 - weight)
    else:
        d = weight * (1.0 - 2.0 * weight)
    return d


@triton.jit
def load_head_weight(
    weight_logits,
    weight_bias,
    row_index,
    valid,
    head,
    HI: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Load the weights [BM] of one head. `row_index` is b * R + r, int64."""
    logit = tl.load(weight_logits + row_index * HI + head, mask=valid, other=0.0).to(tl.float32)
    if BIASED:
        logit += tl.load(weight_bias + head).to(tl.float32)
    return head_weight(logit, KIND)


@triton.jit
def load_queries(q_idx, row_index, valid, head, HI: tl.constexpr, DI: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the queries [BM, BLOCK_D] of one head."""
    d = tl.arange(0, BLOCK_D)
    pointers = q_idx + (row_index * HI + head)[:, None] * DI + d[None, :]
    if DI == BLOCK_D:
        tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=valid[:, None] & (d < DI)[None, :], other=0.0)
    return tile


@triton.jit
def load_bias(score_bias, head, BIASED: tl.constexpr):
    if BIASED:  # noqa: SIM108 (known at compile time)
        bias = tl.load(score_bias + head).to(tl.float32)
    else:
        bias = tl.full([], 0.0, tl.float32)
    return bias


@triton.jit
def load_keys(k_sequence, cols, L, DI: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the tile [BN, BLOCK_D]; keys at or after L read as 0."""
    d = tl.arange(0, BLOCK_D)
    pointers = k_sequence + cols[:, None] * DI + d[None, :]
    if DI == BLOCK_D:
        keys = tl.load(pointers, mask=(cols < L)[:, None], other=0.0)
    else:
        keys = tl.load(pointers, mask=(cols < L)[:, None] & (d < DI)[None, :], other=0.0)
    return keys


@triton.jit
def score_tile(
    q_idx,
    keys,
    weight_logits,
    score_bias,
    weight_bias,
    row_index,
    valid,
    factor,
    scale,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SCORE_BIAS: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
):
    """Compute scores [BM, BN] times `factor`. The loop loads the queries of one head at a time, because the queries of
    all heads do not fit in registers."""
    keys_t = tl.trans(keys)
    scores = tl.zeros([row_index.shape[0], keys.shape[0]], tl.float32)
    if KIND == RELU:  # relu(scale x) is scale relu(x)
        factor *= scale
        scale = 1.0
    for head in range(HI):
        queries = load_queries(q_idx, row_index, valid, head, HI, DI, BLOCK_D)
        weight = load_head_weight(weight_logits, weight_bias, row_index, valid, head, HI, KIND, WEIGHT_BIAS)
        bias = load_bias(score_bias, head, SCORE_BIAS)
        product = tl.dot(queries, keys_t, input_precision=PRECISION)
        scores += (weight * factor)[:, None] * activate(product, scale, bias, KIND)
    return scores


@triton.jit
def attended_tile(
    packed_mask,
    row_index,
    rows,
    cols,
    starts,
    first_word,
    W,
    HAS_MASK: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BN: tl.constexpr,
):
    """Return bool [BM, BN]: the query at position `rows` attends to key `cols`. Position -1 attends to no key."""
    attended = cols[None, :] <= rows[:, None]
    if HAS_STARTS:
        attended = attended & (cols[None, :] >= starts[:, None])
    if HAS_MASK:
        # Each word of a row covers 32 keys, so it is loaded once per row instead of once per key.
        bit = cols % 32
        for i in tl.static_range(BN // 32):
            here = first_word + i
            word = tl.load(packed_mask + row_index * W + here, mask=(rows >= 0) & (here < W), other=0)
            if i == 0:
                spread = tl.broadcast_to(word[:, None], rows.shape[0], BN)
            else:
                spread = tl.where((cols // 32 == here)[None, :], word[:, None], spread)
        attended = attended & (((spread >> bit[None, :]) & 1) != 0)
    return attended


@triton.jit
def attended_entries(word, valid):
    """Return bool [BM, BN]: whether a row attends to an entry of its tile's key list. Row r uses bit r of the entry's
    word."""
    row = tl.arange(0, valid.shape[0])
    return valid[:, None] & (((word[None, :] >> row[:, None]) & 1) != 0)


@triton.jit
def load_target(target_rows, rows, key, L, attended, BN: tl.constexpr):
    """Load the target probabilities [BM, BN] of the BN keys that begin with `key`.

    Outside the attended set, the contents of the memory are unspecified, and the result is 0.

    Args:
        target_rows: pointers to the rows' target at key 0, [BM]
    """
    cols = key + tl.arange(0, BN)
    inside = (rows >= 0)[:, None] & (cols < L)[None, :]
    p = tl.load(target_rows[:, None] + cols[None, :], mask=inside, other=0.0)
    return tl.where(attended, p.to(tl.float32), 0.0)
