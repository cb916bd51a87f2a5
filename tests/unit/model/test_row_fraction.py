"""The indexer loss from a share of the queries: an unbiased estimate that a resumed run repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsa_kernels.kl import sampling
from gsa_kernels.kl.sampling import SAMPLED_ROWS, row_ranges
from gsa_train.model.build import Model
from gsa_train.model.triton_core import TritonCore
from gsa_train.optim import build_optimizer
from helpers.single_rank import (
    SPARSE,
    random_batches,
    read_stats,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
)

LENGTH = 4 * SAMPLED_ROWS
ONE_SEQUENCE = {"seq_len_tokens": LENGTH, "micro_batch_size": 1, "global_batch_size": 1}


def config_with(fraction: float, **train: Any) -> Any:
    return tiny_config(
        gsa={"indexer_loss_row_fraction": fraction}, train={**ONE_SEQUENCE, **train}, model={"num_layers": 1}
    )


def indexer_gradients(fraction: float, seed: int) -> dict[str, torch.Tensor]:
    config = config_with(fraction)
    model = tiny_model(config, variance_ema=0.02)
    model.runtime.begin_step = lambda key: None  # type: ignore[method-assign]  # the key below is the test's
    model.runtime.row_key = str(seed)
    _, gradients = step_gradients(model, SPARSE, random_batches(config), config)
    return {name: gradient for name, gradient in gradients.items() if ".indexer." in name}


def test_each_tile_of_rows_is_as_likely_as_any_other() -> None:
    for num_rows, fraction, kept in ((5 * SAMPLED_ROWS, 0.4, 2), (4 * SAMPLED_ROWS - 7, 0.5, 2), (9, 0.1, 1)):
        tiles = -(-num_rows // SAMPLED_ROWS)
        counts = torch.zeros(tiles)
        for seed in range(2000):
            ranges, factor = row_ranges(num_rows, fraction, seed)
            assert factor == tiles / kept
            assert len(ranges) <= 2
            for start, stop in ranges:
                assert 0 <= start < stop <= num_rows
                counts[start // SAMPLED_ROWS : -(-stop // SAMPLED_ROWS)] += 1
        assert counts.sum() == 2000 * kept
        assert counts.max() < 1.15 * counts.min()
    assert row_ranges(100, 1, None) == ([(0, 100)], 1.0)


def test_the_mean_over_all_draws_is_the_gradient_of_all_rows() -> None:
    """Half of four tiles: the draws start at one of four tiles, each of which some seed finds."""
    by_draw: dict[Any, dict[str, torch.Tensor]] = {}
    for seed in range(100):
        draw = _ranges_of(seed)
        if draw not in by_draw:
            by_draw[draw] = indexer_gradients(0.5, seed)
        if len(by_draw) == 4:
            break
    whole = indexer_gradients(1.0, 0)
    assert len(by_draw) == 4
    for name, expected in whole.items():
        draws = [gradients[name] for gradients in by_draw.values()]
        assert not torch.allclose(draws[0], draws[1]), name
        torch.testing.assert_close(torch.stack(draws).mean(0), expected, rtol=1e-3, atol=1e-6, msg=name)


def _ranges_of(seed: int) -> tuple[tuple[int, int], ...]:
    model = tiny_model(config_with(0.5))
    model.runtime.begin_step(str(seed))
    fraction, drawn = model.runtime.draw_rows(0)
    assert fraction == 0.5
    return tuple(row_ranges(LENGTH, fraction, drawn)[0])


def train(model: Model, optimizer: Any, config: Any, steps: range) -> list[torch.Tensor]:
    results = [
        take_step(model, optimizer, random_batches(config, seed=step), config, lr=1e-2, step=step)
        for step in steps
    ]
    return [result.grad_norm for result in results]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rows_depend_on_step_micro_batch_and_layer_alone(recompute: str) -> None:
    """Not on what ran before (so a resumed run draws the same), and not on recomputation."""
    config = config_with(0.5, global_batch_size=2, recompute=recompute)
    model = tiny_model(config, variance_ema=0.02)
    seeds: list[tuple[int, int | None]] = []
    draw = model.runtime.draw_rows

    def recorded(layer: int) -> tuple[float, int | None]:
        fraction, seed = draw(layer)
        seeds.append((layer, seed))
        return fraction, seed

    model.runtime.draw_rows = recorded  # type: ignore[method-assign]
    optimizer = build_optimizer(model, SPARSE, config)
    train(model, optimizer, config, range(2))
    assert len(seeds) == len(set(seeds)) == 4  # two steps of two micro-batches
    train(model, optimizer, config, range(1, 2))
    assert seeds[4:] == seeds[2:4]
    other_run = tiny_model(config, variance_ema=0.02)
    other_run.runtime.begin_step(f"{config.run.seed} 1 0")
    assert [other_run.runtime.draw_rows(0)[1] for _ in range(2)] == [seed for _, seed in seeds[2:4]]


def test_validation_takes_every_row_and_the_log_shows_the_estimate() -> None:
    config = config_with(0.5)
    model = tiny_model(config, variance_ema=0.02)
    model.runtime.evaluating = True
    assert model.runtime.draw_rows(0) == (1.0, None)
    model.runtime.evaluating, model.runtime.measuring = False, True
    step_gradients(model, SPARSE, random_batches(config), config)
    whole = tiny_model(config_with(1.0), variance_ema=0.02)
    whole.runtime.measuring = True
    step_gradients(whole, SPARSE, random_batches(config), config)
    estimate, exact = (read_stats(m)["indexer_kl"][0] for m in (model, whole))
    assert estimate != exact
    assert 0.3 * exact < estimate < 2 * exact


@pytest.mark.slow
def test_the_fused_core_draws_the_rows_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLED_ROWS", 16)
    config = tiny_config(
        model={"head_dim": 32, "init_std": 0.2},
        gsa={"indexer_dim": 16, "indexer_heads": 2, "indexer_loss_row_fraction": 0.4},
        train={"seq_len_tokens": 40, "global_batch_size": 2},
    )
    found = []
    for fused in (False, True):
        model = tiny_model(config, variance_ema=0.02)
        model.runtime.measuring = True
        for attention in model.attentions:
            attention.core = TritonCore(attention) if fused else attention.core
        _, gradients = step_gradients(model, SPARSE, random_batches(config), config)
        found.append((gradients, read_stats(model)["indexer_kl"]))
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    for name, expected in found[0][0].items():
        assert (found[1][0][name] - expected).norm() < 1e-4 * expected.norm(), name
