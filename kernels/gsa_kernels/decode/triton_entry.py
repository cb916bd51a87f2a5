"""Runs `enter_token` with one program per sequence for each query head, each key-value head and the indexer."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gsa_kernels.decode.entry_reference import Angles, EntryCache, EntrySizes
from gsa_kernels.limits import next_power_of_2

_WARPS = 1


def launch_entry(
    projected: torch.Tensor,
    sizes: EntrySizes,
    angles: Angles,
    cache: EntryCache,
    slot: torch.Tensor,
    norms: tuple[torch.Tensor | None, ...],
    out: tuple[torch.Tensor, torch.Tensor | None],
    chained: bool,
) -> None:
    """Launch the kernel with the checked arguments of `enter_token`.

    Args:
        norms: weights of q, k, and the indexer's queries and key
        out: q and the indexer's queries
    """
    q, index_queries = out
    batch = projected.shape[0]
    heads, kv_heads, dim = sizes.q // sizes.head_dim, sizes.k // sizes.head_dim, sizes.head_dim
    has_index = sizes.index_heads > 0
    units = heads + kv_heads + has_index
    index_keys = cache.index_keys if has_index else None
    _entry_kernel[(units, batch)](
        projected,
        angles.cos,
        angles.sin,
        angles.index_cos,
        angles.index_sin,
        *norms,
        slot,
        q,
        index_queries,
        cache.k,
        cache.v,
        index_keys,
        projected.stride(0),
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        *(index_keys.stride()[:2] if index_keys is not None else (0, 0)),
        sizes.eps,
        H=heads,
        HKV=kv_heads,
        D=dim,
        GATED_VALUE=sizes.value_gate > 0,
        GATE=sizes.gate,
        CHANNELS=angles.cos.shape[-1],
        HI=sizes.index_heads,
        DI=sizes.index_dim,
        BLOCK_H=next_power_of_2(max(sizes.index_heads, 1)),
        BLOCK_D=next_power_of_2(max(sizes.index_dim, 1)),
        INDEX_CHANNELS=0 if angles.index_cos is None else angles.index_cos.shape[-1],
        CHAINED=chained,
        num_warps=_WARPS,
        **({"launch_pdl": True} if chained else {}),
    )


@triton.jit
def _entry_kernel(
    projected_ptr,
    cos_ptr,
    sin_ptr,
    index_cos_ptr,
    index_sin_ptr,
    norm_q_ptr,
    norm_k_ptr,
    norm_index_q_ptr,
    norm_index_k_ptr,
    slot_ptr,
    q_ptr,
    index_queries_ptr,
    k_ptr,
    v_ptr,
    index_keys_ptr,
    stride_p,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_ib,
    stride_il,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    GATED_VALUE: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program takes one head, or the indexer."""
    if CHAINED:
        gdc_launch_dependents()
    unit = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr)
    projected_ptr += batch * stride_p
    dims = tl.arange(0, D)
    other = _partner(dims, CHANNELS)
    cos = tl.load(cos_ptr + batch * CHANNELS + dims, mask=dims < CHANNELS, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + batch * CHANNELS + dims, mask=dims < CHANNELS, other=0.0).to(tl.float32)
    sin = tl.where(dims < CHANNELS // 2, -sin, sin)
    if unit < H:
        if CHAINED:
            gdc_wait()
        head = _turned_head(projected_ptr + unit * D, norm_q_ptr, dims, other, cos, sin, eps, D)
        tl.store(q_ptr + (batch * H + unit) * D + dims, head.to(q_ptr.dtype.element_ty))
    elif unit < H + HKV:
        if CHAINED:
            gdc_wait()
        kv_head = unit - H
        keys = projected_ptr + H * D + kv_head * D
        value = tl.load(keys + HKV * D + dims)
        if GATED_VALUE:
            gate = tl.load(keys + 2 * HKV * D + dims).to(tl.float32)
            value = (value.to(tl.float32) * tl.sigmoid(gate)).to(value.dtype)
        head = _turned_head(keys, norm_k_ptr, dims, other, cos, sin, eps, D)
        k_ptr += batch * stride_kb + kv_head * stride_kh + slot * stride_kl
        tl.store(k_ptr + dims, head.to(k_ptr.dtype.element_ty))
        v_ptr += batch * stride_vb + kv_head * stride_vh + slot * stride_vl
        tl.store(v_ptr + dims, value)
    else:
        if HI:
            START: tl.constexpr = H * D + (2 + GATED_VALUE) * HKV * D + GATE
            enter_index(
                projected_ptr + START, norm_index_q_ptr, norm_index_k_ptr, index_cos_ptr, index_sin_ptr,
                index_queries_ptr + batch * HI * DI,
                index_keys_ptr + batch * stride_ib + slot * stride_il, batch, eps,
                HI, DI, BLOCK_H, BLOCK_D, INDEX_CHANNELS, CHAINED, "",
            )  # fmt: skip


@triton.jit
def _partner(dims, CHANNELS: tl.constexpr):
    """Return the channel that rotates with each channel, or the channel itself without rotation."""
    half: tl.constexpr = CHANNELS // 2
    return tl.where(dims < half, dims + half, tl.where(dims < CHANNELS, dims - half, dims))


@triton.jit
def _turned_head(head_ptr, norm_ptr, dims, other, cos, sin, eps, D: tl.constexpr):
    """Return a rotated head, fp32 [D]. If `norm_ptr` is given, the head is normalised before the rotation.

    For the first channel of each rotated pair, `sin` is negative.
    """
    head = tl.load(head_ptr + dims).to(tl.float32)
    partner = tl.load(head_ptr + other).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(head * head) / D + eps)
        head *= scale * tl.load(norm_ptr + dims).to(tl.float32)
        partner *= scale * tl.load(norm_ptr + other).to(tl.float32)
    return head * cos + partner * sin


@triton.jit
def _angles_of_index(cos_ptr, sin_ptr, first, dims, CHANNELS: tl.constexpr):
    """Return cosine and sine, fp32 [BLOCK_D]. The sine is negative for the first of a pair."""
    turns = dims < CHANNELS
    cos = tl.load(cos_ptr + first + dims, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + first + dims, mask=turns, other=0.0).to(tl.float32)
    return cos, tl.where(dims < CHANNELS // 2, -sin, sin)


@triton.jit
def enter_index(
    index_ptr,
    norm_q_ptr,
    norm_k_ptr,
    cos_ptr,
    sin_ptr,
    queries_ptr,
    key_ptr,
    batch,
    eps,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHANNELS: tl.constexpr,
    WAITS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Write the indexer's key and queries, which are consecutive at `index_ptr`, after norms and rotation.

    Args:
        WAITS: wait for the previous kernel before the key and queries are loaded
        CACHE: cache modifier of these loads
    """
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DI
    cos = tl.full([BLOCK_D], 1.0, tl.float32)
    sin = tl.zeros([BLOCK_D], tl.float32)
    if CHANNELS:
        cos, sin = _angles_of_index(cos_ptr, sin_ptr, batch * CHANNELS, dims, CHANNELS)
    other = _partner(dims, CHANNELS)
    heads = tl.arange(0, BLOCK_H)
    if WAITS:
        gdc_wait()
    key = tl.load(index_ptr + dims, mask=dim_ok, other=0.0, cache_modifier=CACHE).to(tl.float32)
    key_partner = tl.load(index_ptr + other, mask=dim_ok, other=0.0, cache_modifier=CACHE).to(tl.float32)
    places = heads[:, None] * DI + dims[None, :]
    others = heads[:, None] * DI + other[None, :]
    mask = (heads < HI)[:, None] & dim_ok[None, :]
    queries = tl.load(index_ptr + DI + places, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    partners = tl.load(index_ptr + DI + others, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if norm_q_ptr is not None:
        scale = tl.rsqrt(tl.sum(key * key) / DI + eps)
        key *= scale * tl.load(norm_k_ptr + dims, mask=dim_ok, other=0.0).to(tl.float32)
        key_partner *= scale * tl.load(norm_k_ptr + other, mask=dim_ok, other=0.0).to(tl.float32)
        scales = tl.rsqrt(tl.sum(queries * queries, axis=1) / DI + eps)[:, None]
        queries *= scales * tl.load(norm_q_ptr + dims, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
        partners *= scales * tl.load(norm_q_ptr + other, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
    queries = (queries * cos[None, :] + partners * sin[None, :]).to(queries_ptr.dtype.element_ty)
    key = (key * cos + key_partner * sin).to(key_ptr.dtype.element_ty)
    tl.store(queries_ptr + places, queries, mask=mask)
    tl.store(key_ptr + dims, key, mask=dim_ok)
