"""Defer reductions: keep small tensors of all layers and reduce them together, with few kernel launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch

MOST_BYTES = 1 << 24
"""Size limit for kept tensors, because a long validation has thousands of micro-batches."""


class DeferredReductions:
    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], list[tuple[int, tuple[torch.Tensor | None, ...]]]] = {}
        self._turns: Counter[Hashable] = Counter()
        self._bytes = 0

    def put(self, key: tuple[Any, ...], layer: int, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        """Keep the tensors until `take`, and return whether all kept tensors together exceed MOST_BYTES. If the second
        tensor holds bools, it is expanded to the shape of the first tensor."""
        first, *others = (None if tensor is None else tensor.detach() for tensor in tensors)
        assert first is not None
        if others and others[0] is not None and others[0].dtype == torch.bool:
            others[0] = others[0].expand_as(first)
        kept = (first, *others)
        # Each group has a layer at most once, because a reduction adds to each entry of a table once.
        turn = self._turns[key, layer]
        self._turns[key, layer] += 1
        alike = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in kept)
        self._groups.setdefault((key, turn, alike), []).append((layer, kept))
        self._bytes += sum(tensor.nbytes for tensor in kept if tensor is not None)
        return self._bytes > MOST_BYTES

    def take(self) -> Iterator[tuple[tuple[Any, ...], list[int], list[Any]]]:
        """Yield key, layers and tensors [layers, elements] of each group, and clear them."""
        groups, self._groups, self._bytes = self._groups, {}, 0
        self._turns.clear()
        for (key, _, _), of_layers in groups.items():
            yield (
                key,
                [layer for layer, _ in of_layers],
                [_stacked([kept[i] for _, kept in of_layers]) for i in range(len(of_layers[0][1]))],
            )


def _stacked(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Stack to [number, elements]; None if all are None."""
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given).view(len(given), -1) if given else None
