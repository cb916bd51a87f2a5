"""The largest activation of the residual stream, and where it is: massive activations stay in few dimensions, at first
tokens and delimiters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gsa_train.model.gsa_attention import GSASelfAttention
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.model.stats import ENDS_DOCUMENT, ORDINARY, STARTS_DOCUMENT


class Largest(NamedTuple):
    """0-d tensors."""

    value: torch.Tensor
    """Absolute."""
    token: torch.Tensor
    sequence: torch.Tensor
    dimension: torch.Tensor


def measure_activations(runtime: AttentionRuntime) -> Any:
    """Forward hook of a layer, with its keywords."""

    def hook(layer: Any, inputs: Any, keywords: dict[str, Any], output: Any) -> None:
        if not runtime.pass_of_this_forward().measures:
            return
        attention: GSASelfAttention = layer.self_attention
        hidden = output[0].detach()
        largest = largest_activation(hidden)
        position = _positions(attention, len(hidden), hidden.device).take(largest.token)
        kind = token_kind(position, largest.sequence, keywords["attention_mask"])
        runtime.stats.maximum_at(attention.layer, largest.value, largest.dimension, kind)

    return hook


def largest_activation(hidden: torch.Tensor) -> Largest:
    """Of [L, B, d], without a copy of it. The value is NaN if any is. The host does not wait: a tensor as an index
    would be read."""
    flat = hidden.contiguous().flatten()
    places = torch.stack([flat.argmax(), flat.argmin()])
    values = flat.take(places).abs()
    which = values.argmax()  # of NaN, if there is one
    place, (_, batch, width) = places.take(which), hidden.shape
    token = place // width
    return Largest(values.take(which), token // batch, token % batch, place % width)


def token_kind(
    position: torch.Tensor, sequence: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """STARTS_DOCUMENT, ENDS_DOCUMENT (an EOS, if it is not the sequence's last token) or ORDINARY: int64, 0-d.

    Args:
        position, sequence: 0-d
        document_ids: [B, L]; None where a sequence is one document
    """
    ordinary, starts = torch.full_like(position, ORDINARY), torch.full_like(position, STARTS_DOCUMENT)
    if document_ids is None:
        return torch.where(position == 0, starts, ordinary)
    length = document_ids.shape[1]
    around = ((position + step).clamp(0, length - 1) for step in (-1, 0, 1))
    before, own, after = (document_ids.take(sequence * length + each) for each in around)
    kind = torch.where(after != own, torch.full_like(position, ENDS_DOCUMENT), ordinary)
    return torch.where((position == 0) | (before != own), starts, kind)


def _positions(attention: GSASelfAttention, held: int, device: torch.device) -> torch.Tensor:
    """In the sequence, of the tokens that this rank holds behind a layer: int64 [held]."""
    tp, length = attention.groups.tp, held
    if attention.config.sequence_parallel:
        length = held * tp.size()
    chunks = attention.over_chunks.chunks(length)
    positions = torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])
    return positions if length == held else positions[tp.rank() * held : (tp.rank() + 1) * held]
