"""Tests Muon: its update against straight-line fp64, its memory, and the interface of fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsa_train.config import Config, TrainConfig
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer import muon
from gsa_train.optimizer.build import optimizer_kind
from gsa_train.optimizer.mcore import build_optimizer
from gsa_train.optimizer.muon import Matrices, MatrixShard, orthogonalize
from gsa_train.planning.memory.estimate import checkpoint_bytes, estimate_memory
from helpers.single_rank import SPARSE, named_weights, random_batches, take_step, tiny_config, tiny_model

LR, DECAY, BETA = 1e-2, 0.3, 0.9
TRAIN = {"optimizer": "muon", "muon_momentum": BETA, "weight_decay": DECAY}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn_hidden_size": 8, "shared_expert_ffn_hidden_size": 8}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "GSA": {"model": {"qkv_bias": True}},
    "gates on queries and keys": {"gsa": {"key_gate": True, "query_gate": True, "projection_gate": True}},
    "gates of all heads": {"gsa": {"gate_sharing": "head_shared", "gate_granularity": "headwise"}},
    "experts": {"moe": {**EXPERTS, "first_dense_layers": 1}},
    "experts one by one": {"moe": {**EXPERTS, "experts_impl": "sequential"}},
}


def matrices_of(name: str, weight: torch.Tensor, config: Config) -> Iterator[torch.Tensor]:
    """Yield the matrices of a parameter as lists of indices into its flat form, [rows, columns]; none for AdamW."""
    index = torch.arange(weight.numel()).view(weight.shape)
    heads, kv_heads, size = config.model.num_heads, config.model.num_kv_heads, config.model.head_dim
    of_group = heads // kv_heads * size  # rows of queries for a key-value head
    if weight.dim() == 1 or "decoder" not in name or "router" in name:
        return
    if "linear_qkv" in name:
        sizes = (of_group, size, size)
    elif "linear_gate" in name:  # values, outputs, keys, queries
        sizes = (size, of_group, size, of_group) if config.gsa.key_gate else (size, of_group)
    elif "head_gate" in name:
        kv_heads, sizes = 1, (1, 1)
    elif "linear_fc1" in name:
        for expert in index.view(-1, *index.shape[-2:]):
            yield from expert.chunk(2)
        return
    else:
        yield from index.view(-1, *index.shape[-2:])
        return
    start = 0
    for rows in sizes:
        of_heads = range(start, len(index), sum(sizes))
        yield torch.cat([index[first : first + rows] for first in of_heads])
        assert len(of_heads) == kv_heads
        start += rows


class StraightLine:
    def __init__(self, name: str, weight: torch.Tensor, config: Config) -> None:
        self.weight, self.matrices = weight.double(), list(matrices_of(name, weight, config))
        self.first, self.second = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.decay = 0.0 if weight.dim() == 1 else DECAY
        self.lr = LR * (SPARSE.indexer_lr_mult if ".indexer." in name else 1.0)

    def step(self, gradient: torch.Tensor, number: int) -> None:
        gradient = gradient.double()
        if self.matrices:
            self.first = BETA * self.first + (1 - BETA) * gradient
            direction, update = BETA * self.first + (1 - BETA) * gradient, torch.zeros_like(self.weight)
            for matrix in self.matrices:
                x = direction.flatten()[matrix]
                x = x / (x.square().sum().sqrt() + 1e-7)
                for _ in range(5):
                    small = x.T @ x
                    x = 3.4445 * x - 4.7750 * x @ small + 2.0315 * x @ small @ small
                update.view(-1)[matrix] = 0.2 * max(x.shape) ** 0.5 * x
        else:
            train = TrainConfig()
            self.first = train.adam_beta1 * self.first + (1 - train.adam_beta1) * gradient
            self.second = train.adam_beta2 * self.second + (1 - train.adam_beta2) * gradient**2
            root = (self.second / (1 - train.adam_beta2**number)).sqrt() + train.adam_epsilon
            update = self.first / (1 - train.adam_beta1**number) / root
        self.weight = self.weight - self.lr * (update + self.decay * self.weight)


def step_and_gradients(model: Model, optimizer: Any, config: Config, seed: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def copy() -> None:
        for name, parameter in model.gpt.named_parameters():
            found[name] = parameter.main_grad.clone()  # type: ignore[attr-defined]  # megatron-core adds it

    take_step(model, optimizer, random_batches(config, seed), config, LR, hold_update=copy)
    return found


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_the_update_is_that_of_the_formula(name: str, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sharded:
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", 1000)  # several batches
    config = tiny_config(train=TRAIN, parallel={"distributed_optimizer": sharded}, **MODELS[name])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    lines = {each: StraightLine(each, weight, config) for each, weight in named_weights(model).items()}
    assert {each for each, line in lines.items() if not line.matrices} == {
        each
        for each in lines
        if each.endswith(("bias", "norm.weight", "norm_weight", "router.weight", "temperature"))
        or not each.startswith("decoder.")
    }
    for number in range(1, 4):
        before = {each: line.weight for each, line in lines.items()}
        for each, gradient in step_and_gradients(model, optimizer, config, number).items():
            lines[each].step(gradient, number)
        for each, weight in named_weights(model).items():
            change = lines[each].weight - before[each]
            close = 1e-3 * change.square().mean().sqrt() + 1e-6 * before[each].abs().max()
            assert (weight - lines[each].weight).abs().max() < close, (number, each)
            lines[each].weight = weight.double()


def test_a_matrix_without_a_gradient_has_no_update() -> None:
    assert not orthogonalize(torch.zeros(4, 8), 5, torch.float32).any()


def test_a_batch_is_limited_by_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor-parallel rank holds whole matrices, so its memory must not grow with the number of ranks."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 100)
    for ranks, batches in ((1, [[0, 1, 2]]), (2, [[0, 1], [2]]), (4, [[0], [1], [2]])):
        group: Any = SimpleNamespace(size=lambda ranks=ranks: ranks)
        shard = MatrixShard(0, (4, 6), (4,), [(0, 24)], group, -2, torch.float32)
        assert list(Matrices([shard] * 3, None, torch.device("cpu")).batches()) == batches


def test_the_dry_run_counts_one_moment_of_a_matrix_and_two_of_the_rest() -> None:
    config = tiny_config(train={**TRAIN, "precision": "bf16"}, **MODELS["experts"])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    tensors = [tensor for part in optimizer.state_parts() for tensor in part.tensors.values()]
    state = 4 * sum(tensor.numel() for tensor in tensors)
    vectors = [each for name, each in named_weights(model).items() if name.endswith("bias")]
    miscounted = 4 * sum(each.numel() for each in vectors)  # biases are counted with their matrices
    assert estimate_memory(config, SPARSE, 1, 0).optimizer == state - miscounted
    weights = 2 * sum(each.numel() for each in named_weights(model).values())
    assert checkpoint_bytes(config, SPARSE) == weights + state - miscounted


def test_a_rejected_update_is_skipped_on_the_device() -> None:
    """On GPUs divisor and verdict are tensors, as for torch's fused optimizers."""
    shard = MatrixShard(0, (4, 6), (4,), [(0, 24)], None, -2, torch.float32)

    def stepped(divisor: float | None, rejected: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(24, generator=generator)
        group = {"params": [torch.empty(0)], "lr": LR, "weight_decay": DECAY, "matrices": True}
        built: Any = optimizer_kind(TrainConfig(optimizer="muon")).build([group], TrainConfig(), False)
        group |= {"params": [weight], "matrices": Matrices([shard], None, weight.device)}
        built.param_groups[0].update(group)
        momentum = built.state[weight]["momentum_buffer"] = torch.randn(24, generator=generator)
        weight.grad = torch.randn(24, generator=generator) * (divisor or 1.0)
        if rejected:
            weight.grad[3] = torch.nan
        if divisor is not None:
            built.grad_scale, built.found_inf = torch.tensor(divisor), torch.tensor(float(rejected))
        built.step()
        return weight, momentum

    generator = torch.Generator().manual_seed(1)
    untouched = [torch.randn(24, generator=generator) for _ in range(2)]
    for found, expected in zip(stepped(4.0, True), untouched, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(stepped(4.0, False), stepped(None, False), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(stepped(4.0, False)[0], untouched[0])
