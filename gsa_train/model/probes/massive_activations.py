"""Find the largest activation of the residual stream and its place.

Massive activations occur in a few dimensions, at first tokens and delimiters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gsa_train.model.gsa_attention import GSASelfAttention
from gsa_train.model.probes.stats import ENDS_DOCUMENT, ORDINARY, STARTS_DOCUMENT
from gsa_train.model.runtime import AttentionRuntime


class Largest(NamedTuple):
    """Holds 0-d tensors."""

    value: torch.Tensor
    """Absolute value."""
    token: torch.Tensor
    """Index of the token in [L, B]: l B + b for token l of sequence b."""
    dimension: torch.Tensor


def measure_activations(runtime: AttentionRuntime) -> Any:

    def hook(layer: Any, inputs: Any, keywords: dict[str, Any], output: Any) -> None:
        if not runtime.pass_of_this_forward().measures:
            return
        attention: GSASelfAttention = layer.self_attention
        hidden, document_ids = output[0].detach(), keywords["attention_mask"]
        held, batch = hidden.shape[:2]

        def kinds_here() -> torch.Tensor:
            positions = _positions(attention, held, hidden.device)
            return token_kinds(positions, document_ids).expand(-1, batch).flatten()

        # Sequence-parallel ranks hold different tokens, but each rank has its own runtime.
        kinds = runtime.once(document_ids, ("kinds", held, batch), kinds_here)
        largest = largest_activation(hidden)
        kind = kinds.take(largest.token)
        runtime.stats.maximum_at(attention.layer, largest.value, largest.dimension, kind)

    return hook


def largest_activation(hidden: torch.Tensor) -> Largest:
    """Find the largest |x| of [L, B, d] in one read, without a copy; NaN if any element is NaN.

    `take` and `index_select` are used, because indexing with a tensor makes the host wait for the device."""
    tokens = hidden.flatten(0, 1)
    of_tokens = torch.linalg.vector_norm(tokens, torch.inf, dim=-1)
    token = of_tokens.argmax()  # the NaN, if there is one
    dimension = tokens.index_select(0, token[None]).abs().argmax()
    return Largest(of_tokens.take(token), token, dimension)


def token_kinds(positions: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """Return STARTS_DOCUMENT, ENDS_DOCUMENT or ORDINARY for each token: int64 [T, B], or [T, 1] without documents.

    A token that ends a document is an EOS, unless the sequence ends there.

    Args:
        positions: int64 [T]
        document_ids: [B, L]; None if each sequence is one document
    """
    starts, ends = positions[:, None] == 0, torch.zeros_like(positions, dtype=torch.bool)[:, None]
    if document_ids is not None:
        ids, last = document_ids.t(), document_ids.shape[1] - 1
        own = ids[positions]
        starts = starts | (own != ids[(positions - 1).clamp(min=0)])
        ends = own != ids[(positions + 1).clamp(max=last)]
    kinds = torch.where(ends, ENDS_DOCUMENT, ORDINARY)
    return torch.where(starts, STARTS_DOCUMENT, kinds)


def _positions(attention: GSASelfAttention, held: int, device: torch.device) -> torch.Tensor:
    """Return positions in the sequence of this rank's tokens after a layer: int64 [held]."""
    tp, length = attention.groups.tp, held
    if attention.config.sequence_parallel:
        length = held * tp.size()
    chunks = attention.over_chunks.chunks(length)
    positions = torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])
    return positions if length == held else positions[tp.rank() * held : (tp.rank() + 1) * held]
