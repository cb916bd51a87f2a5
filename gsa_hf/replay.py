"""Score generated tokens with the keys that were selected when the tokens were generated.

    with replayed_selections(model):
        tokens = model.generate(prompts, attention_mask=mask)
        logits = model(tokens, attention_mask=longer_mask).logits

Rounding differs between decoding and scoring. Two keys with close scores can change places, so that another key is
selected and the log-probability changes by more than rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention_gsa import GSAAttention
from .modeling_gsa import GSAModel


@dataclass
class _Generation:
    """Holds one call of `generate`, by its forward passes."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """int64 [B, L] of each pass"""
    causal_keys: torch.Tensor | None = None
    """bool [B, Lk], the causal keys of the last token"""
    selections: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Layer -> bool [B, L, Lk] of each pass"""

    def find(self, tokens: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Return the sequence that begins with tokens [n], possibly without the last one, and its slots."""
        assert self.causal_keys is not None
        for row, known in enumerate(torch.cat(self.tokens, 1)):
            slots = self.causal_keys[row, : len(known)].nonzero()[: len(tokens), 0]
            if len(slots) >= len(tokens) - 1 and torch.equal(known[slots], tokens[: len(slots)]):
                return row, slots
        return None

    def joined(self) -> list[torch.Tensor]:
        """Return the selections of all passes, bool [B, T, T], of each layer with an indexer."""
        length = sum(each.shape[1] for each in self.tokens)
        return [
            torch.cat([nn.functional.pad(each, (0, length - each.shape[-1])) for each in parts], 1)
            for _, parts in sorted(self.selections.items())
        ]


class _Replay:
    def __init__(self, generations: int) -> None:
        self.kept, self.generations = generations, list[_Generation]()
        self.records = False

    def before_model(self, _: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Begin the record of a pass with a cache, or add `selections` to the arguments of a pass without one."""
        tokens = args[0] if args else given["input_ids"]
        cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
        self.records = cache is not None
        if cache is None:
            return args, {**given, "selections": self._selections_of(tokens, given.get("attention_mask"))}
        if not cache.get_seq_length():
            self.generations = [*self.generations, _Generation()][-self.kept :]
        self.generations[-1].tokens.append(tokens)
        return args, given

    def after_layer(self, layer: Any, _: Any, given: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        if not self.records:
            return
        if not isinstance(outputs[2], torch.Tensor):
            raise ValueError("attn_implementation is 'gsa', whose selections are not replayed; pass 'sdpa'")
        generation = self.generations[-1]
        length = sum(each.shape[1] for each in generation.tokens)  # a static cache has more slots
        generation.selections.setdefault(layer.layer_idx, []).append(outputs[2][..., :length])
        generation.causal_keys = given["attention_mask"][:, 0, -1, :length]

    def _selections_of(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        real = torch.ones_like(tokens) if mask is None else mask
        layers = len(self.generations[-1].selections) if self.generations else 0
        found = [real.new_zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool) for _ in range(layers)]
        joined = [each.joined() for each in self.generations]
        for row in range(len(tokens)):
            places = real[row].nonzero()[:, 0]
            matches = [each.find(tokens[row, places]) for each in self.generations]
            number, match = next(((n, each) for n, each in enumerate(matches) if each is not None), (0, None))
            if match is None:
                raise ValueError(
                    f"row {row} of input_ids was not generated in the last {self.kept} calls; generate it first, or "
                    "pass more generations"
                )
            source, slots = match
            places = places[: len(slots)]
            for result, selection in zip(found, joined[number], strict=True):
                result[row, places[:, None], places] = selection[source][slots[:, None], slots]
        return found


@contextmanager
def replayed_selections(model: nn.Module, generations: int = 1) -> Iterator[None]:
    """Record selections in passes with a cache, and replay them in passes without a cache over the same tokens.

    Args:
        model: contains a `GSAModel` with `attn_implementation` "sdpa" or "eager", perhaps in adapters
        generations: number of latest `generate` calls whose selections are kept: a bool for each pair of tokens in each
            layer with an indexer

    Raises:
        ValueError: the model has no `GSAModel`; in a pass, tokens that were not generated, or "gsa"
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
