"""Statistics of the attention layers, kept on the device and reduced once per logged step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

Those of k_t, of the scores' variance and of the indexer's KL are over all tokens. The others are over a sample of the
queries (query_sample.py): those of selections over all of sequences of up to 512 tokens, else 8 stretches of 64
neighbours; those that see all keys or have many values of their own (recall and random recall, attention to the first
token, the gates, `indexer_saturated`) over every 16th of these. `adjacent_overlap` is over the pairs of neighbours
within its stretches, and `union_ratio_32` over their groups of 32, as far as one rank holds them: context-parallel
ranks leave out pairs and groups across the borders of their chunks of a sequence. No stretch lies across one where 64
divides a chunk of a sequence of more than 512 tokens."""

EXTREMES = ("k_max", "k_min", "max_activation", "max_attention_logit")
"""Largest values over all ranks; `k_min` is kept negated. `max_attention_logit` sees what `indexer_saturated` does."""


@dataclass
class Statistics:
    """What one layer measured of one chunk of queries."""

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    """name of `MEANS` -> values to average, of any shape."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """name of `EXTREMES` -> 0-d."""


FOLDED_AFTER = 8
"""Numbers of one statistic of one layer that wait at most: a long validation has thousands."""


class _Table:
    """One fp64 number per statistic and layer: of all that was put in, joined by `join` (torch.sum or torch.amax).

    What is put in waits in a place of its own, and is joined for all layers at once when the numbers are asked for. One
    by one they would be three operations each, and a logged step has hundreds for the host to launch.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        start: float,
        join: Callable[..., torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._numbers = torch.full(shape, start, dtype=torch.float64, device=device)
        self._waiting = torch.full((FOLDED_AFTER, *shape), start, dtype=dtype, device=device)
        self._places = self._waiting.flatten().unbind()
        self._taken = [[0] * shape[1] for _ in range(shape[0])]
        self._start, self._join = start, join

    def place(self, row: int, layer: int) -> torch.Tensor:
        """0-d, where to write the next number of this statistic and layer."""
        if self._taken[row][layer] == FOLDED_AFTER:
            self._join_waiting()
        turn = self._taken[row][layer]
        self._taken[row][layer] += 1
        rows, layers = self._numbers.shape
        return self._places[(turn * rows + row) * layers + layer]

    def numbers(self) -> torch.Tensor:
        """fp64 [statistics, layers]."""
        self._join_waiting()
        return self._numbers

    def _join_waiting(self) -> None:
        turns = max(itertools.chain(*self._taken))
        if turns > 0:
            every = torch.cat([self._numbers[None], self._waiting[:turns]])  # fp64
            self._numbers = self._join(every, dim=0)
            self._empty()

    def _empty(self) -> None:
        self._waiting.fill_(self._start)
        self._taken = [[0] * len(row) for row in self._taken]

    def set(self, numbers: torch.Tensor | float) -> None:
        self._empty()
        if isinstance(numbers, torch.Tensor):
            self._numbers.copy_(numbers)
        else:
            self._numbers.fill_(numbers)


class LayerStats:
    """Sums, counts and extremes per layer of the whole model; a rank fills the rows of its own layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        means, extremes = (len(MEANS), num_layers), (len(EXTREMES), num_layers)
        # A sum in another type than its terms' is a copy of all of them first. A GPU adds up fp32 as a tree: 1e-7.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._sums = _Table(means, 0.0, torch.sum, dtype, device)
        self._counts = [[0] * num_layers for _ in MEANS]
        self._extremes = _Table(extremes, -math.inf, torch.amax, dtype, device)

    def record(self, layer: int, statistics: Statistics) -> None:
        for name, values in statistics.means.items():
            self.add(name, layer, values)
        for name, value in statistics.maxima.items():
            self.maximum(name, layer, value)

    def add(self, name: str, layer: int, values: torch.Tensor) -> None:
        """Add all elements of `values` to the average `name` of layer `layer` (from 0)."""
        row = _row(MEANS, name)
        place = self._sums.place(row, layer)
        torch.sum(values.detach(), dim=None, dtype=place.dtype, out=place)
        self._counts[row][layer] += values.numel()

    def maximum(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Keep the largest of the 0-d `value` and what is there."""
        self._extremes.place(_row(EXTREMES, name), layer).copy_(value.detach())

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
        self, device_sums: torch.Tensor, host_sums: list[float], host_maxima: list[float]
    ) -> tuple[dict[str, list[float | None]], list[float], list[float]]:
        """Values per layer over all ranks, with two collectives that also carry the caller's own numbers.

        Tensor-parallel copies enter numerator and denominator alike. Call it on every rank, for logged steps only: it
        reads the device, which has nothing else to do meanwhile, so that one copy goes there and one comes back.

        Args:
            device_sums: fp64 [m] on the device, added over the ranks.
            host_sums: likewise, from the host.
            host_maxima: the largest over the ranks.

        Returns:
            name -> value per layer (a name that no layer recorded is left out; None for a layer that did not), the
            reduced sums, of the device's and then of the host's, and the reduced maxima.
        """
        own_sums, own_extremes = self._sums.numbers(), self._extremes.numbers()
        own_counts = list(itertools.chain(*self._counts))
        sent = torch.tensor([*own_counts, *host_sums, *host_maxima], dtype=torch.float64).to(self.device)
        sums = torch.cat([own_sums.flatten(), device_sums, sent[: len(sent) - len(host_maxima)]])
        maxima = torch.cat([own_extremes.flatten(), sent[len(sent) - len(host_maxima) :]])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        read = torch.cat([sums, maxima]).cpu()
        size = own_sums.numel()
        totals, of_device, counts, of_host, extremes, of_maxima = read.split(
            [size, len(device_sums), size, len(host_sums), own_extremes.numel(), len(host_maxima)]
        )
        means = (totals / counts).view(own_sums.shape)
        extremes = extremes.view(own_extremes.shape)
        recorded = torch.cat([counts.view(own_sums.shape) > 0, extremes != -torch.inf]).tolist()
        extremes[EXTREMES.index("k_min")] *= -1
        values: dict[str, list[float | None]] = {}
        rows = zip(MEANS + EXTREMES, torch.cat([means, extremes]).tolist(), recorded, strict=True)
        for name, row, present in rows:
            if any(present):
                values[name] = [number if there else None for number, there in zip(row, present, strict=True)]
        return values, [*of_device.tolist(), *of_host.tolist()], of_maxima.tolist()


def _row(names: Sequence[str], name: str) -> int:
    if name not in names:
        raise ValueError(f"{name}: no statistic of the layers; add it to MEANS or EXTREMES (model/stats.py)")
    return names.index(name)
