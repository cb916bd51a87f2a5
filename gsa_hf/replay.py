"""Compute log-probabilities of generated tokens with the keys that were selected during generation.

    with replayed_selections(model):
        tokens = model.generate(prompts, attention_mask=mask)
        logits = model(tokens, attention_mask=longer_mask).logits

A forward pass over the whole sequence rounds differently than decoding. If two keys have almost equal indexer scores,
the pass may therefore select a different key than decoding did. A different key changes the log-probability by more
than rounding would. Reusing the keys from decoding prevents this change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention_gsa import GSAAttention
from .kernels_gsa import attended_keys
from .modeling_gsa import GSAModel


@dataclass
class _Generation:
    """Holds what the forward passes of one call of `generate` selected. `join` concatenates the passes."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """int64 [B, L] of each pass"""
    causal_keys: torch.Tensor | None = None
    """bool [B, Lk], the causal keys of the last token"""
    selections: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Maps the number of a layer with an indexer to its selections, bool [B, L, Lk] for each pass"""
    joined: torch.Tensor | None = None
    """The concatenated selections, bool [layers with an indexer, B, L, Lk]"""
    sequences: list[list[int]] = field(default_factory=list)
    """The tokens of each sequence without padding"""

    def join(self) -> None:
        if len(self.tokens) == 1 and self.sequences:
            return
        self.tokens = [torch.cat(self.tokens, 1)]
        length = self.tokens[0].shape[1]
        layers = sorted(self.selections)
        for layer in layers:
            parts = [nn.functional.pad(each, (0, length - each.shape[-1])) for each in self.selections[layer]]
            self.selections[layer] = [torch.cat(parts, 1)]
        self.joined = torch.stack([self.selections[layer][0] for layer in layers])
        self.selections = {layer: [each] for layer, each in zip(layers, self.joined, strict=True)}
        assert self.causal_keys is not None
        rows = zip(self.tokens[0], self.causal_keys, strict=True)
        self.sequences = [tokens[real].tolist() for tokens, real in rows]

    def find(self, tokens: list[int]) -> int | None:
        """Return the row whose recorded sequence begins with these tokens, or None. `generate` makes no forward pass
        with the last token that it returns, so a recorded sequence lacks this token."""
        for row, known in enumerate(self.sequences):
            if len(known) >= len(tokens) - 1 and known[: len(tokens)] == tokens[: len(known)]:
                return row
        return None

    def copy(self, row: int, to: torch.Tensor, places: torch.Tensor) -> None:
        """Copy the selections of a row to `places` of a tensor [layers with an indexer, L, L]."""
        assert self.causal_keys is not None
        assert self.joined is not None
        slots = self.causal_keys[row].nonzero()[: len(places), 0]
        places = places[: len(slots)]
        to[:, places[:, None], places] = self.joined[:, row, slots[:, None], slots]


class _Replay:
    def __init__(self, generations: int) -> None:
        self.kept, self.generations = generations, list[_Generation]()
        self.records = False

    def before_model(self, _: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before each forward pass. A pass with a cache belongs to `generate`, and its selections are recorded. A
        pass without a cache scores generated tokens, and gets the recorded `selections` as an argument."""
        tokens, mask = args[0] if args else given.get("input_ids"), given.get("attention_mask")
        if tokens is None:
            raise ValueError(
                "input_ids is None while selections are replayed; pass input_ids, not inputs_embeds"
            )
        cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
        self.records = cache is not None
        if cache is None:
            if mask is not None and mask.ndim != 2:
                raise ValueError(f"attention_mask has {mask.ndim} dimensions; pass one of [batch, tokens]")
            return args, {**given, "selections": self._selections_of(tokens, mask)}
        if not cache.get_seq_length():
            self.generations = [*self.generations, _Generation()][-self.kept :]
        self.generations[-1].tokens.append(tokens)
        return args, given

    def after_layer(self, layer: Any, _: Any, given: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        if not self.records:
            return
        generation = self.generations[-1]
        length = sum(each.shape[1] for each in generation.tokens)  # a static cache has more slots
        if (place := given["kernel_pass"]) is not None:
            found = attended_keys(outputs[2], place, layer.config, length)
            generation.causal_keys = place.filled(length)
        else:
            found = outputs[2][..., :length]
            generation.causal_keys = given["attention_mask"][:, 0, -1, :length]
        generation.selections.setdefault(layer.layer_idx, []).append(found)

    def _selections_of(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        real = torch.ones_like(tokens) if mask is None else mask
        for each in self.generations:
            each.join()
        layers = len(self.generations[-1].selections) if self.generations else 0
        found = real.new_zeros(layers, *tokens.shape, tokens.shape[1], dtype=torch.bool)
        for row in range(len(tokens)):
            places = real[row].nonzero()[:, 0]
            sequence = tokens[row, places].tolist()
            sources = [(each, each.find(sequence)) for each in self.generations]
            generation, source = next((each for each in sources if each[1] is not None), (None, None))
            if generation is None or source is None:
                raise ValueError(
                    f"row {row} of input_ids was not generated with a cache in the last {self.kept} calls of "
                    "model.generate; generate it first, or pass more generations"
                )
            generation.copy(source, found[:, row], places)
        return list(found)


@contextmanager
def replayed_selections(model: nn.Module, generations: int = 1) -> Iterator[None]:
    """Record selections in passes with a cache, and replay them in passes without a cache over the same tokens.

    Args:
        model: contains a `GSAModel`, perhaps in adapters
        generations: number of latest `generate` calls whose selections are kept. A selection takes one byte for each
            pair of tokens in each layer with an indexer.

    Raises:
        ValueError: the model has no `GSAModel`, or a pass has tokens that `model.generate` did not generate
    """
    gsa = next((each for each in model.modules() if isinstance(each, GSAModel)), None)
    if gsa is None:
        raise ValueError(
            f"model is {type(model).__name__} without a gsa_hf.GSAModel; import gsa_hf and load it again"
        )
    replay = _Replay(generations)
    handles = [gsa.register_forward_pre_hook(replay.before_model, with_kwargs=True)]
    for layer in gsa.modules():
        if isinstance(layer, GSAAttention) and layer.indexer is not None:
            handles.append(layer.register_forward_hook(replay.after_layer, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
