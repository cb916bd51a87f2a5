"""Tests which queries the statistics of attention measure, and that the results equal plain statistics."""

import pytest
import torch

from gsa_train.config import PhaseConfig
from gsa_train.model.probes import query_sample
from gsa_train.model.probes.query_sample import sample_queries, sampled_stretches
from gsa_train.phases import enter_phase
from helpers.single_rank import SPARSE, WARM_UP, random_batches, tiny_config, tiny_model, token_losses

CPU = torch.device("cpu")


def test_short_sequences_are_measured_whole() -> None:
    for length in (1, 31, 100, 512):
        assert sampled_stretches(length) == [range(length)]
    sample = sample_queries(100, 0, 100, CPU)
    assert sample.rows.tolist() == list(range(100))
    assert sample.neighbours.tolist() == list(range(99))
    assert (sample.grouped.tolist(), sample.group) == (list(range(96)), 32)
    alone = sample_queries(20, 0, 20, CPU)
    assert (alone.grouped.tolist(), alone.group) == (list(range(20)), 20)


@pytest.mark.parametrize("length", [513, 640, 1000, 4096, 131072])
def test_long_sequences_have_a_run_in_each_eighth(length: int) -> None:
    runs = sampled_stretches(length)
    positions = [position for run in runs for position in run]
    assert len(set(positions)) == 512
    assert positions == sorted(positions)
    assert positions[0] >= 0
    assert positions[-1] < length
    for part, run in enumerate(runs):
        assert len(run) == 64
        assert run.start % 64 == 0
        middle = (part + 0.5) * length / 8
        assert abs((run.start + run.stop) / 2 - middle) <= 64
    assert [run.start for run in sampled_stretches(4096)] == [192, 704, 1216, 1728, 2240, 2752, 3264, 3776]


def measured(phase: PhaseConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Return what the first layer adds to its statistics in one forward pass."""
    config = tiny_config(
        gsa={"local_window": 2}, train={"seq_len_tokens": 24, "micro_batch_size": 2, "global_batch_size": 2}
    )
    model = tiny_model(config, variance_ema=0.02)
    enter_phase(model, phase)
    added: dict[str, torch.Tensor] = {}

    def add(
        name: str,
        layer: int,
        values: torch.Tensor,
        count: torch.Tensor | int | None = None,
        counted: torch.Tensor | None = None,
    ) -> None:
        if layer == 0:
            assert name not in added
            added[name] = values.detach() if counted is None else torch.where(counted, values.detach(), 0)

    monkeypatch.setattr(model.runtime.stats, "add", add)
    token_losses(model, random_batches(config)[0], measuring=True)
    return added


@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=lambda phase: phase.name)
def test_a_sample_has_the_values_of_its_queries(phase: PhaseConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_sample, "SPARSE_EVERY", 1)
    every = measured(phase, monkeypatch)
    monkeypatch.setattr(query_sample, "SPARSE_EVERY", 3)
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    some = measured(phase, monkeypatch)
    rows = torch.tensor([4, 5, 6, 7, 16, 17, 18, 19])
    assert every.keys() == some.keys()
    assert torch.equal(some["selected_keys"], every["selected_keys"][:, rows])
    sparse = torch.tensor([4, 7, 16, 19])
    for name in ("recall", "overlap_heads", "overlap_mean", "sequence_start_attention", "random_recall"):
        assert torch.equal(some[name], every[name][:, sparse]), name
    assert 0 < every["recall"][every["recall"] > 0].min() < 0.9  # keys are left out
    for gate in ("value_gate", "output_gate"):
        opening = every[f"{gate}_mean"]
        assert len(opening) == 24
        assert torch.equal(some[f"{gate}_mean"], opening[sparse])
        for values, seen in ((every, opening), (some, opening[sparse])):
            assert values[f"{gate}_low"].sum() == (seen < 0.1).sum()
            assert values[f"{gate}_high"].sum() == (seen >= 0.9).sum()
    assert torch.equal(some["indexer_saturated"], every["indexer_saturated"][:, sparse])
    pairs = torch.tensor([5, 6, 7, 17, 18, 19]) - 1
    assert torch.equal(some["adjacent_overlap"], every["adjacent_overlap"][:, pairs])
    assert some["union_ratio_32"].shape == (2, 4)
    for name in ("k_mean", "variance", "indexer_kl"):
        assert torch.equal(some[name], every[name]), name
