"""Compute attention over vLLM's KV-cache pages with gsa_kernels, on a GPU or in Triton's interpreter.

Each vLLM step processes tokens of several requests. Decoding requests come first in a step and share kernel launches.
For each of the remaining requests, this module gathers the keys and runs the training kernels. In shapes, B is the
number of decoding requests. pages.py defines the other letters.
"""

from dataclasses import replace

import torch

from gsa_hf.attention_gsa import GSAAttention
from gsa_hf.indexer_gsa import IndexedTokens
from gsa_hf.kernel_pass_gsa import KernelMemory, KernelPass
from gsa_hf.kernels_gsa import KernelCall, applied_indexer, gsa_attention_forward, kernel_rule
from gsa_kernels.decode.op import decode_attend, decode_select
from gsa_kernels.decode.state import LayerCache, most_selected, new_selection, new_workspace
from gsa_vllm.pages import PagedCache, PageMetadata, Request

Caches = tuple[PagedCache, PagedCache | None]
"""the keys and values of a layer, and its indexer's keys"""


def attend(
    attention: GSAAttention,
    q: torch.Tensor,
    logits: torch.Tensor | None,
    indexed: IndexedTokens | None,
    caches: Caches,
    metadata: PageMetadata,
) -> torch.Tensor:
    """Return the attention output [1, T, H, D] of the queries [1, H, T, D], multiplied by the output gate G1 if its
    `logits` are given."""
    out = q.new_zeros(q.transpose(1, 2).shape)
    gate = None if logits is None else logits.view(out.shape)
    if batch := len(metadata.lengths):
        if metadata.decoding is None:
            metadata.decoding = new_decoding(attention, caches[0], metadata)
        queries, given = q[0, :, :batch].transpose(0, 1), None if gate is None else gate[0, :batch]
        out[0, :batch] = decode(attention, queries, given, indexed, caches, metadata.decoding)
    for request in metadata.requests:
        queries, given = q[:, :, request.tokens], None if gate is None else gate[:, request.tokens]
        out[:, request.tokens] = prefill(attention, queries, given, indexed, caches, request)
    return out


def new_decoding(attention: GSAAttention, keys: PagedCache, metadata: PageMetadata) -> LayerCache:
    """Return the `LayerCache` that all layers share in decoding. Its memory holds a selection and kernel workspace."""
    k, v = keys.key_and_value()
    batch, kv_heads, size = len(metadata.lengths), *k.shape[2:]
    nothing = new_selection(batch, 1, device=k.device)
    cache = LayerCache(k, v, metadata.lengths, nothing, None, block_table=metadata.block_table)
    most_keys = most_selected(kernel_rule(attention.config), cache.max_length)
    sizes = {"heads": kv_heads * attention.num_key_value_groups, "kv_heads": kv_heads, "head_size": size}
    return replace(
        cache,
        selection=new_selection(batch, most_keys, device=k.device),
        workspace=new_workspace(batch, cache.max_length, **sizes, device=k.device),
    )


def decode(
    attention: GSAAttention,
    q: torch.Tensor,
    gate_logits: torch.Tensor | None,
    indexed: IndexedTokens | None,
    caches: Caches,
    shared: LayerCache,
) -> torch.Tensor:
    """Return the attention [B, H, D] of the decoding requests' queries [B, H, D]."""
    keys, indexer_keys = caches
    k, v = keys.key_and_value()
    cache, config = replace(shared, k=k, v=v), attention.config
    if not attention.is_sparse:  # a window of all keys
        nothing = new_selection(len(q), 1, device=q.device)
        return decode_attend(q, replace(cache, selection=nothing), cache.max_length, gate_logits)
    if indexed is not None and indexer_keys is not None:
        assert attention.indexer is not None
        queries, weights = (each[0, : len(q), None] for each in (indexed.queries, indexed.weights))
        applied = applied_indexer(attention.indexer, queries, indexer_keys.kv_cache[:, 0], weights)
        decode_select(applied, cache, kernel_rule(config), attention.indexer.variance_ema)
    return decode_attend(q, cache, config.local_window, gate_logits)


def prefill(
    attention: GSAAttention,
    q: torch.Tensor,
    gate_logits: torch.Tensor | None,
    indexed: IndexedTokens | None,
    caches: Caches,
    request: Request,
) -> torch.Tensor:
    """Return the attention [1, t, H, D] of a request's queries [1, H, t, D]."""
    keys, indexer_keys = caches
    tokens = rows = None
    if indexed is not None and indexer_keys is not None:
        tokens = IndexedTokens(*(each[:, request.tokens] for each in indexed))
        rows = indexer_keys.read(request)
    past = request.length - q.shape[2]
    lengths = torch.full((1,), request.length, dtype=torch.int32, device=q.device)
    place = KernelPass(KernelMemory(), q.shape[2], past, lengths)
    earlier = None if tokens is not None else request.selection
    call = KernelCall(place, tokens, rows, earlier, gate_logits, learns=False)
    k, v = keys.read(request)[None].chunk(2, -1)
    out, _ = gsa_attention_forward(attention, q, k, v, None, call=call)
    request.selection = call.selection
    return out
