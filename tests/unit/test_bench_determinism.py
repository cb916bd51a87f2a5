"""Replays of a step are equal bit for bit, one that is not is found, and every way of the table takes steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import bench_determinism
import pytest
import torch

from helpers.single_rank import SPARSE, single_rank, tiny_config
from whole_steps.step_bench import OurTrainee, random_batches

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def trainee() -> Iterator[OurTrainee]:
    found = OurTrainee(tiny_config([SPARSE]), SPARSE, single_rank())
    yield found
    found.close()


def test_a_hash_is_of_every_bit_and_every_place() -> None:
    tensor = torch.randn(1000)
    first = int(bench_determinism.hash_of(tensor))
    assert int(bench_determinism.hash_of(tensor.clone())) == first
    for place in (0, 500, 999):
        other = tensor.clone()
        other.view(torch.int32)[place] ^= 1
        assert int(bench_determinism.hash_of(other)) != first
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert int(bench_determinism.hash_of(swapped)) != first


def test_replays_are_equal_and_one_bit_is_found(trainee: OurTrainee, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_batches(trainee.config, trainee.parallel)
    assert bench_determinism.count_different(trainee, batches, 3) == 0
    calls: list[int] = []
    hash_gradients = bench_determinism.Replays._hash_gradients

    def with_a_wrong_bit(replays: bench_determinism.Replays) -> None:
        calls.append(1)
        if len(calls) == 3:
            weight = next(each for each in trainee.model.gpt.parameters() if each.requires_grad)
            weight.main_grad.view(torch.int32).view(-1)[5] ^= 1
        hash_gradients(replays)

    monkeypatch.setattr(bench_determinism.Replays, "_hash_gradients", with_a_wrong_bit)
    assert bench_determinism.count_different(trainee, batches, 4) == 1


def test_every_way_takes_steps_and_is_put_back(trainee: OurTrainee) -> None:
    batches = random_batches(trainee.config, trainee.parallel)
    rows = list(bench_determinism.prices(trainee, batches, steps=1, rounds=2))
    assert [row["way"] for row in rows] == list(bench_determinism.WAYS)
    assert rows[0]["price"] == 0
    assert all(row["step_ms"] > 0 and math.isfinite(row["price"]) for row in rows)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not any(getattr(each, "deterministic_mode", False) for each in trainee.model.gpt.modules())
