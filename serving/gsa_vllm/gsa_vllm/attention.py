"""Compute attention over vLLM's KV-cache pages: by kernels (kernels.py), or in plain torch for each request in turn.

pages.py defines the letters of shapes.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gsa_hf.attention_gsa import GSAAttention
from gsa_hf.gates_gsa import has_paper_form
from gsa_hf.indexer_gsa import IndexedTokens, select_keys
from gsa_vllm.pages import PagedCache, PageMetadata, Request, has_kernels


@dataclass
class Step:
    """Holds what all layers of one vLLM step share."""

    metadata: PageMetadata
    rotary: tuple[torch.Tensor, torch.Tensor]
    """cosines and sines [1, T, channels]"""
    indexer_rotary: tuple[torch.Tensor, torch.Tensor] | None


def attend(
    attention: GSAAttention, keys: PagedCache, indexer_keys: PagedCache | None, x: torch.Tensor, step: Step
) -> torch.Tensor:
    """Return the attention output [1, T, d] of the normalised hidden states x [1, T, d]."""
    slots = step.metadata.slots
    q, k, v = attention.project(x, step.rotary, (*x.shape[:2], -1, attention.head_dim))
    keys.write(torch.cat((k, v), -1)[0].transpose(0, 1), slots)
    indexed = None
    if attention.indexer is not None and indexer_keys is not None:
        indexed = attention.indexer(x, step.indexer_rotary)
        indexer_keys.write(indexed.keys[0, :, None], slots)
    logits = None if attention.output_gate_proj is None else attention.output_gate_proj(x)
    if has_kernels(x.device):
        from gsa_vllm import kernels  # imports Triton

        fused = logits if has_paper_form(attention.config) else None
        out = kernels.attend(attention, q, fused, indexed, (keys, indexer_keys), step.metadata)
        return attention.leave(out, None if fused is logits else logits, x)
    out = torch.zeros_like(q)
    for request in step.metadata.requests:
        if indexed is not None and indexer_keys is not None:
            request.selection = select(attention, indexed, indexer_keys, request)
        mask = request.selection if attention.is_sparse else request.causal
        assert mask is not None
        queries, cached = q[:, :, request.tokens], keys.read(request)[None].chunk(2, -1)
        out[:, :, request.tokens] = scaled_dot_product_attention(
            queries, *cached, attn_mask=mask[:, None], scale=attention.scaling, enable_gqa=True
        )
    return attention.leave(out.transpose(1, 2), logits, x)


def select(
    attention: GSAAttention, indexed: IndexedTokens, indexer_keys: PagedCache, request: Request
) -> torch.Tensor:
    """Return which of a request's n keys each of its t tokens selects, bool [1, t, n]."""
    assert attention.indexer is not None
    queries, weights = indexed.queries[:, request.tokens], indexed.weights[:, request.tokens]
    scores = attention.indexer.scores(IndexedTokens(queries, indexer_keys.read(request), weights))
    return select_keys(attention.indexer, attention.config, scores, request.causal)
