"""Tests the baseline of whole steps: it is our standard model, and trains."""

import pytest
import torch

from gsa_train.model.flops import count_parameters
from helpers.single_rank import DENSE, random_batches, single_rank, tiny_config, tiny_model, token_losses
from whole_steps.baseline import Baseline


def test_the_baseline_is_our_standard_model_and_learns_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    plain = {"attention": "dense", "value_gate": False, "output_gate": False}
    config = tiny_config([DENSE], gsa=plain, train={"micro_batch_size": 4})
    ours, (batch,) = tiny_model(config), random_batches(config, attend_across=True)
    baseline = Baseline(config, single_rank(), float8=False, lr=0.01)
    weights, theirs = list(baseline.model.parameters()), list(ours.gpt.parameters())
    assert sum(map(torch.numel, weights)) == count_parameters(config.model, config.gsa, config.moe).total
    with torch.no_grad():
        for weight, master, source in zip(weights, baseline.masters, theirs, strict=True):
            weight.copy_(source)
            master.copy_(source)
        expected = token_losses(ours, batch).mean()
    baseline.step([batch])
    first = baseline.last_loss
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=0)
    for _ in range(20):
        baseline.step([batch])
    assert baseline.last_loss < first - 0.5


def test_models_that_the_baseline_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="no biases, no norms of heads"):
        Baseline(tiny_config(model={"qk_norm": True}), single_rank(), float8=False, lr=0.0)
