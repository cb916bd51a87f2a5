"""Implements the cache of `GatedSparseAttention`, and the attention of new tokens to the tokens in the cache.

For a single new token, `api.decode_step` computes sparse attention. For several new tokens, and for dense attention,
this module calls the functions for training, with the new tokens as the last queries of the sequence
(`Geometry.query_start`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from gsa_kernels.api import decode_step, select, sparse_attention
from gsa_kernels.attention.reference import attention_probs
from gsa_kernels.checks import check_at_least
from gsa_kernels.decode.reference import decoded_keys
from gsa_kernels.decode.state import LayerCache, most_selected, new_selection, new_workspace
from gsa_kernels.layer_config import GSAConfig
from gsa_kernels.operations_reference import attended_keys
from gsa_kernels.types import Geometry, Indexer, Selection


@dataclass
class GSACache:
    """Holds the cache of one layer for B sequences. All sequences have the same length, and each is one document. The
    layer writes into the cache."""

    decode: LayerCache
    """Keys after RoPE and values after G2, [B, max_length, Hkv, D]; lengths on the device; the latest selection."""
    indexer_keys: torch.Tensor
    """[B, max_length, DI]"""
    length: int = 0
    """Tokens of each sequence so far."""

    @property
    def max_length(self) -> int:
        return self.indexer_keys.shape[1]


@dataclass(frozen=True)
class Heads:
    """Holds the inputs of attention for some tokens."""

    q: torch.Tensor
    """[B, L, H, D], after RoPE."""
    k: torch.Tensor
    """[B, L, Hkv, D], after RoPE."""
    v: torch.Tensor
    """[B, L, Hkv, D], after G2."""
    gate_logits: torch.Tensor | None
    """[B, L, H, D], of G1."""


def new_cache(
    config: GSAConfig, batch: int, max_length: int, *, device: torch.device, dtype: torch.dtype
) -> GSACache:
    """Create an empty cache for `batch` sequences of up to `max_length` tokens."""
    check_at_least("batch", batch, 1)
    check_at_least("max_length", max_length, 1)
    kv_heads, size = config.num_kv_heads, config.head_size
    workspace = None
    if config.implementation_on(device) == "triton":
        workspace = new_workspace(
            batch, max_length, heads=config.num_heads, kv_heads=kv_heads, head_size=size, device=device
        )
    keys, values = torch.zeros(2, batch, max_length, kv_heads, size, device=device, dtype=dtype)
    lengths = torch.zeros(batch, device=device, dtype=torch.int32)
    selection = new_selection(batch, most_selected(config.rule, max_length), device=device)
    indexer_keys = torch.zeros(batch, max_length, config.indexer_dim, device=device, dtype=dtype)
    decode = LayerCache(keys, values, lengths, selection, workspace)
    return GSACache(decode, indexer_keys)


def attend_with_cache(
    cache: GSACache,
    heads: Heads,
    indexer: Indexer,
    config: GSAConfig,
    variance_ema: torch.Tensor,
    attention: Literal["dense", "sparse"],
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write new tokens into the cache, and attend.

    Args:
        heads: the new tokens
        indexer: queries and keys of the new tokens

    Returns:
        out: [B, L, H, D], gated
        weights: [B, H, L, Lk], Lk the cache's length after the call; None without `need_weights`
    """
    _check_fit(cache, heads, indexer)
    num_new = heads.q.shape[1]
    _append(cache, heads, indexer)
    if attention == "sparse" and num_new == 1:
        out = _decode(cache, heads, indexer, config, variance_ema)
        attended = None
        if need_weights:
            held, length = cache.decode, cache.length
            attended = decoded_keys(held.selection, held.lengths, config.local_window, length)[:, None]
    else:
        geometry, selection = _select(cache, indexer, config, variance_ema, attention)
        k, v = cache.decode.k[:, : cache.length], cache.decode.v[:, : cache.length]
        implementation = config.implementation_on(k.device)
        out, _ = sparse_attention(
            heads.q, k, v, selection, geometry, heads.gate_logits, implementation=implementation
        )
        attended = attended_keys(selection, geometry, heads.q, k) if need_weights else None
    if attended is None:
        return out, None
    return out, attention_probs(heads.q, cache.decode.k[:, : cache.length], attended)


def _check_fit(cache: GSACache, heads: Heads, indexer: Indexer) -> None:
    keys = cache.decode.k
    if len(heads.k) != len(keys):
        raise ValueError(f"x has {len(heads.k)} sequences and the cache {len(keys)}; pass as many")
    wanted = cache.length + heads.k.shape[1]
    if wanted > cache.max_length:
        raise ValueError(
            f"the cache holds {cache.length} of {cache.max_length} tokens and x has {heads.k.shape[1]}; make one with "
            f"max_length of at least {wanted}"
        )
    for name, new in {"keys": heads.k, "values": heads.v, "indexer keys": indexer.keys}.items():
        if (new.dtype, new.device) != (keys.dtype, keys.device):
            raise ValueError(
                f"the {name} of x are {new.dtype} on {new.device}, the cache is {keys.dtype} on {keys.device}; "
                "pass dtype= to new_cache, after the layer has moved to its device"
            )


def _append(cache: GSACache, heads: Heads, indexer: Indexer) -> None:
    start, end = cache.length, cache.length + heads.k.shape[1]
    cache.decode.k[:, start:end] = heads.k
    cache.decode.v[:, start:end] = heads.v
    cache.indexer_keys[:, start:end] = indexer.keys
    cache.decode.lengths.fill_(end)
    cache.length = end


def _decode(
    cache: GSACache, heads: Heads, indexer: Indexer, config: GSAConfig, variance_ema: torch.Tensor
) -> torch.Tensor:
    """Compute attention of the cache's last token, [B, 1, H, D]."""
    gate = heads.gate_logits
    out = decode_step(
        heads.q[:, 0],
        replace(indexer, keys=cache.indexer_keys),
        cache.decode,
        config.rule,
        variance_ema,
        config.geometry(None),
        None if gate is None else gate[:, 0],
        implementation=config.implementation_on(heads.q.device),
    )
    return out[:, None]


def _select(
    cache: GSACache,
    indexer: Indexer,
    config: GSAConfig,
    variance_ema: torch.Tensor,
    attention: Literal["dense", "sparse"],
) -> tuple[Geometry, Selection | None]:
    """Return geometry and selection of the cache's last tokens, one per row of the indexer."""
    start = cache.length - indexer.queries.shape[1]
    if attention == "dense":
        return Geometry(query_start=start), None
    geometry, implementation = config.geometry(None, start), config.implementation_on(indexer.keys.device)
    with_all_keys = replace(indexer, keys=cache.indexer_keys[:, : cache.length])
    chosen = select(with_all_keys, config.rule, variance_ema, geometry, implementation=implementation)
    return geometry, chosen
