"""Turns the joined projection of new tokens into attention inputs and cache entries, in one launch (`enter_token` of
entry_reference.py).

Use this module for several sequences, or for layers with norms of q and k. For one sequence in a layer without these
norms, use joined.py, which also computes the projection. On Hopper, the kernel starts before the previous kernel ends
(row_product/op.py).
"""

import torch

from gsa_kernels.checks import (
    check_dtype_and_device,
    check_head_size,
    check_kernel_dtype,
    check_shape,
    check_unit_strides,
)
from gsa_kernels.decode.entry_reference import Angles, Entered, EntryCache, EntrySizes
from gsa_kernels.decode.triton_entry import launch_entry
from gsa_kernels.devices import can_chain, launching_on
from gsa_kernels.limits import DECODE_INDEXER_HEADS, INDEXER_HEAD_SIZES


@torch.no_grad()
def enter_token(
    projected: torch.Tensor,
    sizes: EntrySizes,
    angles: Angles,
    cache: EntryCache,
    slot: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    index_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Entered:
    """Compute `enter_token` of entry_reference.py, with all tensors in bf16 or all in fp32.

    Raises:
        ValueError: the kernel does not support a shape, size or dtype.
    """
    check_shape("projected", projected, "[B, N]", (None, None))
    batch = projected.shape[0]
    check_kernel_dtype("projected", projected)
    if projected.shape[1] < sizes.width or projected.stride(1) != 1:
        raise ValueError(
            f"projected is {tuple(projected.shape)} with stride {projected.stride()}; pass at least {sizes.width} "
            "contiguous columns"
        )
    check_head_size(sizes.head_dim)
    check_entry_cache(sizes, cache, slot, batch)
    _check_angles("", angles.cos, angles.sin, batch, sizes.head_dim)
    if sizes.index_heads:
        if (angles.index_cos is None) != (angles.index_sin is None):
            raise ValueError("one of angles.index_cos and angles.index_sin is None; pass both or none")
        if angles.index_cos is not None and angles.index_sin is not None:
            _check_angles("index_", angles.index_cos, angles.index_sin, batch, sizes.index_dim)
    named = {"cache.k": cache.k, "cache.v": cache.v, "cache.index_keys": cache.index_keys}
    named |= check_norms("norms", norms, sizes.head_dim)
    named |= check_norms("index_norms", index_norms, sizes.index_dim)
    check_dtype_and_device("projected", projected, named)
    check_unit_strides(named)
    q = projected.new_empty(batch, sizes.q // sizes.head_dim, sizes.head_dim)
    index_queries = None
    if sizes.index_heads:
        index_queries = projected.new_empty(batch, 1, sizes.index_heads, sizes.index_dim)
    with launching_on(projected, "projected"):
        launch_entry(
            projected,
            sizes,
            Angles(*(None if each is None else each.contiguous() for each in angles)),  # type: ignore[arg-type]
            cache,
            slot,
            (*(norms or (None, None)), *(index_norms or (None, None))),
            (q, index_queries),
            can_chain(projected),
        )
    start = sizes.q + 2 * sizes.k + sizes.value_gate
    gate = None
    if sizes.gate:
        gate = projected[:, start : start + sizes.gate].unflatten(-1, (-1, sizes.head_dim))
    if not sizes.index_heads:
        return Entered(q, gate, None, None)
    return Entered(q, gate, index_queries, projected[:, None, sizes.width - sizes.index_heads : sizes.width])


def check_norms(
    name: str, norms: tuple[torch.Tensor, torch.Tensor] | None, size: int
) -> dict[str, torch.Tensor | None]:
    """Check the shapes of two norms' weights, and return the weights by name."""
    named: dict[str, torch.Tensor | None] = {}
    for place, weight in enumerate(norms or ()):
        named[f"{name}[{place}]"] = weight
        check_shape(f"{name}[{place}]", weight, "[size of a head]", (size,))
    return named


def check_entry_cache(sizes: EntrySizes, cache: EntryCache, slot: torch.Tensor, batch: int) -> None:
    """Check the shapes of the tensors that `enter_token` writes, and of the indexer's heads."""
    kv_heads = sizes.k // sizes.head_dim
    check_shape("cache.k", cache.k, "[B, Hkv, Lk, D]", (batch, kv_heads, None, sizes.head_dim))
    check_shape("cache.v", cache.v, "[B, Hkv, Lk, D]", tuple(cache.k.shape))
    check_shape("slot", slot, "[1]", (1,))
    heads, dim = sizes.index_heads, sizes.index_dim
    if not heads:
        return
    if heads not in DECODE_INDEXER_HEADS or dim not in INDEXER_HEAD_SIZES:
        raise ValueError(
            f"the indexer has {heads} heads of size {dim}; pass 1 to {DECODE_INDEXER_HEADS[-1]} of "
            f"{INDEXER_HEAD_SIZES[0]} to {INDEXER_HEAD_SIZES[-1]}"
        )
    if cache.index_keys is None:
        raise ValueError("cache.index_keys is None with an indexer; pass [B, Lk, DI]")
    check_shape("cache.index_keys", cache.index_keys, "[B, Lk, DI]", (batch, cache.k.shape[2], dim))


def _check_angles(prefix: str, cos: torch.Tensor, sin: torch.Tensor, batch: int, size: int) -> None:
    channels = cos.shape[-1]
    check_shape(f"angles.{prefix}cos", cos, "[B, channels]", (batch, None))
    check_shape(f"angles.{prefix}sin", sin, "[B, channels]", (batch, channels))
    if channels > size or channels % 2 != 0:
        raise ValueError(
            f"{channels} channels turn by angles.{prefix}cos; pass an even number, at most {size}"
        )
