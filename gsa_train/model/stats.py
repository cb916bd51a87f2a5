"""Statistics of the attention layers, kept on the device and reduced once per logged step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MEANS = (
    "indexer_kl",
    "recall",
    "random_recall",
    "k_mean",
    "selected_keys",
    "value_gate_mean",
    "value_gate_low",
    "value_gate_high",
    "output_gate_mean",
    "output_gate_low",
    "output_gate_high",
    "indexer_saturated",
    "first_token_attention",
    "adjacent_overlap",
    "union_ratio_32",
    "union_density",
    "variance",
    "variance_ema",
)
"""Averages over tokens (and heads): sums and counts are added over all ranks.

Those of k_t, of the scores' variance and of the indexer's KL are over all tokens; those of the gates, and
`indexer_saturated` with the keys it sees, over every 16th position of the sample. The others are over a sample of the
queries (query_sample.py): all of sequences of up to 512 tokens, else 8 runs of 64 neighbours. `adjacent_overlap` is
over the pairs of neighbours within its runs, and `union_ratio_32` over their groups of 32, as far as one rank holds
them: context-parallel ranks leave out pairs and groups across the borders of their chunks of a sequence. No run lies
across one where 64 divides a chunk of a sequence of more than 512 tokens."""

EXTREMES = ("k_max", "k_min", "max_activation", "max_attention_logit")
"""Largest values over all ranks; `k_min` is kept negated. `max_attention_logit` sees what `indexer_saturated` does."""


FOLDED_AFTER = 64
"""Numbers of one statistic of one layer that wait at most: a long validation has thousands."""


class _Table:
    """One fp64 number per statistic and layer: of all that was put in, joined by `join` (a sum or a maximum).

    What is put in waits until the numbers are asked for, and is then joined for all layers at once. One by one they
    would be three operations each, and a logged step has hundreds for the host to launch.
    """

    def __init__(
        self, shape: tuple[int, int], start: float, join: Callable[..., Any], device: torch.device
    ) -> None:
        self._numbers = torch.full(shape, start, dtype=torch.float64, device=device)
        self._start, self._join = start, join
        self._waiting: dict[tuple[int, int], list[torch.Tensor]] = {}

    def put(self, row: int, layer: int, value: torch.Tensor) -> None:
        waiting = self._waiting.setdefault((row, layer), [])
        waiting.append(value)
        if len(waiting) == FOLDED_AFTER:
            self._join_waiting()

    def numbers(self) -> torch.Tensor:
        """fp64 [statistics, layers]."""
        self._join_waiting()
        return self._numbers

    def _join_waiting(self) -> None:
        rows, layers = self._numbers.shape
        cells = [self._waiting.get((row, layer), []) for row in range(rows) for layer in range(layers)]
        for turn in itertools.zip_longest(*cells):
            present = next(value for value in turn if value is not None)
            nothing = torch.full_like(present, self._start)
            column = torch.stack([nothing if value is None else value for value in turn])
            self._join(self._numbers, column.double().view(rows, layers), out=self._numbers)
        self._waiting.clear()

    def set(self, numbers: torch.Tensor | float) -> None:
        self._waiting.clear()
        if isinstance(numbers, torch.Tensor):
            self._numbers.copy_(numbers)
        else:
            self._numbers.fill_(numbers)


class LayerStats:
    """Sums, counts and extremes per layer of the whole model; a rank fills the rows of its own layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        means, extremes = (len(MEANS), num_layers), (len(EXTREMES), num_layers)
        self._sums = _Table(means, 0.0, torch.add, device)
        self._counts = [[0] * num_layers for _ in MEANS]
        self._extremes = _Table(extremes, -math.inf, torch.maximum, device)
        # A sum in another type than its terms' is a copy of all of them first. A GPU adds up fp32 as a tree: 1e-7.
        self._sum_type = torch.float32 if device.type == "cuda" else torch.float64

    def add(self, name: str, layer: int, values: torch.Tensor) -> None:
        """Add all elements of `values` to the average `name` of layer `layer` (from 0)."""
        row = MEANS.index(name)
        self._sums.put(row, layer, values.detach().sum(dtype=self._sum_type))
        self._counts[row][layer] += values.numel()

    def maximum(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Keep the largest of the 0-d `value` and what is there."""
        self._extremes.put(EXTREMES.index(name), layer, value.detach().to(self._sum_type))

    def reset(self) -> None:
        self._sums.set(0.0)
        self._counts = [[0] * len(row) for row in self._counts]
        self._extremes.set(-math.inf)

    def copy(self) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
        """What was recorded so far, for `restore`."""
        counts = [list(row) for row in self._counts]
        return self._sums.numbers().clone(), counts, self._extremes.numbers().clone()

    def restore(self, copy: tuple[torch.Tensor, list[list[int]], torch.Tensor]) -> None:
        """Forget what was recorded since."""
        sums, counts, extremes = copy
        self._sums.set(sums)
        self._counts = [list(row) for row in counts]
        self._extremes.set(extremes)

    def reduce(
        self, extra_sums: torch.Tensor, extra_maxima: torch.Tensor
    ) -> tuple[dict[str, list[float]], list[float], list[float]]:
        """Values per layer over all ranks, with two collectives that also carry the caller's own numbers.

        Tensor-parallel copies enter numerator and denominator alike. Call it on every rank, for logged steps
        only: it reads the device.

        Args:
            extra_sums: fp64 [n], added over the ranks.
            extra_maxima: fp64 [m], the largest over the ranks.

        Returns:
            name -> value per layer (a name that no layer recorded is left out; NaN for a layer that did not),
            and the reduced extras.
        """
        own_sums, own_extremes = self._sums.numbers(), self._extremes.numbers()
        own_counts = torch.tensor(self._counts, dtype=torch.float64, device=self.device)
        sums = torch.cat([own_sums.flatten(), own_counts.flatten(), extra_sums])
        maxima = torch.cat([own_extremes.flatten(), extra_maxima])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        sums, maxima = sums.cpu(), maxima.cpu()
        size = own_sums.numel()
        totals = sums[:size].view(own_sums.shape)
        counts = sums[size : 2 * size].view(own_sums.shape)
        extremes = maxima[: own_extremes.numel()].view(own_extremes.shape)
        values: dict[str, list[float]] = {}
        for row, name in enumerate(MEANS):
            if (counts[row] > 0).any():
                values[name] = (totals[row] / counts[row]).tolist()  # 0 / 0 is NaN: nothing recorded
        for row, name in enumerate(EXTREMES):
            recorded = extremes[row] > -torch.inf
            if recorded.any():
                sign = -1.0 if name == "k_min" else 1.0
                values[name] = torch.where(recorded, sign * extremes[row], torch.nan).tolist()
        return values, sums[2 * size :].tolist(), maxima[own_extremes.numel() :].tolist()
