"""Statistics of the attention layers, kept on the device and reduced once per logged step."""

from __future__ import annotations

import torch
import torch.distributed as dist

MEANS = (
    "indexer_kl",
    "recall",
    "random_recall",
    "k_mean",
    "value_gate_mean",
    "value_gate_low",
    "output_gate_mean",
    "output_gate_low",
    "first_token_attention",
    "adjacent_overlap",
    "union_ratio_32",
    "variance",
)
"""Averages over tokens (and heads): sums and counts are added over all ranks."""

EXTREMES = ("k_max", "k_min", "max_activation")
"""Largest values over all ranks; `k_min` is kept negated."""


class LayerStats:
    """Sums, counts and extremes per layer of the whole model; a rank fills the rows of its own layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._sums = torch.zeros(len(MEANS), num_layers, dtype=torch.float64, device=device)
        self._counts = torch.zeros_like(self._sums)
        self._extremes = torch.full(
            (len(EXTREMES), num_layers), -torch.inf, dtype=torch.float64, device=device
        )

    def add(self, name: str, layer: int, values: torch.Tensor) -> None:
        """Add all elements of `values` to the average `name` of layer `layer` (from 0)."""
        row = MEANS.index(name)
        self._sums[row, layer] += values.detach().sum(dtype=torch.float64)
        self._counts[row, layer] += values.numel()

    def maximum(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Keep the largest of the 0-d `value` and what is there."""
        cell = self._extremes[EXTREMES.index(name), layer]
        torch.maximum(cell, value.detach().to(cell), out=cell)

    def reset(self) -> None:
        self._sums.zero_()
        self._counts.zero_()
        self._extremes.fill_(-torch.inf)

    def reduce(self) -> dict[str, list[float]]:
        """Values per layer over all ranks; a name that no layer recorded is left out.

        Tensor-parallel copies enter numerator and denominator alike. Collective: call it on every rank.
        This reads the device, so call it for logged steps only.
        """
        both = torch.stack([self._sums, self._counts])
        dist.all_reduce(both)
        dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX)
        sums, counts = both.cpu().unbind(0)
        extremes = self._extremes.cpu()
        values: dict[str, list[float]] = {}
        for row, name in enumerate(MEANS):
            recorded = counts[row] > 0
            if recorded.any():
                values[name] = [
                    (total / count).item() if count > 0 else float("nan")
                    for total, count in zip(sums[row], counts[row], strict=True)
                ]
        for row, name in enumerate(EXTREMES):
            if extremes[row].isfinite().any():
                sign = -1.0 if name == "k_min" else 1.0
                values[name] = (sign * extremes[row]).tolist()
        return values
