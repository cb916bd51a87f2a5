"""Keep statistics of the layers on the device, and reduce them once per logged step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gsa_train.distributed.to_host import ToHost, to_device
from gsa_train.model.probes.deferred import DeferredReductions

MEANS = (
    "indexer_kl",
    "recall",
    "random_recall",
    "overlap_heads",
    "overlap_mean",
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
    "router_entropy",
    "router_z",
    "router_balance",
    "dropped_share",
    "expert_bias_range",
)
"""Averages over tokens (and heads): sums and counts are added over all ranks. docs/reference/monitoring.md lists each
statistic's queries, and the statistics that use the sample of query_sample.py."""

EXTREMES = ("k_max", "k_min", "max_activation", "max_attention_logit")
"""Maxima over all ranks. `k_min` is kept negated. `max_attention_logit` uses the queries of `indexer_saturated`."""

POSITIONS = (0, *(4**power for power in range(8)))
"""First position in the document of each group of tokens: 0, 1, 4, 16, ... 16384."""
_GROUPS = (
    *("0" if end == 1 else f"{first}-{end - 1}" for first, end in pairwise(POSITIONS)),
    f"{POSITIONS[-1]}-",
)
GATE_BINS = 10
"""Bins of equal width from 0 to 1."""
_BINS = tuple(f"{number / GATE_BINS:g}-{(number + 1) / GATE_BINS:g}" for number in range(GATE_BINS))
HEADS = "head_first_token_attention"
EXPERTS = "expert_loads"
"""Each expert's share of a layer's choices."""
VECTORS: dict[str, tuple[str, ...] | None] = {
    "sink_by_position": _GROUPS,
    "k_by_position": _GROUPS,
    "value_gate_histogram": _BINS,
    "output_gate_histogram": _BINS,
    HEADS: None,
    EXPERTS: None,
}
"""Averages with several labelled entries; None: one entry per head or expert."""

PLACES = ("max_activation_dimension", "max_activation_token")
"""Place of `max_activation`: dimension and kind of token (ORDINARY, ENDS_DOCUMENT, STARTS_DOCUMENT)."""
ORDINARY, ENDS_DOCUMENT, STARTS_DOCUMENT = range(3)
_KINDS, _DIMENSIONS = 4, 1 << 18


LARGE = 1 << 16
"""Tensors with more elements are summed immediately instead of being kept."""


class Vector(NamedTuple):
    sums: torch.Tensor
    """[entries], or [rows, entries] with rows to be added."""
    counts: torch.Tensor | None = None
    """[entries]: divisor of each sum; None: the total of the sums."""
    first: int = 0
    """Index of the first entry."""


@dataclass
class Statistics:
    """Holds statistics of one layer for one chunk of queries. The tensors are kept and reduced later, so do not modify
    them after you put them here."""

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps names of `MEANS` to values to average, of any shape."""
    counts: dict[str, torch.Tensor | int] = field(default_factory=dict)
    """Maps names of `MEANS` to the divisor of the sum, 0-d, if it is not the number of counted values."""
    vectors: dict[str, Vector] = field(default_factory=dict)
    """Maps names of `VECTORS` to entries."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps names of `EXTREMES` to values, of any shape."""
    counted: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maps names of `MEANS` or `EXTREMES` to bools, expandable to the values' shape, that say which values count.
    Without an entry all values count."""

    def join(self, others: Statistics) -> None:
        self.means |= others.means
        self.counts |= others.counts
        self.vectors |= others.vectors
        self.maxima |= others.maxima
        self.counted |= others.counted

    def average(self, name: str, values: torch.Tensor, counted: torch.Tensor) -> None:
        """Set the mean of the `values` that are `counted`: bool, expandable to their shape."""
        self.means[name], self.counted[name] = values, counted

    def maximum(self, name: str, values: torch.Tensor, counted: torch.Tensor) -> None:
        """Set the largest of the `values` that are `counted`."""
        self.maxima[name], self.counted[name] = values, counted


StatsCopy = tuple[list[torch.Tensor], list[list[int]]]


class LayerStats:
    """Holds sums, counts and extremes for each layer of the whole model. Each rank fills the rows of its own layers.

    Added values are kept (deferred.py) until the statistics are read, or until the kept values exceed a size limit. The
    values of all layers are then reduced together. Separate reductions would need several kernel launches per layer and
    statistic.
    """

    def __init__(
        self, num_layers: int, device: torch.device, num_heads: int = 0, num_experts: int = 0
    ) -> None:
        """
        Args:
            num_heads: query heads of a layer over all ranks.
            num_experts: experts of a layer over all ranks.
        """
        self.device = device

        def table(*shape: int, start: float = 0.0) -> torch.Tensor:
            return torch.full(shape, start, dtype=torch.float64, device=device)

        self._entries: dict[str, range] = {}
        self._labels: list[str] = []
        numbers = {HEADS: range(num_heads), EXPERTS: range(num_experts)}
        for name, labels in VECTORS.items():
            labels = tuple(f"{number:02d}" for number in numbers[name]) if labels is None else labels
            self._entries[name] = range(len(self._labels), len(self._labels) + len(labels))
            self._labels += [f"{name}/{label}" for label in labels]
        self._sums = table(len(MEANS), num_layers)
        self._own_counts = [[0] * num_layers for _ in MEANS]
        """Counts that the host knows. The total is the sum of these counts and `_counts`."""
        self._counts = table(len(MEANS), num_layers)
        """Counts that only the device knows."""
        self._extremes = table(len(EXTREMES), num_layers, start=-math.inf)
        self._vectors = table(num_layers, 2, len(self._labels))
        self._places = table(num_layers, start=-1.0)
        self._deferred = DeferredReductions()
        self._empty = self.copy()

    def record(self, layer: int, statistics: Statistics) -> None:
        for name, values in statistics.means.items():
            self.add(name, layer, values, statistics.counts.get(name), statistics.counted.get(name))
        for name, vector in statistics.vectors.items():
            entries = self._entries[name]
            first = entries.start + vector.first
            last = first + vector.sums.shape[-1]
            assert last <= entries.stop
            self._defer("vectors", (name, first, last), layer, vector.sums, vector.counts)
        for name, values in statistics.maxima.items():
            self.maximum(name, layer, values, statistics.counted.get(name))

    def add(
        self,
        name: str,
        layer: int,
        values: torch.Tensor,
        count: torch.Tensor | int | None = None,
        counted: torch.Tensor | None = None,
    ) -> None:
        """Add the elements of `values` to the average `name` of layer `layer` (from 0).

        Args:
            count: divisor of the values' sum, 0-d; None: the number of counted values.
            counted: bool, expandable to the values, True for those that count; None: all.
        """
        row = _row(MEANS, name)
        if count is None and counted is None:
            count = values.numel()
        if isinstance(count, int):
            self._own_counts[row][layer] += count
        if values.numel() > LARGE:
            if counted is not None:
                values = torch.where(counted, values, 0)
                count = counted.expand_as(values).sum() if count is None else count
                counted = None
            # A sum in another dtype would first copy the terms. GPUs sum fp32 as a tree, which is accurate enough.
            values = values.sum(dtype=torch.float32 if values.is_cuda else torch.float64)
        on_device = count if isinstance(count, torch.Tensor) else None
        self._defer("means", (row, isinstance(count, int)), layer, values, counted, on_device)

    def maximum(
        self, name: str, layer: int, values: torch.Tensor, counted: torch.Tensor | None = None
    ) -> None:
        """Update the maximum `name` with the `values` that are `counted` (None: all)."""
        self._defer("extremes", (_row(EXTREMES, name),), layer, values, counted)

    def maximum_at(
        self, layer: int, value: torch.Tensor, dimension: torch.Tensor, kind: torch.Tensor
    ) -> None:
        """Update `max_activation` and its place.

        Args:
            value: 0-d, not negative
            dimension, kind: int64, 0-d, see PLACES
        """
        self.maximum("max_activation", layer, value)
        self._defer("places", (), layer, value, dimension, kind)

    def _defer(self, what: str, where: tuple[Any, ...], layer: int, *tensors: torch.Tensor | None) -> None:
        if self._deferred.put((what, *where), layer, tensors):
            self.sum_up()

    def sum_up(self) -> None:
        """Reduce the kept values into the tables. An early call avoids an idle device before a read."""
        for (what, *where), layers, tensors in self._deferred.take():
            if what == "means":
                row, is_counted_by_host = where
                values, counted, counts = tensors
                numbers = values.double() if counted is None else torch.where(counted, values.double(), 0)
                into, added = [self._sums[row, layer] for layer in layers], [*numbers.sum(1)]
                if not is_counted_by_host:
                    into += [self._counts[row, layer] for layer in layers]
                    added += (counted if counts is None else counts).sum(1, dtype=torch.float64)
                torch._foreach_add_(into, added)
            elif what == "vectors":
                _, first, last = where
                into = [self._vectors[layer, part, first:last] for part in range(2) for layer in layers]
                sums = tensors[0].view(len(layers), -1, last - first).sum(1, dtype=torch.float64)
                counts = tensors[1]
                counts = sums.sum(1, keepdim=True).expand_as(sums) if counts is None else counts.double()
                torch._foreach_add_(into, [*sums, *counts])
            elif what == "extremes":
                values, counted = tensors
                values = (
                    values.double() if counted is None else torch.where(counted, values.double(), -math.inf)
                )
                _keep_largest([self._extremes[where[0], layer] for layer in layers], values.amax(1))
            else:
                _keep_largest([self._places[layer] for layer in layers], _places(*tensors))

    def reset(self) -> None:
        self.restore(self._empty)

    def copy(self) -> StatsCopy:
        """Copy the recorded values, for `restore`."""
        self.sum_up()
        return [table.clone() for table in self._tables()], [list(row) for row in self._own_counts]

    def restore(self, copy: StatsCopy) -> None:
        """Discard the values recorded since the copy."""
        tables, own_counts = copy
        self._deferred = DeferredReductions()
        torch._foreach_copy_(self._tables(), tables)
        self._own_counts = [list(row) for row in own_counts]

    def _tables(self) -> list[torch.Tensor]:
        return [self._sums, self._counts, self._extremes, self._vectors, self._places]

    def read(self) -> dict[str, list[float | None]]:
        """Return the values per layer over all ranks, by name. Collective.

        Each name has a list over the layers, with None for layers that did not record the name. A name that no layer
        recorded is missing. Each entry of a vector has its own name, `vector/label`.
        """
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        return self.send(nothing, [], [], nothing)()[0]

    def send(
        self,
        device_sums: torch.Tensor,
        host_sums: list[float],
        host_maxima: list[float],
        device_numbers: torch.Tensor,
    ) -> Callable[[], tuple[dict[str, list[float | None]], list[float], list[float], list[float]]]:
        """Reduce the values over all ranks, and start to copy them to the host. The host does not wait. Collective.

        One collective computes all sums, and another collective computes all maxima. Both also carry the numbers that
        the caller wants to reduce, so these numbers need no collectives of their own.

        Tensor-parallel replicas add equally to sums and counts.

        Args:
            device_sums: fp64 [m] on the device, summed over the ranks.
            host_sums: numbers on the host, summed over the ranks.
            host_maxima: numbers on the host, maximized over the ranks.
            device_numbers: fp64 [n] on the device, equal on all ranks, copied to the host.

        Returns:
            A function that waits for the copy. It returns the result of `read`, the reduced sums (`device_sums`, then
            `host_sums`), the reduced maxima, and the `device_numbers`.
        """
        self.sum_up()
        own_counts = list(itertools.chain(*self._own_counts))
        sent = to_device([*own_counts, *host_sums, *host_maxima], self.device)
        of_rank = list(sent.split([len(own_counts), len(host_sums), len(host_maxima)]))
        added = [self._sums.flatten(), self._counts.flatten(), self._vectors.flatten(), device_sums]
        added += of_rank[:2]
        largest = [self._extremes.flatten(), self._places, of_rank[2]]
        sums, maxima = torch.cat(added), torch.cat(largest)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        sizes = [len(part) for part in (*added, *largest, device_numbers)]
        on_the_way = ToHost(torch.cat([sums, maxima, device_numbers]))

        def read() -> tuple[dict[str, list[float | None]], list[float], list[float], list[float]]:
            parts = on_the_way.read().split(sizes)
            totals, counted, vectors, from_device, counts, from_host, extremes, places, *others = parts
            shape = self._sums.shape
            values = self._values(
                totals.view(shape), (counts + counted).view(shape), vectors, extremes, places
            )
            from_hosts, numbers = (part.tolist() for part in others)
            return values, [*from_device.tolist(), *from_host.tolist()], from_hosts, numbers

        return read

    def _values(
        self,
        sums: torch.Tensor,
        counts: torch.Tensor,
        vectors: torch.Tensor,
        extremes: torch.Tensor,
        places: torch.Tensor,
    ) -> dict[str, list[float | None]]:
        """Compute the values per layer from the reduced tables, on the host."""
        values = _by_layer(MEANS, sums, counts)
        extremes = extremes.view(self._extremes.shape).clone()
        recorded = extremes != -torch.inf
        extremes[EXTREMES.index("k_min")] *= -1
        values |= _by_layer(EXTREMES, extremes, recorded)
        sums_of_vectors, counts_of_vectors = vectors.view(self._vectors.shape).permute(1, 2, 0)
        values |= _by_layer(self._labels, sums_of_vectors, counts_of_vectors)
        place = places.long().clamp(min=0) % (_DIMENSIONS * _KINDS)
        of_places = torch.stack([place // _KINDS, place % _KINDS]).double()
        values |= _by_layer(PLACES, of_places, (places >= 0).expand(len(PLACES), -1))
        return values


def _keep_largest(kept: list[torch.Tensor], values: torch.Tensor) -> None:
    """Set kept to max(kept, values), each 0-d. The result is NaN if either is NaN."""
    largest = torch.maximum(torch.stack(kept), values)
    torch._foreach_copy_(kept, [*largest])


def _places(values: torch.Tensor, dimensions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Pack value, dimension and kind, [layers, 1] each, into numbers [layers] below 2^53.

    The value takes the highest bits. Non-negative floats sort like their bit patterns, so the packed numbers sort by
    value. The maximum of several packed numbers therefore holds the largest value, with its dimension and kind.
    """
    bits = values.float().abs().view(torch.int32).long()
    return ((bits * _DIMENSIONS + dimensions) * _KINDS + kinds).double().flatten()


def _by_layer(
    names: Sequence[str], sums: torch.Tensor, counts: torch.Tensor
) -> dict[str, list[float | None]]:
    rows = zip(names, (sums / counts).tolist(), (counts > 0).tolist(), strict=True)
    return {
        name: [number if there else None for number, there in zip(row, present, strict=True)]
        for name, row, present in rows
        if any(present)
    }


def _row(names: Sequence[str], name: str) -> int:
    if name not in names:
        raise ValueError(
            f"{name}: unknown layer statistic; add it to MEANS or EXTREMES (model/probes/stats.py)"
        )
    return names.index(name)
