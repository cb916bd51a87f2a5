"""Implements the kernels. One program takes some tokens and one key-value head with its query heads.

The memory order of tokens is [L, B]: the token at `position` of `sequence` is row n = position * B + sequence. The
rotary embedding pairs element i of a head's first half with element i of its second half.
"""

import triton
import triton.language as tl


@triton.jit
def _load_halves(pointer, offsets, mask, HALF: tl.constexpr):
    first = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(pointer, offsets, first, second, mask, HALF: tl.constexpr):
    tl.store(pointer + offsets, first.to(pointer.dtype.element_ty), mask=mask)
    tl.store(pointer + offsets + HALF, second.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def heads_kernel(
    qkv, gate_logits, cos, sin, q, k, v, tokens, batch,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    GATE_ROWS: tl.constexpr, VALUE_GATE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    mask = rows < tokens
    angle = (rows // batch) * HALF + dims
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)

    source = (rows * KV_HEADS + kv_head) * ((GROUP + 2) * D) + dims
    query = (rows * KV_HEADS + kv_head) * (GROUP * D) + dims
    for member in tl.static_range(GROUP):
        first, second = _load_halves(qkv, source + member * D, mask, HALF)
        _store_halves(q, query + member * D, first * c - second * s, second * c + first * s, mask, HALF)
    key = (rows * KV_HEADS + kv_head) * D + dims
    first, second = _load_halves(qkv, source + GROUP * D, mask, HALF)
    _store_halves(k, key, first * c - second * s, second * c + first * s, mask, HALF)

    first, second = _load_halves(qkv, source + (GROUP + 1) * D, mask, HALF)
    if VALUE_GATE:
        logit = (rows * KV_HEADS + kv_head) * (GATE_ROWS * D) + dims
        gate_first, gate_second = _load_halves(gate_logits, logit, mask, HALF)
        first *= tl.sigmoid(gate_first)
        second *= tl.sigmoid(gate_second)
    _store_halves(v, key, first, second, mask, HALF)


@triton.jit
def heads_backward_kernel(
    grad_q, grad_k, grad_v, grad_gates, gate_logits, v, cos, sin, grad_qkv, grad_logits,
    stride_qb, stride_ql, stride_qh,
    stride_kb, stride_kl, stride_kh,
    stride_vb, stride_vl, stride_vh,
    stride_gb, stride_gl, stride_gg, stride_gh,
    tokens, batch,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    GATE_ROWS: tl.constexpr, VALUE_GATE: tl.constexpr, COPY_GATES: tl.constexpr,
):  # fmt: skip
    """COPY_GATES means that the gradient of G1 is not in grad_logits yet."""
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    mask = rows < tokens
    position = rows // batch
    sequence = rows % batch
    angle = position * HALF + dims
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)

    target = (rows * KV_HEADS + kv_head) * ((GROUP + 2) * D) + dims
    source = sequence * stride_qb + position * stride_ql + dims
    for member in tl.static_range(GROUP):
        head = source + (kv_head * GROUP + member) * stride_qh
        first, second = _load_halves(grad_q, head, mask, HALF)
        # This inverts the rotation.
        _store_halves(
            grad_qkv, target + member * D, first * c + second * s, second * c - first * s, mask, HALF
        )
    source = sequence * stride_kb + position * stride_kl + kv_head * stride_kh + dims
    first, second = _load_halves(grad_k, source, mask, HALF)
    _store_halves(grad_qkv, target + GROUP * D, first * c + second * s, second * c - first * s, mask, HALF)

    source = sequence * stride_vb + position * stride_vl + kv_head * stride_vh + dims
    first, second = _load_halves(grad_v, source, mask, HALF)
    logit = (rows * KV_HEADS + kv_head) * (GATE_ROWS * D) + dims
    if VALUE_GATE:
        gate_first, gate_second = _load_halves(gate_logits, logit, mask, HALF)
        gated = (rows * KV_HEADS + kv_head) * D + dims
        gated_first, gated_second = _load_halves(v, gated, mask, HALF)
        # v sigmoid(x) (1 - sigmoid(x)) = gated * sigmoid(-x)
        _store_halves(
            grad_logits,
            logit,
            first * gated_first * tl.sigmoid(-gate_first),
            second * gated_second * tl.sigmoid(-gate_second),
            mask,
            HALF,
        )
        first *= tl.sigmoid(gate_first)
        second *= tl.sigmoid(gate_second)
    _store_halves(grad_qkv, target + (GROUP + 1) * D, first, second, mask, HALF)
    if COPY_GATES:
        source = sequence * stride_gb + position * stride_gl + kv_head * stride_gg + dims
        for member in tl.static_range(GROUP):
            first, second = _load_halves(grad_gates, source + member * stride_gh, mask, HALF)
            _store_halves(grad_logits, logit + (VALUE_GATE + member) * D, first, second, mask, HALF)
