"""Tests that deferred statistics per layer equal plain sums, whatever the number of additions is."""

import math
from typing import Any

import pytest
import torch

from gsa_train.model.probes import deferred as waiting
from gsa_train.model.probes import stats as stats_room
from gsa_train.model.probes.stats import LayerStats, Statistics, Vector
from helpers.single_rank import single_rank

CPU = torch.device("cpu")


def read(stats: LayerStats) -> dict[str, list[Any]]:
    single_rank()
    return stats.read()


@pytest.mark.parametrize(("large", "most_bytes"), [(0, 0), (20, 100), (1 << 16, 1000), (1 << 16, 1 << 24)])
def test_sums_and_extremes_of_many_batches(large, most_bytes, monkeypatch):
    """Layers may be measured more or less often, or never; large additions do not wait."""
    monkeypatch.setattr(stats_room, "LARGE", large)
    monkeypatch.setattr(waiting, "MOST_BYTES", most_bytes)
    stats = LayerStats(3, CPU)
    generator = torch.Generator().manual_seed(3)
    means: list[list[torch.Tensor]] = [[], [], []]
    largest = [-math.inf] * 3
    for turn in range(13):
        for layer in (0, 2) if turn % 3 else (2,):
            values = torch.randn(5, turn + 1, generator=generator)
            stats.add("recall", layer, values)
            means[layer].append(values.double().flatten())
            stats.add("value_gate_low", layer, values < 0)
            stats.add("k_mean", layer, values, counted=values > 0)
            stats.add("variance", layer, values, torch.tensor(2), counted=values[:, :1] > 0)
            stats.record(
                layer, Statistics(vectors={"k_by_position": Vector(values[0, :1], torch.tensor([2]), 3)})
            )
            stats.maximum("k_max", layer, torch.tensor(turn * layer))
            stats.maximum("max_activation", layer, values.max())
            largest[layer] = max(largest[layer], values.max().item())
    for _ in range(2):  # reading changes nothing
        found = read(stats)
        for layer in (0, 2):
            every = torch.cat(means[layer])
            assert found["recall"][layer] == pytest.approx(every.mean().item(), rel=1e-12)
            assert found["value_gate_low"][layer] == pytest.approx((every < 0).double().mean().item())
            assert found["k_mean"][layer] == pytest.approx(every[every > 0].mean().item(), rel=1e-12)
            rows = sum(each.view(5, -1)[each.view(5, -1)[:, 0] > 0].sum() for each in means[layer])
            assert found["variance"][layer] == pytest.approx(float(rows) / (2 * len(means[layer])), rel=1e-12)
            first = sum(float(each[0]) for each in means[layer]) / (2 * len(means[layer]))
            assert found["k_by_position/16-63"][layer] == pytest.approx(first, rel=1e-12)
            assert found["max_activation"][layer] == largest[layer]
        assert found["k_max"][::2] == [0.0, 24.0]
        assert all(values[1] is None for values in found.values())
        names = {"recall", "value_gate_low", "k_max", "max_activation", "k_mean", "variance"}
        assert found.keys() == names | {"k_by_position/16-63"}
    stats.reset()
    assert read(stats) == {}


def test_a_step_done_twice_counts_once() -> None:
    stats = LayerStats(1, CPU)
    stats.add("recall", 0, torch.tensor([1.0, 3.0]))
    stats.maximum("k_min", 0, torch.tensor(-5))
    kept = stats.copy()
    for _ in range(2):
        stats.add("recall", 0, torch.tensor([100.0]))
        stats.maximum("k_min", 0, torch.tensor(-2))
        stats.restore(kept)
        stats.add("recall", 0, torch.tensor([8.0]))
        assert read(stats) == {"recall": [4.0], "k_min": [5.0]}
        stats.restore(kept)


def test_what_is_not_finite_stays_so() -> None:
    stats = LayerStats(2, CPU)
    for layer, value in ((0, math.nan), (1, math.inf)):
        stats.add("variance", layer, torch.tensor([1.0, value]))
        stats.maximum("max_activation", layer, torch.tensor(value))
    found = read(stats)
    assert math.isnan(found["variance"][0])
    assert math.isnan(found["max_activation"][0])
    assert found["variance"][1] == found["max_activation"][1] == math.inf
    alone = LayerStats(1, CPU)
    alone.maximum("max_activation", 0, torch.tensor(math.nan))
    assert math.isnan(read(alone)["max_activation"][0])
