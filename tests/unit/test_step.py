"""Tests that the loss of a step, as used and as logged, is the mean over the step's scored tokens, however the batch is
divided. tests/gpu/test_graphs_on_gpu.py tests CUDA graphs."""

import dataclasses
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from gsa_kernels import sampling
from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.distributed.parallel import DeviceError
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.optimizer import micro_batch_graph
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.optimizer.micro_batch_graph import WARM_UP_STEPS, MicroBatchGraph, PassInputs, new_graph
from gsa_train.phases import enter_phase
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, evaluation_step, train_step
from helpers.called_again import CalledAgain
from helpers.single_rank import (
    DENSE,
    EOS,
    SPARSE,
    WARM_UP,
    named_weights,
    random_batches,
    random_blocks,
    read_stats,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
    token_losses,
)

CONFIG = tiny_config()
EXPERTS = {"experts": 8, "top_k": 3, "expert_ffn_hidden_size": 16, "z_loss_coeff": 0.1}
NO_KL = dataclasses.replace(SPARSE, kl_coeff=0.0)
BOTH = pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=lambda phase: phase.name)


def uneven_batches(micro_batch_size: int) -> list[MicroBatch]:
    """Return four sequences: one has many scored tokens, one few, and the last none."""
    blocks = random_blocks(CONFIG, seed=6)
    blocks[0] = blocks[0].clamp(min=1)
    blocks[2, 3:] = EOS
    blocks[3] = EOS
    return [to_micro_batch(part, EOS, False) for part in blocks.split(micro_batch_size)]


def scored_losses(model: Model, batches: list[MicroBatch]) -> torch.Tensor:
    """Return the loss of every scored token of the step, [n]."""
    return torch.cat([token_losses(model, batch)[batch.loss_mask > 0] for batch in batches])


def test_gradient_matches_the_mean_loss_over_scored_tokens() -> None:
    batches = uneven_batches(2)
    model = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(model, NO_KL)
    scored_losses(model, batches).mean().backward()
    expected = {name: p.grad for name, p in model.gpt.named_parameters() if p.grad is not None}
    _, gradients = step_gradients(tiny_model(CONFIG, variance_ema=0.02), NO_KL, batches, CONFIG)
    assert len(expected) > 10
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@BOTH
@pytest.mark.parametrize("moe", [{}, {**EXPERTS, "balance_coeff": 0.5}], ids=["dense", "experts"])
def test_loss_and_gradients_do_not_depend_on_the_micro_batch_size(phase: PhaseConfig, moe: dict) -> None:
    """megatron-core's schedule divides its loss in place, so the logged loss must be another tensor. The losses of
    routers must also be means over all tokens of the step."""
    found, loads = [], torch.arange(8) / 28
    for size in (1, 2, 4):
        config = tiny_config(moe=moe, train={"micro_batch_size": size})
        model = tiny_model(config, variance_ema=0.02)
        for router in model.routers:
            router.loads.copy_(loads)
        found.append(step_gradients(model, phase, uneven_batches(size), config))
    model, batches = tiny_model(config, variance_ema=0.02), uneven_batches(1)
    enter_phase(model, phase)
    with torch.no_grad():
        losses = scored_losses(model, batches)
    assert len(losses) == sum(int((batch.tokens != EOS).sum()) for batch in batches)
    for result, gradients in found:
        assert result.loss_tokens == len(losses)
        torch.testing.assert_close(result.loss_sum, losses.sum(), rtol=1e-6, atol=0)
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@BOTH
def test_evaluation_sums_the_losses_and_leaves_no_trace(phase: PhaseConfig) -> None:
    model, other = tiny_model(CONFIG, variance_ema=0.02), tiny_model(CONFIG, variance_ema=0.02)
    optimizers = [build_optimizer(m, phase, CONFIG) for m in (model, other)]
    batches, validation = random_batches(CONFIG), uneven_batches(2)
    for m, optimizer in zip((model, other), optimizers, strict=True):
        take_step(m, optimizer, batches, CONFIG, lr=1e-2)
    gradients = {name: p.main_grad.clone() for name, p in model.gpt.named_parameters() if p.requires_grad}
    with torch.no_grad():
        losses = scored_losses(other, validation)
        for attention in other.attentions:
            attention.variance.step_sum.zero_()  # scored_losses ran in training mode
    loss_sum, loss_tokens = evaluation_step(model, validation, CONFIG, single_rank())
    assert loss_tokens == len(losses)
    torch.testing.assert_close(loss_sum, losses.sum(), rtol=1e-6, atol=0)
    assert model.module.training
    for name, gradient in gradients.items():
        assert torch.equal(model.gpt.get_parameter(name).main_grad, gradient), name
    for m, optimizer in zip((model, other), optimizers, strict=True):
        take_step(m, optimizer, random_batches(CONFIG, seed=2), CONFIG, lr=1e-2)
    weights = named_weights(other)
    for name, weight in named_weights(model).items():
        assert torch.equal(weight, weights[name]), name


@BOTH
def test_evaluation_measures_what_training_measures(phase: PhaseConfig) -> None:
    model = tiny_model(CONFIG, variance_ema=0.02)
    step_gradients(model, phase, random_batches(CONFIG), CONFIG, measures=True)
    trained = read_stats(model)
    model = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(model, phase)
    evaluation_step(model, random_batches(CONFIG), CONFIG, single_rank(), measures=True)
    assert read_stats(model) == trained
    assert {"recall", "indexer_kl", "output_gate_mean", "max_activation"} <= trained.keys()


@BOTH
def test_a_batch_without_a_scored_token_has_a_loss_of_0(phase: PhaseConfig) -> None:
    batches = [to_micro_batch(torch.full_like(random_blocks(CONFIG), EOS), EOS, False)]
    assert not batches[0].loss_mask.any()
    result, gradients = step_gradients(tiny_model(CONFIG, variance_ema=0.02), phase, batches, CONFIG)
    assert result.loss_sum == 0
    assert result.loss_tokens == 1
    assert result.verdict.applied
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# --- passes through a graph equal the schedule's; here a replay calls the captured pass again --------------

BIASES = {"router_score": "sigmoid", "balancing": "aux_free", "bias_update_rate": 0.1}
STEPS = 7
MEASURED = 1, 5


def trained(
    phase: PhaseConfig, graph: MicroBatchGraph | None, config: Config, across: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradient norms of steps, some of them measured and after a validation, and the weights."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, phase, config)
    detector = SpikeDetector(config.monitor, torch.device("cpu"))
    training = Training(model, optimizer, config, single_rank(), detector, graph=graph)
    found = []
    for step in range(STEPS):
        batches = random_batches(config, step, across)
        result = train_step(training, batches, 1e-2, step, measures=step in MEASURED)
        found += [result.loss_sum.item(), result.grad_norm.item()]
        if step in MEASURED:
            evaluation_step(model, random_batches(config, 0, across), config, single_rank())
    weights = named_weights(model) | dict(model.gpt.named_buffers())
    close_optimizer(model, optimizer)
    return found, weights


OVERLAP = {"overlap_grad_reduce": True}
CASES: dict[str, tuple[PhaseConfig, dict[str, Any], bool]] = {
    "sparse": (SPARSE, {}, False),
    "sparse, one document": (SPARSE, {}, True),
    "dense": (DENSE, {}, False),
    "dense, one document": (DENSE, {}, True),
    "loads of experts": (SPARSE, {"moe": EXPERTS}, False),
    "biases of experts": (SPARSE, {"moe": {**EXPERTS, **BIASES}}, False),
    "a share of the rows of the loss": (SPARSE, {"gsa": {"indexer_loss_row_fraction": 0.5}}, True),
    "overlapped reduction": (SPARSE, {"parallel": OVERLAP}, True),
    "overlapped reduction, experts": (SPARSE, {"parallel": OVERLAP, "moe": EXPERTS}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_matches_the_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs change no bit of losses and weights, even if routers count tokens in each pass and change their
    biases after each step. If the gradient reduction overlaps with the backward pass, the last micro-batch of a step
    runs without a graph. Each sample of queries for the indexer loss has its own graph."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 4)
    phase, sections, across = CASES[name]
    config, graph = tiny_config(**sections, train={"qk_clip": 5.0}), CalledAgain()
    losses, weights = trained(phase, None, config, across)
    of_graph, its_weights = trained(phase, graph, config, across)
    assert graph.captures == (2 if "gsa" in sections else 1)
    replayed = 1 if "parallel" in sections else 2
    assert graph.replays == replayed * (STEPS - WARM_UP_STEPS - len(MEASURED))
    assert of_graph == losses
    assert len({*losses}) > STEPS
    for tensor, weight in weights.items():
        assert torch.equal(its_weights[tensor], weight), tensor
    moved = [each for tensor, each in weights.items() if tensor.endswith(("expert_bias", "router.loads"))]
    assert all(len(balance.unique()) > 1 for balance in moved)
    assert bool(moved) == ("moe" in sections)


def test_each_draw_has_a_graph_and_other_shapes_or_passes_replace_all() -> None:
    graph, seen = CalledAgain(), []

    def run(length: int, fixed: Hashable, draw: int = 0) -> float:
        tokens = torch.full((1, length), length)
        scale = torch.tensor(2.0)

        def run_pass(inputs: PassInputs) -> torch.Tensor:
            seen.append((fixed, draw))
            return inputs.tokens.sum() * inputs.loss_scale

        inputs = PassInputs(tokens, tokens, None, tokens.float(), scale, None)
        return float(graph.run(run_pass, inputs, fixed, draw))

    assert [run(3, "a"), run(3, "a", 1), run(3, "a"), run(3, "a", 1)] == [18.0] * 4
    assert graph.captures == 2
    assert [run(5, "a"), run(5, "b"), run(5, "a")] == [50.0] * 3
    assert graph.captures == 5
    assert seen == [("a", 0), ("a", 1), ("a", 0), ("a", 1), ("a", 0), ("b", 0), ("a", 0)]


def test_what_a_pass_leaves_in_the_memory_of_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, passes = CalledAgain(), []
    graph._pool = cast("torch.cuda.MemPool", object())
    allocated = [512, 512, 512, 0, 512, 1024]
    monkeypatch.setattr(micro_batch_graph, "_allocated_bytes", lambda pool: allocated.pop(0))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())

    def run() -> list[dict[str, torch.Tensor]]:
        passes.append(torch.ones(()))
        return [{"loss_sum": passes[-1]}]

    for _ in range(2):  # the same tensors as before, or fewer
        ((copied,),) = (each.values() for each in graph.run_plain(run, measures=True))
        assert copied.item() == 1
        assert copied is not passes[-1]
    with pytest.raises(RuntimeError, match="left 512 bytes in the memory of the graph"):
        graph.run_plain(run, measures=False)


def test_phases_without_a_backward_pass_have_no_graph() -> None:
    model = tiny_model(CONFIG)
    config = tiny_config()
    on = tiny_config(train={"cuda_graphs": True}, logging={"every_steps": 2})
    for phase, expected in ((SPARSE, True), (WARM_UP, False)):
        optimizer = build_optimizer(model, phase, config)
        assert (new_graph(optimizer, on) is not None) is expected
        assert new_graph(optimizer, config) is None
        close_optimizer(model, optimizer)


def test_a_cpu_has_no_graphs() -> None:
    config = tiny_config(train={"cuda_graphs": True}, logging={"every_steps": 2})
    with pytest.raises(
        DeviceError, match=r"train.cuda_graphs = true: there is no CUDA device; set it to false"
    ):
        build_model(config, single_rank())
