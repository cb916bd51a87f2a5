"""Attention over pages in plain torch, one request after another. Exact and slow.

Shapes have T tokens of the step, t tokens of one request in it, and n keys of this request.
"""

from dataclasses import dataclass

import torch
from gsa_hf.attention_gsa import GSAAttention
from gsa_hf.indexer_gsa import IndexedTokens, best_of_groups, select_keys
from torch.nn.functional import scaled_dot_product_attention

from gsa_vllm.pages import PagedCache, PageMetadata


@dataclass
class Request:
    tokens: slice
    """its tokens in the step"""
    pages: torch.Tensor
    """int32 [pages]"""
    length: int
    causal: torch.Tensor
    """bool [1, t, n], the causal keys of each token"""
    selection: torch.Tensor | None = None
    """bool [1, t, n], the keys that the indexer of this or an earlier layer selected"""


@dataclass
class Step:
    requests: list[Request]
    """empty in a profiling run"""
    slots: torch.Tensor
    """int64 [T], where the caches hold the step's tokens"""
    rotary: tuple[torch.Tensor, torch.Tensor]
    """cosines and sines [1, T, channels]"""
    indexer_rotary: tuple[torch.Tensor, torch.Tensor] | None


def requests_of(metadata: PageMetadata) -> list[Request]:
    requests = []
    for number, length in enumerate(metadata.lengths):
        tokens = slice(metadata.starts[number], metadata.starts[number + 1])
        keys = torch.arange(length, device=metadata.slots.device)
        causal = keys <= keys[length - (tokens.stop - tokens.start) :, None]
        requests.append(Request(tokens, metadata.block_table[number], length, causal[None]))
    return requests


def attend(
    attention: GSAAttention, keys: PagedCache, indexer_keys: PagedCache | None, x: torch.Tensor, step: Step
) -> torch.Tensor:
    """Return the attention output [1, T, d] of the normalised hidden states x [1, T, d]."""
    q, k, v = attention.project(x, step.rotary, (*x.shape[:2], -1, attention.head_dim))
    keys.write(torch.cat((k, v), -1)[0].transpose(0, 1), step.slots)
    logits = None if attention.output_gate_proj is None else attention.output_gate_proj(x)
    indexed = None
    if attention.indexer is not None and indexer_keys is not None:
        indexed = attention.indexer(x, step.indexer_rotary)
        indexer_keys.write(indexed.keys[0, :, None], step.slots)
    out = torch.zeros_like(q)
    for request in step.requests:
        if indexed is not None and indexer_keys is not None:
            request.selection = select(attention, indexed, indexer_keys, request)
        mask = request.selection if attention.is_sparse else request.causal
        assert mask is not None
        cached = keys.read(request.pages, request.length)[None].chunk(2, -1)
        queries = q[:, :, request.tokens]
        out[:, :, request.tokens] = scaled_dot_product_attention(
            queries, *cached, attn_mask=mask[:, None], scale=attention.scaling, enable_gqa=True
        )
    return attention.leave(out.transpose(1, 2), logits, x)


def select(
    attention: GSAAttention, indexed: IndexedTokens, indexer_keys: PagedCache, request: Request
) -> torch.Tensor:
    """Return the selection of a request's tokens, bool [1, t, n]."""
    assert attention.indexer is not None
    queries, weights = indexed.queries[:, request.tokens], indexed.weights[:, request.tokens]
    keys = indexer_keys.read(request.pages, request.length)
    scores = attention.indexer.scores(IndexedTokens(queries, keys, weights))
    if (size := attention.config.key_group_size) > 1:
        groups = torch.arange(request.length, device=keys.device)[None] // size
        scores = best_of_groups(scores, request.causal, groups)
    return select_keys(attention.indexer, attention.config, scores, request.causal)
