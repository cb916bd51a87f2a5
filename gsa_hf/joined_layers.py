"""Compute a layer of `FusedDecoder`'s step in plain torch, with joined projections. row_layers.py uses kernels instead.

Shapes have B sequences, H query heads and Hkv key-value heads of size D, hidden size d, feed-forward width F, Lk cache
slots, and HI indexer heads of size DI.
"""

from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from .indexer_gsa import rotate


class LayerWeights(NamedTuple):
    norm: torch.Tensor
    joined: torch.Tensor
    """[rows, d], all projections of the normalised hidden state; `Sizes.parts` has each projection's number of rows"""
    bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """[2 F, d]"""
    down: torch.Tensor
    index_q_norm: torch.Tensor | None = None
    """[DI]"""
    index_k_norm: torch.Tensor | None = None


class Sizes(NamedTuple):
    parts: tuple[int, ...]
    """Numbers of rows of Q, K, V, G2, G1, the indexer's key, its queries, its head weights, and padding"""
    head_dim: int
    index_head_dim: int
    row: int
    """Width of the indexer's cached keys; 0 without an indexer"""
    eps: float
    index_heads: int = 0
    index_weight_logit: float | None = None
    """The constant logit of all head weights, if `parts` has no rows for them"""


class Buffers(NamedTuple):
    """Holds the tensors of one layer's cache."""

    k: torch.Tensor
    """[B, Hkv, Lk, D]"""
    v: torch.Tensor
    rows: torch.Tensor | None
    """[B, Lk, DI], the indexer's keys"""


class Projected(NamedTuple):
    """Holds the inputs of attention for the new tokens. Their keys and values are already in the cache."""

    q: torch.Tensor
    """[B, H, D]"""
    gate: torch.Tensor | None
    """[B, H, D], the logits of G1"""
    index_queries: torch.Tensor | None
    """[B, 1, HI, DI]"""
    index_weights: torch.Tensor | None
    """[B, 1, HI]"""


Rotary = tuple[torch.Tensor | None, ...]
"""Cosines and sines [B, channels] of the heads, then of the indexer (None without a rotary embedding)."""


def join_layer(layer: Any, config: Any) -> tuple[LayerWeights, Sizes]:
    """Return the weights of a `GSADecoderLayer`. Copies of projections with the same input are joined in one tensor."""
    attention, mlp, indexer = layer.self_attn, layer.mlp, layer.self_attn.indexer
    of_heads = [attention.q_proj, attention.k_proj, attention.v_proj]
    of_heads += [attention.value_gate_proj, attention.output_gate_proj]
    of_indexer = [getattr(indexer, name, None) for name in ("wk", "wq", "weights_proj")]
    weights = [_weight(each) for each in (*of_heads, *of_indexer)]
    parts = [0 if weight is None else len(weight) for weight in weights]
    parts.append(-sum(parts) % 64)  # padding, because multiples of 64 rows are fastest
    first = attention.q_proj.weight.detach()
    padding = first.new_zeros(parts[-1], first.shape[1])
    biases = [None if each is None else each.bias for each in of_heads]
    bias = None
    if any(each is not None for each in biases):
        rows = zip_longest(biases, parts)
        bias = torch.cat([first.new_zeros(count) if each is None else each.detach() for each, count in rows])
    made = LayerWeights(
        norm=layer.input_layernorm.weight.detach(),
        joined=torch.cat([*(weight for weight in weights if weight is not None), padding]),
        bias=bias,
        q_norm=_weight(attention.q_norm),
        k_norm=_weight(attention.k_norm),
        out=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight.detach(),
        index_q_norm=_weight(getattr(indexer, "q_norm", None)),
        index_k_norm=_weight(getattr(indexer, "k_norm", None)),
    )
    sizes = (config.head_dim, config.index_head_dim, parts[5], config.rms_norm_eps, config.index_n_heads)
    return made, Sizes(tuple(parts), *sizes, getattr(indexer, "weight_logit", None))


def _weight(module: Any) -> torch.Tensor | None:
    return None if module is None else module.weight.detach()


def enter(
    h: torch.Tensor,
    layer: LayerWeights,
    sizes: Sizes,
    cache: Buffers,
    slot: torch.Tensor,
    rotary: Rotary,
) -> Projected:
    """Compute the inputs of attention from the residual stream h [B, d]. Write keys, values and the indexer's keys into
    the cache at `slot`, int64 [1]."""
    x = nn.functional.rms_norm(h, h.shape[-1:], layer.norm, sizes.eps)
    projected = nn.functional.linear(x, layer.joined, layer.bias)
    q, k, v, value_gate, gate, index_k, index_q, index_w, _ = projected.split(sizes.parts, -1)
    if sizes.parts[3]:
        v = (v.float() * torch.sigmoid(value_gate.float())).to(v.dtype)
    q, k, v = (each.unflatten(-1, (-1, sizes.head_dim)) for each in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = nn.functional.rms_norm(q, q.shape[-1:], layer.q_norm, sizes.eps)
        k = nn.functional.rms_norm(k, k.shape[-1:], layer.k_norm, sizes.eps)
    cos, sin, index_cos, index_sin = rotary
    assert cos is not None
    assert sin is not None
    q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
    cache.k.index_copy_(2, slot, k[:, :, None])
    cache.v.index_copy_(2, slot, v[:, :, None])
    heads_gate = gate.unflatten(-1, (-1, sizes.head_dim)) if sizes.parts[4] else None
    if cache.rows is None:
        return Projected(q, heads_gate, None, None)
    index_q = index_q.unflatten(-1, (-1, sizes.index_head_dim))
    if sizes.index_weight_logit is not None:
        index_w = index_k.new_full((len(index_k), sizes.index_heads), sizes.index_weight_logit)
    if layer.index_q_norm is not None and layer.index_k_norm is not None:
        width = (sizes.index_head_dim,)
        index_q = nn.functional.rms_norm(index_q, width, layer.index_q_norm, sizes.eps)
        index_k = nn.functional.rms_norm(index_k, width, layer.index_k_norm, sizes.eps)
    if index_cos is not None and index_sin is not None:
        index_q = rotate(index_q, index_cos[:, None], index_sin[:, None])
        index_k = rotate(index_k, index_cos, index_sin)
    cache.rows.index_copy_(1, slot, index_k[:, None])
    return Projected(q, heads_gate, index_q[:, None], index_w[:, None])


def leave(h: torch.Tensor, attended: torch.Tensor, layer: LayerWeights, sizes: Sizes) -> torch.Tensor:
    """Add W_O times the gated attention output [B, H, D] to the residual stream h [B, d]. Then add the MLP's output."""
    h = h + nn.functional.linear(attended.flatten(1), layer.out)
    x = nn.functional.rms_norm(h, h.shape[-1:], layer.mlp_norm, sizes.eps)
    gate, up = nn.functional.linear(x, layer.gate_up).chunk(2, -1)
    return h + nn.functional.linear(nn.functional.silu(gate) * up, layer.down)


def pass_on(
    h: torch.Tensor,
    attended: torch.Tensor,
    left: tuple[LayerWeights, Sizes],
    entered: tuple[LayerWeights, Sizes],
    cache: Buffers,
    slot: torch.Tensor,
    rotary: Rotary,
) -> tuple[torch.Tensor, Projected]:
    """Run `leave` of this layer and `enter` of the next layer."""
    h = leave(h, attended, *left)
    return h, enter(h, *entered, cache, slot, rotary)


def finish(
    h: torch.Tensor,
    attended: torch.Tensor,
    left: tuple[LayerWeights, Sizes],
    norm: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Run `leave` of the last layer, and return the logits [B, vocab]."""
    h = leave(h, attended, *left)
    return nn.functional.linear(nn.functional.rms_norm(h, h.shape[-1:], norm, left[1].eps), head)
