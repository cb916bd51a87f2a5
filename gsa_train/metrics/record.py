"""Build the record of a logged step from statistics on the device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gsa_data.best_fit import COUNTERS as PACKING_COUNTERS
from gsa_data.best_fit import packing_shares
from gsa_data.faults import skipped_totals
from gsa_data.source_weights import TOKENS_OF, tokens_by_source
from gsa_train.config import Config, DataConfig, PhaseConfig
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.flops import flops_per_token, peak_flops_per_second
from gsa_train.model.probes.stats import EXPERTS, EXTREMES, HEADS, PLACES, LayerStats
from gsa_train.profiling.work_time import STEP_PARTS, Worked, slowest


class IntervalClock:
    """Measures time, tokens and steps since the last logged step, without validation and saving."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = self._tokens = 0
        self._seconds = self._wait_seconds = 0.0
        self._began = time.perf_counter()

    def count(self, tokens: int, wait_seconds: float) -> None:
        self._steps += 1
        self._tokens += tokens
        self._wait_seconds += wait_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out work inside this context. Waits for the device first, because queued work belongs to the steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._began
        yield
        self._began = time.perf_counter()

    def read_and_reset(self) -> Interval:
        """Returns the interval up to now. Call it when the host has just waited for the monitor's verdict on the step.
        If the device still runs the step's update, the next interval counts this time."""
        now = time.perf_counter()
        interval = Interval(self._steps, self._tokens, self._seconds + now - self._began, self._wait_seconds)
        self._steps = self._tokens = 0
        self._seconds = self._wait_seconds = 0.0
        self._began = now
        return interval


@dataclass(frozen=True)
class Interval:
    steps: int
    tokens: int
    """Sum over all ranks."""
    seconds: float
    wait_seconds: float
    """Seconds, included in `seconds`, that this process waited for text."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank since the last logged step, without the layers' statistics."""

    interval: Interval = Interval(0, 0, 0.0, 0.0)
    worked: Worked = field(default_factory=lambda: Worked(0.0, dict.fromkeys(STEP_PARTS, 0.0)))
    """Result of this rank's WorkTime."""
    data_totals: Mapping[str, int] = field(default_factory=dict)
    """Result of `data_totals`, with the same names on every rank."""
    data_checksum: int = 0
    """CRC-32 of this rank's share of the step's text."""
    causal_keys: torch.Tensor | None = None
    """0-d: mean number of causal keys over this replica's queries, whose number is the same in all replicas. All ranks
    have a value, or all have None."""
    update_norm: torch.Tensor | None = None
    """0-d, norm of the weights' change, the same on every rank. All ranks have a value, or all have None."""
    z_loss_sum: torch.Tensor | None = None
    """0-d: this rank's share of the summed z-loss."""


@dataclass(frozen=True)
class Reduced:
    layers: dict[str, list[float | None]]
    """Maps each statistic to its values by layer; None for a layer that recorded nothing."""
    loss: float
    causal_keys: float | None
    """Number of causal keys, mean over the queries of all replicas; None for a validation."""
    update_norm: float | None
    """Norm of the weights' change; None for a validation."""
    z_loss: float | None
    """Mean z-loss per token; None for a validation, and without a z-loss."""
    data_wait: float
    """Share of the interval spent waiting for text; maximum over the ranks."""
    data_totals: dict[str, int]
    """Sum of `data_totals` over all ranks."""
    data_checksum: int
    """Checksum of the step's text and its order (gsa_data.stream)."""
    work_seconds: list[float]
    """Compute time by rank."""
    part_seconds: dict[str, float]
    """Seconds of the interval spent waiting for text, and in each part of work_time.STEP_PARTS; maximum over the
    ranks."""
    memory_allocated_bytes: int | None
    memory_peak_bytes: int | None
    """Maximum over the ranks; None on CPUs."""


def send_step(
    stats: LayerStats,
    loss_sum: torch.Tensor,
    loss_tokens: float | torch.Tensor,
    measured: Measured | None,
    parallel: Parallel,
) -> Callable[[], Reduced]:
    """Reduce a step's statistics over the ranks, send them to the host, and reset them. Collective.

    The returned function waits until the statistics have arrived, and is not collective.

    Args:
        loss_sum: this rank's share of the summed loss.
        loss_tokens: scored tokens over all replicas; 0-d where the device counted them.
        measured: None for a validation.
    """
    on_gpu, loss_sum = parallel.device.type == "cuda", loss_sum.double()
    memory = [0, 0]
    if on_gpu:
        allocated = torch.cuda.memory_stats()  # one call, because it reads all the allocator's counters
        memory = [allocated[f"allocated_bytes.all.{which}"] for which in ("current", "peak")]
    measured = measured or Measured()
    interval, worked, causal_keys = measured.interval, measured.worked, measured.causal_keys
    wait = interval.wait_seconds / interval.seconds if interval.seconds > 0 else 0.0
    parts = {"data_wait": interval.wait_seconds, **worked.parts}
    work = [0.0] * parallel.world_size
    work[parallel.rank] = worked.seconds
    nothing = torch.zeros_like(loss_sum)
    z_loss_sum = nothing if measured.z_loss_sum is None else measured.z_loss_sum.double()
    from_device = [loss_tokens if isinstance(loss_tokens, torch.Tensor) else nothing, measured.update_norm]
    sent = stats.send(
        torch.stack([loss_sum, nothing if causal_keys is None else causal_keys, z_loss_sum]),
        # fp64 holds the sum of two million CRC-32s exactly
        [measured.data_checksum, *measured.data_totals.values(), *work],
        [wait, *memory, *parts.values()],
        torch.stack([nothing if each is None else each.double() for each in from_device]),
    )
    stats.reset()

    def read() -> Reduced:
        layers, sums, maxima, (counted_tokens, update_norm) = sent()
        tokens = counted_tokens if isinstance(loss_tokens, torch.Tensor) else loss_tokens
        totals = zip(measured.data_totals, sums[4:], strict=False)
        return Reduced(
            layers=layers,
            loss=sums[0] / tokens,
            data_wait=maxima[0],
            causal_keys=None if causal_keys is None else sums[1] / parallel.world_size,
            update_norm=None if measured.update_norm is None else update_norm,
            z_loss=None if measured.z_loss_sum is None else sums[2] / tokens,
            data_totals={name: int(total) for name, total in totals},
            data_checksum=int(sums[3]),
            work_seconds=sums[4 + len(measured.data_totals) :],
            part_seconds=dict(zip(parts, maxima[3:], strict=True)),
            memory_allocated_bytes=int(maxima[1]) if on_gpu else None,
            memory_peak_bytes=int(maxima[2]) if on_gpu else None,
        )

    return read


OTHER_SOURCES = "(others)"
"""The metrics sum all sources without a weight under this name. summary.json lists each source by its own name."""


def data_totals(counters: Mapping[str, int], data: DataConfig) -> dict[str, int]:
    """Returns what one process read and left out since the start of the run. The names depend only on the config."""
    totals = skipped_totals(counters)
    if data.packing == "best_fit":
        totals |= {name: counters.get(name, 0) for name in PACKING_COUNTERS}
    if data.source_weights:
        tokens = tokens_by_source(counters)
        totals |= {f"{TOKENS_OF}{name}": tokens.pop(name, 0) for name in data.source_weights}
        totals[f"{TOKENS_OF}{OTHER_SOURCES}"] = sum(tokens.values())
    return totals


def data_metrics(totals: Mapping[str, int]) -> dict[str, Any]:
    """Returns the record's entries about the text, from `data_totals` over all ranks."""
    record: dict[str, Any] = {name: totals[name] for name in skipped_totals({})}
    if PACKING_COUNTERS[0] in totals:
        record |= {f"packing_{name}": share for name, share in packing_shares(totals).items()}
    by_source = tokens_by_source(totals)
    if by_source:
        record["data_tokens_by_source"] = by_source
    return record


def attention_metrics(layers: dict[str, list[float | None]]) -> dict[str, Any]:
    """Returns metrics per layer (`layer_<name>`, NaN if absent) and overall.

    The overall value is the mean over the layers that have a value. For metrics in `EXTREMES` it is the maximum, and
    for `k_min` the minimum. If any layer has NaN, the overall value is NaN.

    Statistics named `name/label` become one metric `name`, a dict label -> overall value. Per-head values become one
    list per layer. The spread of each list becomes another metric. `expert_metrics` makes the expert metrics.
    """
    record: dict[str, Any] = {}
    heads: list[list[float | None]] = []
    experts: list[list[float | None]] = []
    for name, values in layers.items():
        vector, _, label = name.partition("/")
        if vector in (HEADS, EXPERTS):
            (heads if vector == HEADS else experts).append(values)
        elif label:
            record.setdefault(vector, {})[label] = _overall(vector, values)
        else:
            record[name] = _overall(name, values)
            record[f"layer_{name}"] = _filled(values)
    if heads:
        by_layer = [list(of_layer) for of_layer in zip(*heads, strict=True)]
        spread = [None if None in of_layer else _spread(_filled(of_layer)) for of_layer in by_layer]
        record[HEADS] = [_filled(of_layer) for of_layer in by_layer]
        record["first_token_attention_spread"] = _overall("", spread)
        record["layer_first_token_attention_spread"] = _filled(spread)
    if experts:
        record |= expert_metrics(experts)
    if PLACES[0] in layers:
        known = [layer for layer, place in enumerate(layers[PLACES[0]]) if place is not None]
        largest = max(known, key=lambda layer: record["layer_max_activation"][layer])
        for name in PLACES:
            record[name] = int(record[f"layer_{name}"][largest])
    return record


def expert_metrics(shares: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Returns the experts' loads by layer, as multiples of the even share, and the largest and smallest load per layer
    and overall.

    Args:
        shares: each expert's share of the choices, by expert and layer; None for layers without experts.
    """
    count, by_layer = len(shares), list(zip(*shares, strict=True))
    loads = [[round(share * count, 4) for share in _filled(of_layer)] for of_layer in by_layer]
    record: dict[str, Any] = {EXPERTS: loads}
    for name, extreme in (("expert_load_max", max), ("expert_load_min", min)):
        of_layers = [
            None if None in of_layer else extreme(_filled(of_layer)) * count for of_layer in by_layer
        ]
        record[name] = extreme(value for value in of_layers if value is not None)
        record[f"layer_{name}"] = _filled(of_layers)
    return record


def _filled(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _spread(values: list[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def _overall(name: str, values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    if any(math.isnan(value) for value in present):
        return math.nan
    if name in EXTREMES:
        return min(present) if name == "k_min" else max(present)
    return sum(present) / len(present)


def step_record(
    reduced: Reduced,
    interval: Interval,
    phase: PhaseConfig,
    config: Config,
    parallel: Parallel,
    precision: str,
) -> dict[str, Any]:
    """Return what was measured for the record of one training step. docs/reference/monitoring.md explains each key.

    Args:
        precision: "bf16" or "fp32", which the device's peak FLOP/s depend on.
    """
    tokens_per_second = interval.tokens / interval.seconds
    attention = attention_metrics(reduced.layers)
    flops = flops_per_token(
        config.model,
        config.gsa,
        config.moe,
        phase,
        config.train.seq_len_tokens,
        attention.get("selected_keys"),
        reduced.causal_keys,
        attention.get("dropped_share", 0.0),
    )
    per_device = tokens_per_second / parallel.world_size
    peak = None
    if parallel.device.type == "cuda":
        peak = peak_flops_per_second(torch.cuda.get_device_name(), precision)
    slowest_rank, slowest_rank_ratio = slowest(reduced.work_seconds)
    return {
        "loss": reduced.loss,
        **({} if reduced.z_loss is None else {"z_loss": reduced.z_loss}),
        "indexer_kl": None,
        "recall": None,
        "causal_keys": reduced.causal_keys,
        **attention,
        "tokens_per_second": tokens_per_second,
        "step_seconds": interval.seconds / interval.steps,
        **{f"{part}_seconds": value / interval.steps for part, value in reduced.part_seconds.items()},
        "tflops_per_second": per_device * flops.total / 1e12,
        "tflops_per_second_dense_equivalent": per_device * flops.dense_equivalent / 1e12,
        "mfu": None if peak is None else per_device * flops.total / peak,
        "mfu_dense_equivalent": None if peak is None else per_device * flops.dense_equivalent / peak,
        "data_wait": reduced.data_wait,
        "slowest_rank": slowest_rank,
        "slowest_rank_ratio": slowest_rank_ratio,
        **data_metrics(reduced.data_totals),
        "data_checksum": reduced.data_checksum,
        "update_norm": reduced.update_norm,
        "memory_allocated_bytes": reduced.memory_allocated_bytes,
        "memory_peak_bytes": reduced.memory_peak_bytes,
    }
