"""Tests that passes through a graph equal the schedule's; here a replay calls the captured pass again.
tests/gpu/test_graphs_on_gpu.py has real graphs."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from gsa_train.config import Config, PhaseConfig
from gsa_train.distributed.parallel import DeviceError
from gsa_train.model.mcore.build import build_model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.optimizer.micro_batch_graph import WARM_UP_STEPS, MicroBatchGraph, PassInputs, new_graph
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, evaluation_step, train_step
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    named_weights,
    random_batches,
    single_rank,
    tiny_config,
    tiny_model,
)

CONFIG = tiny_config()
EXPERTS = {"experts": 8, "top_k": 3, "expert_ffn_hidden_size": 16, "z_loss_coeff": 0.1}
BIASES = {"router_score": "sigmoid", "balancing": "aux_free", "bias_update_rate": 0.1}
STEPS = 6
MEASURED = 4


class CalledAgain(MicroBatchGraph):
    """Replays with only the data that existed when the pass was captured."""

    captures = 0

    def _capture(self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs) -> None:
        self.captures += 1
        self._inputs = PassInputs._make(None if each is None else torch.zeros_like(each) for each in inputs)
        self._loss_sum = torch.zeros(())
        self._pass = run_pass

    def _replay(self) -> None:
        self._loss_sum.copy_(self._pass(self._inputs))


def trained(
    phase: PhaseConfig, graph: MicroBatchGraph | None, config: Config, across: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradient norms of steps, one of them measured and one after a validation, and the weights."""
    model = tiny_model(config)
    optimizer = build_optimizer(model, phase, config)
    detector = SpikeDetector(config.monitor, torch.device("cpu"))
    training = Training(model, optimizer, config, single_rank(), detector, graph=graph)
    found = []
    for step in range(STEPS):
        batches = random_batches(config, step, across)
        result = train_step(training, batches, 1e-2, step, measures=step == MEASURED)
        found += [result.loss_sum.item(), result.grad_norm.item()]
        if step == MEASURED:
            evaluation_step(model, random_batches(config, 0, across), config, single_rank())
    weights = named_weights(model) | dict(model.gpt.named_buffers())
    close_optimizer(model, optimizer)
    return found, weights


CASES: dict[str, tuple[PhaseConfig, dict[str, Any], bool]] = {
    "sparse": (SPARSE, {}, False),
    "sparse, one document": (SPARSE, {}, True),
    "dense": (DENSE, {}, False),
    "dense, one document": (DENSE, {}, True),
    "loads of experts": (SPARSE, EXPERTS, False),
    "biases of experts": (SPARSE, {**EXPERTS, **BIASES}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_matches_the_schedule(name: str) -> None:
    """Routers count in the passes, and their balancing changes after each step."""
    phase, moe, across = CASES[name]
    config, graph = tiny_config(moe=moe), CalledAgain()
    losses, weights = trained(phase, None, config, across)
    of_graph, its_weights = trained(phase, graph, config, across)
    assert graph.captures == 1
    assert graph.replays == 2 * (STEPS - WARM_UP_STEPS - 1)
    assert of_graph == losses
    assert len({*losses}) > STEPS
    for tensor, weight in weights.items():
        assert torch.equal(its_weights[tensor], weight), tensor
    moved = [each for tensor, each in weights.items() if tensor.endswith(("expert_bias", "router.loads"))]
    assert all(len(balance.unique()) > 1 for balance in moved)
    assert bool(moved) == bool(moe)


def test_other_shapes_and_another_pass_are_captured_again() -> None:
    graph, seen = CalledAgain(), []

    def run(length: int, fixed: Hashable) -> float:
        tokens = torch.full((1, length), length)
        scale = torch.tensor(2.0)

        def run_pass(inputs: PassInputs) -> torch.Tensor:
            seen.append(fixed)
            return inputs.tokens.sum() * inputs.loss_scale

        inputs = PassInputs(tokens, tokens, None, tokens.float(), scale, None)
        return float(graph.run(run_pass, inputs, fixed))

    assert [run(3, "a"), run(3, "a"), run(5, "a"), run(5, "b")] == [18.0, 18.0, 50.0, 50.0]
    assert graph.captures == 3
    assert seen == ["a", "a", "a", "b"]


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
