"""Run selection, attention, decoding and indexer loss by the kernels of gsa_kernels (`attn_implementation="gsa"`).

Shapes have B sequences, L queries, Lk keys, and H query heads and Hkv key-value heads of size D.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .kernel_pass_gsa import KernelPass, kernel_module


@dataclass
class KernelCall:
    """Holds the arguments of one layer's call, and its results except the attention output."""

    kernel_pass: KernelPass
    tokens: Any
    """`IndexedTokens` of this forward pass, or None"""
    rows: torch.Tensor | None
    """[B, Lk, DI], the indexer's keys in the cache"""
    selection: Any
    """Before the call: in a layer without an indexer, the selection of an earlier layer; in a layer with an indexer,
    None or the keys (bool [B, L, Lk]) that replace the indexer's choice. After the call: the layer's selection, or None
    if the queries attended to all causal keys."""
    gate_logits: torch.Tensor | None
    """[B, L, H, D]"""
    learns: bool
    loss: torch.Tensor | None = field(default=None, init=False)


def gsa_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    call: KernelCall | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the gated output [B, L, H, D] and None. Query is [B, H, L, D], key and value are [B, Hkv, Lk, D]."""
    if call is None:
        raise ValueError(f"attn_implementation is 'gsa' for {type(module).__name__}; pass 'sdpa'")
    step = _decode if call.kernel_pass.decodes else _attend
    return step(module, query, key.transpose(1, 2), value.transpose(1, 2), call), None


def _attend(
    module: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall
) -> torch.Tensor:
    """Return the output [B, L, H, D] for keys and values [B, Lk, Hkv, D]."""
    api, types, place, config = kernel_module("api"), kernel_module("types"), call.kernel_pass, module.config
    end = place.past + place.length
    q = place.arranged(query.transpose(1, 2))
    k, v = (x[:, :end] if place.past else place.arranged(x[:, :end]) for x in (k, v))
    gate = None if call.gate_logits is None else place.arranged(call.gate_logits)
    # If every query selects all causal keys, only the indexer loss needs the scores.
    needed = call.learns or call.selection is not None or end >= config.dense_below
    sparse = module.is_sparse and needed
    window = config.local_window if sparse else 0
    geometry = types.Geometry(place.document_starts, place.past, window)
    applied = None
    if module.indexer is not None and sparse:
        assert call.rows is not None
        keys = call.rows[:, :end] if place.past else place.arranged(call.rows[:, :end])
        queries, weights = (place.arranged(each) for each in (call.tokens.queries, call.tokens.weights))
        applied = applied_indexer(module.indexer, queries, keys, weights)
        chosen = api.select(
            applied, kernel_rule(config), module.indexer.variance_ema, geometry, implementation="triton"
        )
        call.selection = chosen if call.selection is None else _replaced(chosen, call.selection, place)
    selection = call.selection if sparse else None
    out, lse = api.sparse_attention(q, k, v, selection, geometry, gate, implementation="triton")
    if call.learns and applied is not None:
        if place.past:
            raise ValueError(f"the cache holds {place.past} tokens in training; pass use_cache=False")
        q, k = q.detach(), k.detach()
        total, _ = api.indexer_loss(applied, q, k, lse, selection, geometry, implementation="triton")
        call.loss = total / place.counted
    return place.restored(out)


def _replaced(chosen: Any, given: torch.Tensor, place: KernelPass) -> Any:
    """Return the given keys, bool [B, L, Lk], as a selection. If a query has no causal key among them, its keys come
    from `chosen`."""
    keys, most = given.shape[-1], kernel_module("limits").PACKED_MASK_MAX_TOKENS
    if keys > most:
        raise ValueError(f"selections have {keys} keys with attn_implementation 'gsa'; pass at most {most}")
    rows = torch.arange(place.length, device=given.device)
    given = place.arranged(place.arranged(given).transpose(1, 2)).transpose(1, 2)
    causal = kernel_module("selection.causal_packed_mask").causal_packed_mask(
        place.past + rows, keys, place.document_starts
    )
    packed = kernel_module("packed_mask").pack_mask(given) & causal
    packed = torch.where((packed != 0).any(-1, keepdim=True), packed, chosen.packed_rows(rows))
    return kernel_module("types").Selection(packed, None, chosen.budget, chosen.variance)


def attended_keys(selection: Any, place: KernelPass, config: Any, slots: int) -> torch.Tensor:
    """Return the keys to which a layer's queries attended, bool [B, L, slots], in the order of the cache.

    Args:
        selection: the selection that the call of a layer with an indexer has set
    """
    if place.decodes:
        reference = kernel_module("decode.reference")
        found = reference.decoded_keys(selection, place.lengths, config.local_window, slots)
        if place.starts is not None:
            places = torch.arange(slots, device=found.device) - place.starts[:, None]
            found = found.gather(1, places.clamp(min=0))
        return (found & place.filled(slots))[:, None]
    rows, end = torch.arange(place.length, device=place.lengths.device), place.past + place.length
    if selection is None:
        causal = kernel_module("selection.causal_packed_mask").causal_packed_mask
        packed = causal(place.past + rows, end, place.document_starts).expand(len(place.lengths), -1, -1)
    else:
        packed = selection.packed_rows(rows)
    found = kernel_module("packed_mask").unpack_mask(packed, end)
    return place.restored(place.restored(found).transpose(1, 2)).transpose(1, 2)


def _decode(
    module: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall
) -> torch.Tensor:
    """Return the output for one token of each sequence, without gradient and without host synchronization."""
    if torch.is_grad_enabled() and module.training:
        raise ValueError(
            "one token with a cache in training with attn_implementation 'gsa'; pass use_cache=False"
        )
    if not module.is_sparse:
        return _decode_dense(query, k, v, call)
    decode, state = kernel_module("decode.op"), kernel_module("decode.state")
    place, config = call.kernel_pass, module.config
    batch, room, kv_heads, size = k.shape
    workspace = place.memory.workspace(batch, room, query.shape[1], kv_heads, size, query.device)
    q, gate = query[:, :, 0], None if call.gate_logits is None else call.gate_logits[:, 0]
    most_keys = state.most_selected(kernel_rule(config), room)

    if module.indexer is not None:
        call.selection = place.memory.selection(batch, most_keys, query.device)
    held = state.LayerCache(k, v, place.lengths, call.selection, workspace, place.starts)
    if module.indexer is not None:
        assert call.rows is not None
        applied = applied_indexer(module.indexer, call.tokens.queries, call.rows, call.tokens.weights)
        decode.decode_select(applied, held, kernel_rule(config), module.indexer.variance_ema)
    return decode.decode_attend(q, held, config.local_window, gate)[:, None]


def _decode_dense(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: KernelCall) -> torch.Tensor:
    """Attend to all tokens of each sequence, by torch."""
    visible = call.kernel_pass.filled(k.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, k.transpose(1, 2), v.transpose(1, 2), visible[:, None, None], enable_gqa=True
    )
    return gated(out.transpose(1, 2), call.gate_logits)


def gated(out: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """Apply the gate G1 of the paper, if there is one, to the attention output [..., H, D]."""
    return out if logits is None else (out.float() * torch.sigmoid(logits.float())).to(out.dtype)


def applied_indexer(indexer: Any, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> Any:
    return kernel_module("types").Indexer(
        queries,
        keys,
        weights,
        indexer.bias_of_scores,
        indexer.weight_bias,
        indexer.activation,
        indexer.inverse_temperature(),
    )


def kernel_rule(config: Any) -> Any:
    sizes = (config.index_topk, config.k_min, config.k_max)
    return kernel_module("types").BudgetRule(*sizes, config.adaptive_k, config.dense_below)


def _padding_mask(attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """Return the padding mask [B, slots], the only mask that the kernels use."""
    return attention_mask


AttentionInterface.register("gsa", gsa_attention_forward)
AttentionMaskInterface.register("gsa", _padding_mask)
