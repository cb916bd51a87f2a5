"""Tests V̄, the moving average of the adaptive budget: what it averages, when it changes, where it is used."""

from collections.abc import Iterator

import pytest
import torch

from gsa_train.config import PhaseConfig
from gsa_train.model.mcore.build import Model
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    averages,
    random_batches,
    read_stats,
    step_gradients,
    tiny_config,
    tiny_model,
)

DECAY = 0.75
CONFIG = tiny_config(gsa={"variance_ema_decay": DECAY})


def steps(model: Model, phase: PhaseConfig, count: int) -> Iterator[dict[str, list[float]]]:
    """Take steps of two micro-batches with different text; yield each step's measurements."""
    for seed in range(count):
        model.runtime.stats.reset()
        step_gradients(model, phase, random_batches(CONFIG, seed), CONFIG, measures=True)
        yield read_stats(model)


@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=lambda phase: phase.name)
def test_first_step_starts_the_average_and_later_ones_decay_it(phase: PhaseConfig) -> None:
    """All micro-batches of a step use the average from before the step. A phase without indexer keeps the average."""
    model = tiny_model(CONFIG)
    expected = None
    for stats in steps(model, phase, 4):
        assert stats["variance_ema"] == pytest.approx(expected or [0, 0], rel=1e-6)
        means = stats["variance"]  # over all tokens of both micro-batches; the oracle checks each variance
        expected = (
            means
            if expected is None
            else [DECAY * old + (1 - DECAY) * new for old, new in zip(expected, means, strict=True)]
        )
        assert averages(model) == pytest.approx(expected, rel=1e-6)
    before = averages(model)
    assert len(set(before)) == 2  # each layer has its own
    list(steps(model, DENSE, 1))
    assert averages(model) == before


def test_average_stays_fp32_in_a_bf16_model() -> None:
    """megatron-core's Float16Module also casts buffers, but bf16 cannot follow a decay of 0.99."""
    config = tiny_config(train={"precision": "bf16"}, gsa={"variance_ema_decay": 0.99})
    model = tiny_model(config, variance_ema=0.0123456789)
    assert model.gpt.decoder.layers[0].mlp.linear_fc1.weight.dtype == torch.bfloat16
    model.module.bfloat16()
    for attention in model.attentions:
        assert attention.variance.ema.dtype == torch.float32
        assert attention.variance.step_sum.dtype == torch.float64
        assert attention.variance.ema == torch.tensor(0.0123456789)
    step_gradients(model, SPARSE, random_batches(config), config)
    for moved in averages(model):
        assert moved != torch.tensor(0.0123456789)
        assert moved != torch.tensor(moved).bfloat16().item()


def test_checkpoint_holds_the_average_and_not_the_sums_of_a_step() -> None:
    state = tiny_model(CONFIG, variance_ema=0.02).gpt.state_dict()
    saved = [name for name in state if ".variance." in name]
    assert saved == [f"decoder.layers.{layer}.self_attention.variance.ema" for layer in (0, 1)]
