"""Statistics of the attention layers, kept on the device and reduced once per logged step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

MEANS = (
    "indexer_kl",
    "recall",
    "random_recall",
    "k_mean",
    "dense_query_share",
    "selected_keys",
    "value_gate_mean",
    "value_gate_low",
    "value_gate_high",
    "output_gate_mean",
    "output_gate_low",
    "output_gate_high",
    "indexer_saturated",
    "first_token_attention",
    "sequence_start_attention",
    "adjacent_overlap",
    "union_ratio_32",
    "union_density",
    "variance",
    "variance_ema",
)
"""Averages over tokens (and heads): sums and counts are added over all ranks.

Which queries count in which is in the table of docs/reference/monitoring.md. Those of k_t, of the scores' variance and
of the indexer's KL are over all tokens. The others are over a sample of the
queries (query_sample.py): those of selections over all of sequences of up to 512 tokens, else 8 stretches of 64
neighbours; those that see all keys or have many values of their own (recall and random recall, attention to the first
token, the gates, `indexer_saturated`) over every 16th of these. `adjacent_overlap` is over the pairs of neighbours
within its stretches, and `union_ratio_32` over their groups of 32, as far as one rank holds them: context-parallel
ranks leave out pairs and groups across the borders of their chunks of a sequence. No stretch lies across one where 64
divides a chunk of a sequence of more than 512 tokens."""

EXTREMES = ("k_max", "k_min", "max_activation", "max_attention_logit")
"""Largest values over all ranks; `k_min` is kept negated. `max_attention_logit` sees what `indexer_saturated` does."""

POSITIONS = (0, *(4**power for power in range(8)))
"""First position, in its document, of each group of tokens: 0, 1, 4, 16, ... 16384."""
_GROUPS = (
    *("0" if end == 1 else f"{first}-{end - 1}" for first, end in pairwise(POSITIONS)),
    f"{POSITIONS[-1]}-",
)
GATE_BINS = 10
"""Of equal width, from 0 to 1."""
_BINS = tuple(f"{number / GATE_BINS:g}-{(number + 1) / GATE_BINS:g}" for number in range(GATE_BINS))
HEADS = "head_first_token_attention"
VECTORS: dict[str, tuple[str, ...] | None] = {
    "sink_by_position": _GROUPS,
    "k_by_position": _GROUPS,
    "value_gate_histogram": _BINS,
    "output_gate_histogram": _BINS,
    HEADS: None,
}
"""Averages of several entries, each with its label; None: one for each head."""

PLACES = ("max_activation_dimension", "max_activation_token")
"""Where `max_activation` is: its dimension, and the kind of its token (ORDINARY, ENDS_DOCUMENT, STARTS_DOCUMENT)."""
ORDINARY, ENDS_DOCUMENT, STARTS_DOCUMENT = range(3)
_KINDS, _DIMENSIONS = 4, 1 << 18


class Vector(NamedTuple):
    sums: torch.Tensor
    """[entries]"""
    counts: torch.Tensor
    """[entries]: by what each sum is divided."""
    first: int = 0
    """Number of the first of these entries."""


@dataclass
class Statistics:
    """What one layer measured of one chunk of queries."""

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    """name of `MEANS` -> values to average, of any shape."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """name of `MEANS` -> by what their sum is divided, where that is not their number: 0-d. What does not count is
    then 0 among the values."""
    vectors: dict[str, Vector] = field(default_factory=dict)
    """name of `VECTORS` -> its entries."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """name of `EXTREMES` -> 0-d."""

    def join(self, others: Statistics) -> None:
        """Take over those of others, whose names are other ones."""
        self.means |= others.means
        self.counts |= others.counts
        self.vectors |= others.vectors
        self.maxima |= others.maxima

    def average(self, name: str, values: torch.Tensor, counted: torch.Tensor) -> None:
        """The mean of those `values` that are `counted`, bool and of a shape that expands to theirs."""
        counted = counted.expand_as(values)
        self.means[name] = torch.where(counted, values, 0)
        self.counts[name] = counted.sum()


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


class StatsCopy(NamedTuple):
    """What a LayerStats holds."""

    sums: torch.Tensor
    counts: list[list[int]]
    counted: torch.Tensor
    extremes: torch.Tensor
    vectors: torch.Tensor
    places: torch.Tensor


class LayerStats:
    """Sums, counts and extremes per layer of the whole model; a rank fills the rows of its own layers."""

    def __init__(self, num_layers: int, device: torch.device, num_heads: int = 0) -> None:
        """
        Args:
            num_heads: query heads of a layer, on all ranks.
        """
        self.device = device
        means, extremes = (len(MEANS), num_layers), (len(EXTREMES), num_layers)
        # A sum in another type than its terms' is a copy of all of them first. A GPU adds up fp32 as a tree: 1e-7.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._sums = _Table(means, 0.0, torch.sum, dtype, device)
        self._counts = [[0] * num_layers for _ in MEANS]
        self._counted = _Table(means, 0.0, torch.sum, dtype, device)
        self._extremes = _Table(extremes, -math.inf, torch.amax, dtype, device)
        self._entries: dict[str, range] = {}
        self._labels: list[str] = []
        heads = tuple(f"{head:02d}" for head in range(num_heads))
        for name, labels in VECTORS.items():
            labels = heads if labels is None else labels
            self._entries[name] = range(len(self._labels), len(self._labels) + len(labels))
            self._labels += [f"{name}/{label}" for label in labels]
        self._vectors = torch.zeros(num_layers, 2, len(self._labels), dtype=torch.float64, device=device)
        self._places = torch.full((num_layers,), -1.0, dtype=torch.float64, device=device)

    def record(self, layer: int, statistics: Statistics) -> None:
        for name, values in statistics.means.items():
            self.add(name, layer, values, statistics.counts.get(name))
        for name, vector in statistics.vectors.items():
            entries = self._entries[name]
            first = entries.start + vector.first
            assert first + len(vector.sums) <= entries.stop
            into = self._vectors[layer, :, first : first + len(vector.sums)]
            into += torch.stack([vector.sums.detach().double(), vector.counts.double()])
        for name, value in statistics.maxima.items():
            self.maximum(name, layer, value)

    def add(self, name: str, layer: int, values: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Add all elements of `values` to the average `name` of layer `layer` (from 0).

        Args:
            count: 0-d, how many of them count; all if None. The others are 0.
        """
        row = _row(MEANS, name)
        place = self._sums.place(row, layer)
        torch.sum(values.detach(), dim=None, dtype=place.dtype, out=place)
        if count is None:
            self._counts[row][layer] += values.numel()
        else:
            self._counted.place(row, layer).copy_(count)

    def maximum(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Keep the largest of the 0-d `value` and what is there."""
        self._extremes.place(_row(EXTREMES, name), layer).copy_(value.detach())

    def maximum_at(
        self, layer: int, value: torch.Tensor, dimension: torch.Tensor, kind: torch.Tensor
    ) -> None:
        """`max_activation`, and where it is.

        Args:
            value: 0-d, not negative
            dimension, kind: int64, 0-d: as PLACES has them
        """
        self.maximum("max_activation", layer, value)
        # Value, dimension and kind in one number below 2^53, ordered by the value, so that their maximum over
        # micro-batches and ranks is of one place: the bits of a float that is not negative are ordered as it is.
        bits = value.detach().float().abs().view(torch.int32).long()
        place = ((bits * _DIMENSIONS + dimension) * _KINDS + kind).double()
        self._places[layer] = torch.maximum(self._places[layer], place)

    def reset(self) -> None:
        self._sums.set(0.0)
        self._counts = [[0] * len(row) for row in self._counts]
        self._counted.set(0.0)
        self._extremes.set(-math.inf)
        self._vectors.zero_()
        self._places.fill_(-1.0)

    def copy(self) -> StatsCopy:
        """What was recorded so far, for `restore`."""
        return StatsCopy(
            self._sums.numbers().clone(),
            [list(row) for row in self._counts],
            self._counted.numbers().clone(),
            self._extremes.numbers().clone(),
            self._vectors.clone(),
            self._places.clone(),
        )

    def restore(self, copy: StatsCopy) -> None:
        """Forget what was recorded since."""
        self._sums.set(copy.sums)
        self._counts = [list(row) for row in copy.counts]
        self._counted.set(copy.counted)
        self._extremes.set(copy.extremes)
        self._vectors.copy_(copy.vectors)
        self._places.copy_(copy.places)

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
            name -> value per layer (a name that no layer recorded is left out; None for a layer that did not), where
            an entry of a vector has the name `vector/label`; the reduced sums, of the device's and then of the host's,
            and the reduced maxima.
        """
        own_sums, own_extremes = self._sums.numbers(), self._extremes.numbers()
        own_counts = list(itertools.chain(*self._counts))
        sent = torch.tensor([*own_counts, *host_sums, *host_maxima], dtype=torch.float64).to(self.device)
        of_rank = list(sent.split([len(own_counts), len(host_sums), len(host_maxima)]))
        added = [own_sums.flatten(), self._counted.numbers().flatten(), self._vectors.flatten(), device_sums]
        added += of_rank[:2]
        largest = [own_extremes.flatten(), self._places, of_rank[2]]
        sums, maxima = torch.cat(added), torch.cat(largest)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        read = torch.cat([sums, maxima]).cpu().split([len(part) for part in (*added, *largest)])
        totals, counted, vectors, from_device, counts, from_host, extremes, places, from_hosts = read
        values = _by_layer(MEANS, totals.view(own_sums.shape), (counts + counted).view(own_sums.shape))
        extremes = extremes.view(own_extremes.shape).clone()
        recorded = extremes != -torch.inf
        extremes[EXTREMES.index("k_min")] *= -1
        values |= _by_layer(EXTREMES, extremes, recorded)
        sums_of_vectors, counts_of_vectors = vectors.view(self._vectors.shape).permute(1, 2, 0)
        values |= _by_layer(self._labels, sums_of_vectors, counts_of_vectors)
        place = places.long().clamp(min=0) % (_DIMENSIONS * _KINDS)
        of_places = torch.stack([place // _KINDS, place % _KINDS]).double()
        values |= _by_layer(PLACES, of_places, (places >= 0).expand(len(PLACES), -1))
        return values, [*from_device.tolist(), *from_host.tolist()], from_hosts.tolist()


def _by_layer(
    names: Sequence[str], sums: torch.Tensor, counts: torch.Tensor
) -> dict[str, list[float | None]]:
    """Name -> sums / counts by layer, both [names, layers]; without the names that have no count above 0."""
    rows = zip(names, (sums / counts).tolist(), (counts > 0).tolist(), strict=True)
    return {
        name: [number if there else None for number, there in zip(row, present, strict=True)]
        for name, row, present in rows
        if any(present)
    }


def _row(names: Sequence[str], name: str) -> int:
    if name not in names:
        raise ValueError(f"{name}: no statistic of the layers; add it to MEANS or EXTREMES (model/stats.py)")
    return names.index(name)
