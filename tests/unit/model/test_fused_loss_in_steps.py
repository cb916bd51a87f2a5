"""Tests when attention's backward pass computes the indexer loss, and what it trains and measures then."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gsa_kernels import operations_triton, sampling
from gsa_kernels.hopper import fused_indexer_loss as fused_op
from gsa_kernels.hopper import target_blocks
from gsa_kernels.loss import op as kl_op
from gsa_kernels.loss.triton_launch import Blocks, Inputs
from gsa_kernels.types import Geometry, RowSample, Selection
from gsa_train.config import PhaseConfig
from gsa_train.model.attention import ChunkInputs
from gsa_train.model.mcore.build import Model
from gsa_train.model.probes import query_sample
from gsa_train.model.probes.stats import LayerStats
from gsa_train.phases import enter_phase
from helpers.fused_steps import VARIANTS, assert_same_step, one_step, take_over_of_neighbours
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    tiny_config,
    tiny_model,
    token_losses,
)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many queries each call of the fused attention gets. Its backward pass also computes the indexer's
    gradients. Inputs and target are in fp32 here, so that more digits can be compared."""
    monkeypatch.setattr(fused_op, "can_fuse_indexer_loss", lambda q, k: True)
    wide = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    wide.float16 = torch.float32
    monkeypatch.setattr(target_blocks, "torch", wide)
    calls: list[int] = []

    def recorded(q: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(q.shape[1])
        return fused_op.attention_with_indexer_loss(q, *arguments, **options)

    monkeypatch.setattr(operations_triton, "sparse_attention_with_loss", recorded)
    return calls


@pytest.fixture
def counted_kl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each addition to the statistic of the indexer loss."""
    counts: list[int] = []
    add = LayerStats.add

    def recorded(
        self: LayerStats, name: str, layer: int, values: torch.Tensor, *counted: Any, **count: Any
    ) -> None:
        if name == "indexer_kl":
            counts.append(values.numel())
        add(self, name, layer, values, *counted, **count)

    monkeypatch.setattr(LayerStats, "add", recorded)
    return counts


FUSED = [("window, rope and reuse", False), ("sparse-only", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "attend_across"), FUSED, ids=[variant for variant, _ in FUSED])
def test_the_loss_in_attentions_backward_pass_matches_the_reference(
    variant: str, attend_across: bool, fused_calls: list[int]
) -> None:
    options: dict[str, Any] = {"heads": 8, "attend_across": attend_across}
    reference = one_step(VARIANTS[variant], SPARSE, fused=False, **options)
    assert fused_calls == []
    fused = one_step(VARIANTS[variant], SPARSE, fused=True, **options)
    assert fused_calls == [24]  # once, though two layers may share the selection
    assert_same_step(fused, reference)


@pytest.mark.slow
def test_recomputing_the_core_repeats_no_loss_in_its_backward_pass(
    fused_calls: list[int], counted_kl: list[int]
) -> None:
    """The first pass has no graph and is plain attention; each query's loss counts once."""
    reference = one_step({}, SPARSE, fused=False, heads=8)
    assert counted_kl == [48]
    counted_kl.clear()
    once = one_step({}, SPARSE, fused=True, heads=8)
    assert (fused_calls, counted_kl) == ([24], [48])
    twice = one_step({}, SPARSE, fused=True, heads=8, recompute="selective")
    assert (fused_calls, counted_kl) == ([24, 24], [48, 48])
    assert_same_step(once, reference)
    assert torch.equal(once[0], twice[0])
    assert all(torch.equal(once[1][name], twice[1][name]) for name in once[1])
    assert once[2] == twice[2]


@pytest.mark.slow
@pytest.mark.parametrize("fuses", [True, False])
def test_the_loss_of_runs_of_queries_takes_the_sums_that_selection_and_attention_know(
    fuses: bool, fused_calls: list[int], counted_kl: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are as under context parallelism, with a learned temperature, a window and recomputation."""
    monkeypatch.setattr(fused_op, "can_fuse_indexer_loss", lambda q, k: fuses)
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    blocks = Blocks(32, 32, 4, 32, 4, segment=32)
    seen: list[Inputs] = []
    monkeypatch.setattr(kl_op, "choose_blocks", lambda inputs: (seen.append(inputs), blocks)[1])
    gsa = {"indexer_temperature": "learned", "local_window": 3}
    whole = one_step(gsa, SPARSE, fused=False, heads=8)
    counted_kl.clear()
    runs = one_step(gsa, SPARSE, fused=True, recompute="selective", cuts=(0, 7, 24), heads=8)
    assert fused_calls == [7, 17] * fuses
    assert sorted(counted_kl) == [2 * 7, 2 * 17]
    assert seen
    for inputs in seen:
        assert inputs.log_sum is not None
        assert inputs.log_sum.shape == inputs.q_idx.shape[:2]
        assert inputs.target_sum == 8
    take_over_of_neighbours(whole, runs)
    assert_same_step(runs, whole)


def model_of_kernels(phase: PhaseConfig, gsa: dict[str, Any]) -> tuple[Model, Any]:
    """Return one layer that measures, in this phase, and the configuration."""
    config = tiny_config(
        [phase],
        model={"num_layers": 1, "num_heads": 8, "head_dim": 32, "init_std": 0.2},
        gsa={"indexer_dim": 16, "indexer_heads": 2, **gsa},
        train={"micro_batch_size": 1, "global_batch_size": 1},
    )
    model = tiny_model(config, variance_ema=0.01)
    enter_phase(model, phase)
    for attention in model.attentions:
        attention.over_chunks.implementation = "triton"
    return model, config


FROZEN_INDEXER = dataclasses.replace(SPARSE, name="frozen indexer", train="base")
ELSEWHERE = [
    (WARM_UP, {}, 16),
    (FROZEN_INDEXER, {}, 16),
    (SPARSE, {"attention_kernel": "gathered"}, 16),
    (SPARSE, {"indexer_loss_row_fraction": 0.25}, 1),  # only the estimate of the sum
]


@pytest.mark.parametrize(
    ("phase", "gsa", "count"), ELSEWHERE, ids=[f"{p.name}-{'-'.join(gsa)}" for p, gsa, _ in ELSEWHERE]
)
def test_the_loss_stays_in_the_forward_pass(
    phase: PhaseConfig,
    gsa: dict[str, Any],
    count: int,
    fused_calls: list[int],
    counted_kl: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In these cases some queries with a packed mask do not train the indexer."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 4)
    model, config = model_of_kernels(phase, gsa)
    fraction = config.gsa.indexer_loss_row_fraction
    token_losses(model, random_batches(config)[0], measuring=True, row_fraction=fraction)
    assert fused_calls == []
    assert counted_kl == [count]


@pytest.mark.parametrize(("queries", "fuses"), [(16, True), (4, False)], ids=["all rows", "a quarter"])
def test_a_share_of_the_rows_that_is_all_of_them_stays_in_attentions_backward_pass(
    queries: int, fuses: bool, fused_calls: list[int], counted_kl: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence has 16 queries, in stretches of `queries`."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", queries)
    model, config = model_of_kernels(SPARSE, {"indexer_loss_row_fraction": 0.25})
    token_losses(model, random_batches(config)[0], row_fraction=config.gsa.indexer_loss_row_fraction)
    assert bool(fused_calls) == fuses


def test_the_loss_is_measured_without_a_backward_pass_in_validation(
    fused_calls: list[int], counted_kl: list[int]
) -> None:
    model, config = model_of_kernels(SPARSE, {})
    batch = random_batches(config)[0]
    with torch.no_grad():
        token_losses(model, batch, measuring=True)  # as a recomputed pass does first
        assert counted_kl == []
        token_losses(model, batch, measuring=True, evaluating=True)
    assert fused_calls == []
    assert counted_kl == [16]
    losses = token_losses(model, batch, measuring=True)
    assert (fused_calls, counted_kl) == ([16], [16])
    losses.sum().backward()
    assert (fused_calls, counted_kl) == ([16], [16, 16])
    mean = read_stats(model)["indexer_kl"][0]  # mean of two equal values
    assert mean > 0
    stats = model.runtime.stats
    stats.reset()
    with torch.no_grad():
        token_losses(model, batch, measuring=True, evaluating=True)
    assert read_stats(model)["indexer_kl"][0] == pytest.approx(mean, rel=1e-5)


def test_tensor_parallel_ranks_do_not_fuse_the_loss_and_the_log_names_layers_that_do(
    fused_calls: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_of_kernels(SPARSE, {})
    over_chunks = model.attentions[0].over_chunks
    q, k = torch.zeros(1, 1, 8, 32), torch.zeros(1, 1, 2, 32)
    inputs = ChunkInputs(q, k, k, None, Geometry())
    mask = Selection(torch.zeros(1, 1, 1, dtype=torch.int32), None, torch.ones(1, 1).int(), torch.zeros(1, 1))
    loss = Mock(rows=RowSample(), indexer=Mock(queries=torch.zeros(1, 2, 1, 16)))

    def fuses() -> bool:
        return over_chunks._fuses_loss(inputs, mask, loss, model.runtime.attention_pass)

    with caplog.at_level("INFO"):
        assert fuses()
        assert fuses()
    said = "layer 0: indexer loss fused into attention's backward pass"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    monkeypatch.setattr(over_chunks, "tp_group", SimpleNamespace(size=lambda: 2))
    assert not fuses()
