"""Tests the indexer loss from a share of the queries: an unbiased estimate that a resumed run repeats."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

from gsa_kernels.sampling import STRETCH_ROWS, SampledRows, sample_rows, sampled_one_of
from gsa_kernels.types import RowSample
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import build_optimizer
from gsa_train.phases import enter_phase
from gsa_train.step import evaluation_step
from helpers.single_rank import (
    SPARSE,
    random_batches,
    read_stats,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
)

LENGTH = 4 * STRETCH_ROWS
ONE_SEQUENCE = {"seq_len_tokens": LENGTH, "micro_batch_size": 1, "global_batch_size": 1}


def config_with(fraction: float, **train: Any) -> Any:
    return tiny_config(
        gsa={"indexer_loss_row_fraction": fraction}, train={**ONE_SEQUENCE, **train}, model={"num_layers": 1}
    )


def indexer_gradients(fraction: float, step: int) -> dict[str, torch.Tensor]:
    config = config_with(fraction)
    model = tiny_model(config, variance_ema=0.02)
    _, gradients = step_gradients(model, SPARSE, random_batches(config), config, step=step)
    return {name: gradient for name, gradient in gradients.items() if ".indexer." in name}


def test_consecutive_draws_take_each_row_once() -> None:
    for num_rows, fraction, factor in (
        (5 * STRETCH_ROWS, 0.3333, 3),
        (4 * STRETCH_ROWS - 7, 0.5, 2),
        (3 * STRETCH_ROWS + 1, 0.25, 4),
        (9, 0.1, 1),
    ):
        counts = torch.zeros(num_rows)
        for draw in range(factor):
            sample, found = sample_rows(num_rows, fraction, draw)
            rows = sample.rows()
            assert found == sample.every == sampled_one_of(num_rows, fraction) == factor
            assert len(rows) == sample.count
            assert set((rows // STRETCH_ROWS % factor).tolist()) == {draw % factor}
            assert all(sample.row(number) == row for number, row in enumerate(rows.tolist()))
            counts[rows] += 1
        assert (counts == 1).all()
    assert sample_rows(100, 1, None) == (SampledRows(0, 100), 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("fraction", [1, 0.5])
def test_shares_of_a_sample_are_its_rows_once_each(fraction: float, size: int) -> None:
    """With fewer stretches of rows than ranks, the last ranks have no rows."""
    num_rows = 5 * STRETCH_ROWS + 3
    whole, factor = sample_rows(num_rows, fraction, 1)
    shares = [sample_rows(num_rows, fraction, 1, (rank, size)) for rank in range(size)]
    assert {other for _, other in shares} == {factor}
    assert sum(share.count for share, _ in shares) == whole.count
    assert torch.equal(torch.cat([share.rows() for share, _ in shares]).sort().values, whole.rows())
    chunks = [whole.chunk(number, STRETCH_ROWS) for number in range(0, whole.count, STRETCH_ROWS)]
    assert torch.equal(torch.cat([chunk.rows() for chunk in chunks]), whole.rows())
    share, _ = sample_rows(1024, 1.0, None, (1, 2))  # without a sample, in whole tiles of the kernels
    assert (share.start, share.stretch, share.every) == (128, 128, 2)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 0.3, 0.75, 2.0])
def test_a_share_is_one_of_a_whole_number(fraction: float) -> None:
    with pytest.raises(ValueError, match="1 / n"):
        sample_rows(1000, fraction, 1)


def test_the_mean_over_all_draws_is_the_gradient_of_all_rows() -> None:
    """A draw takes every second of four stretches of rows. The test tries steps until both draws have occurred."""
    by_draw: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(100):
        draw = _draw_of(step) % 2
        if draw not in by_draw:
            by_draw[draw] = indexer_gradients(0.5, step)
        if len(by_draw) == 2:
            break
    whole = indexer_gradients(1.0, 0)
    assert len(by_draw) == 2
    for name, expected in whole.items():
        draws = [gradients[name] for gradients in by_draw.values()]
        assert not torch.allclose(draws[0], draws[1]), name
        torch.testing.assert_close(torch.stack(draws).mean(0), expected, rtol=1e-3, atol=1e-6, msg=name)


def _draw_of(step: int) -> int:
    return zlib.crc32(f"{config_with(0.5).run.seed} {step} 0".encode())


def train(model: Model, optimizer: Any, config: Any, steps: range) -> list[torch.Tensor]:
    results = [
        take_step(model, optimizer, random_batches(config, seed=step), config, lr=1e-2, step=step)
        for step in steps
    ]
    return [result.grad_norm for result in results]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rows_depend_on_step_and_micro_batch_alone(recompute: str) -> None:
    """Earlier steps and recomputation do not change the draw, so a resumed run repeats it."""
    config = config_with(0.5, global_batch_size=2, recompute=recompute)
    model = tiny_model(config, variance_ema=0.02)
    draws: list[int | None] = []
    draw_rows = model.runtime.draw_rows

    def recorded(attention_pass: AttentionPass, layer: int) -> RowSample:
        drawn = draw_rows(attention_pass, layer)
        draws.append(drawn.draw)
        return drawn

    model.runtime.draw_rows = recorded  # type: ignore[method-assign]
    optimizer = build_optimizer(model, SPARSE, config)
    train(model, optimizer, config, range(2))
    train(model, optimizer, config, range(1, 2))
    firsts = [_draw_of(step) for step in (0, 1, 1)]
    assert draws == [first + number for first in firsts for number in range(2)]


def test_validation_takes_every_row_and_the_log_shows_the_estimate() -> None:
    validated, trained = [], []
    for fraction in (0.5, 1.0):
        config = config_with(fraction)
        model = tiny_model(config, variance_ema=0.02)
        enter_phase(model, SPARSE)
        evaluation_step(model, random_batches(config), config, single_rank(), measures=True)
        validated.append(read_stats(model)["indexer_kl"][0])
        model.runtime.stats.reset()
        step_gradients(model, SPARSE, random_batches(config), config, measures=True)
        trained.append(read_stats(model)["indexer_kl"][0])
    estimate, exact = trained
    assert validated == [exact, exact]
    assert estimate != exact
    assert 0.3 * exact < estimate < 2 * exact
