"""Compares a mixture of experts with loops over tokens: output, losses and every gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu
from gsa_train.config import Config, MoEConfig
from gsa_train.model.mcore.moe_layer import MixtureOfExperts
from gsa_train.model.moe.router import update_routers
from helpers.single_rank import single_rank, tiny_config, tiny_model

SIZES = {"experts": 8, "expert_ffn_hidden_size": 8}
BIASED = {"router_score": "sigmoid", "balancing": "aux_free"}
CASES: dict[str, dict[str, Any]] = {
    "softmax, balanced": {"top_k": 2, "balance_coeff": 0.5, "z_loss_coeff": 0.25},
    "sigmoid, biased": {"top_k": 3, **BIASED, "routed_scale": 2.5, "z_loss_coeff": 0.0},
    "sigmoid, balanced, shared": {
        "router_score": "sigmoid",
        "balance_coeff": 0.5,
        "shared_expert_ffn_hidden_size": 16,
    },
    "with a capacity": {"top_k": 2, "capacity_factor": 1.0, "balancing": "none"},
}


class Made(NamedTuple):
    output: torch.Tensor
    gradients: dict[str, torch.Tensor]
    counts: list[int]


def layer_of(moe: dict[str, Any], **train: Any) -> tuple[MixtureOfExperts, Config]:
    """Create a layer for one global batch, with loads and biases as if it had trained before."""
    config = tiny_config(moe={**SIZES, **moe}, train={"micro_batch_size": 4, "global_batch_size": 4, **train})
    layer: Any = tiny_model(config).gpt.decoder.layers[0].mlp
    generator = torch.Generator().manual_seed(1)
    if layer.router.loads is not None:
        layer.router.loads.copy_(torch.rand(8, generator=generator).softmax(0))
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.randn(8, generator=generator) * 0.1)
    return layer, config


def inputs_of(config: Config, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw hidden [L, B, d], and the weights of the output that give a gradient."""
    train = config.train
    generator = torch.Generator().manual_seed(2)
    shape = (train.seq_len_tokens, train.global_batch_size, config.model.hidden_size)
    hidden, weights = torch.randn((2, *shape), generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), weights


def run(layer: MixtureOfExperts, hidden: torch.Tensor, weights: torch.Tensor) -> Made:
    output, bias = layer(hidden)
    assert bias is None
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return Made(output.detach(), {**gradients, "hidden": hidden.grad}, layer.router.counts.tolist())


def feed_forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    gate, up = (first @ x).chunk(2)
    return second @ (gate * gate.sigmoid() * up)


def in_loops(layer: MixtureOfExperts, moe: MoEConfig, hidden: torch.Tensor, weights: torch.Tensor) -> Made:
    own = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    hidden = hidden.detach().double().requires_grad_()
    length, sequences = hidden.shape[:2]
    capacity = math.ceil(moe.capacity_factor * length * moe.top_k / moe.experts) or length
    output, counts = torch.zeros_like(hidden), [0] * moe.experts
    balance = squares = hidden.new_zeros(())
    for b in range(sequences):
        taken = [0] * moe.experts
        for t in range(length):
            x = hidden[t, b]
            logits = own["router.weight"] @ x
            exponentials = (logits - logits.max()).exp()
            scores = (
                exponentials / exponentials.sum()
                if moe.router_score == "softmax"
                else 1 / (1 + (-logits).exp())
            )
            ranked = scores.detach().clone()
            if layer.router.expert_bias is not None:
                ranked += layer.router.expert_bias
            chosen = sorted(range(moe.experts), key=lambda e: -ranked[e].item())[: moe.top_k]
            total = sum(scores[e] for e in chosen)
            made = torch.zeros_like(x)
            for e in chosen:
                counts[e] += 1
                taken[e] += 1
                if taken[e] <= capacity:
                    expert = [own[f"experts.local_experts.{e}.linear_fc{n}.weight"] for n in (1, 2)]
                    made = made + scores[e] / total * feed_forward(x, *expert)
            made = made * moe.routed_scale
            if moe.shared_expert_ffn_hidden_size:
                made = made + feed_forward(x, *(own[f"shared_experts.linear_fc{n}.weight"] for n in (1, 2)))
            output = output.index_put((torch.tensor(t), torch.tensor(b)), made)
            if layer.router.loads is not None:
                shares = scores / scores.sum()
                balance = balance + moe.experts * sum(layer.router.loads[e] * shares[e] for e in range(8))
            squares = squares + torch.log(logits.exp().sum()) ** 2
    tokens = length * sequences
    losses = (moe.balance_coeff * balance + moe.z_loss_coeff * squares) / tokens
    ((output * weights.double()).sum() + losses).backward()
    gradients = {name: parameter.grad for name, parameter in own.items()}
    return Made(output.detach(), {**gradients, "hidden": hidden.grad}, counts)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_its_definition(name: str) -> None:
    layer, config = layer_of({**CASES[name], "experts_impl": "sequential"})
    layer.double()
    hidden, weights = inputs_of(config, torch.float64)
    expected = in_loops(layer, config.moe, hidden, weights)
    found = run(layer, hidden, weights)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-10, atol=1e-12)
    assert found.gradients.keys() == expected.gradients.keys()
    for each, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[each], gradient, rtol=1e-9, atol=1e-11, msg=each)
    assert found.counts == expected.counts
    assert min(expected.counts) < max(expected.counts)


INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled for CUDA here")


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=INTERPRETED)])
@pytest.mark.parametrize("name", CASES)
def test_grouped_experts_are_those_one_by_one(name: str, fused: bool) -> None:
    """In fp32 grouped and separate experts are equally close to fp64. A checkpoint has the same names and weights."""
    found, expected = (layer_of({**CASES[name], "experts_impl": each}) for each in ("grouped", "sequential"))
    if fused:
        found[0].experts.activation = fused_weighted_swiglu
    config = found[1]
    one_by_one = run(expected[0], *inputs_of(config, torch.float32))
    grouped = run(found[0], *inputs_of(config, torch.float32))
    torch.testing.assert_close(grouped.output, one_by_one.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        grouped.gradients["hidden"], one_by_one.gradients["hidden"], rtol=1e-5, atol=1e-5
    )
    routers = grouped.gradients["router.weight"], one_by_one.gradients["router.weight"]
    torch.testing.assert_close(*routers, rtol=1e-5, atol=1e-5)  # through the rows' weights
    for number in (1, 2):
        together = torch.stack(
            [one_by_one.gradients[f"experts.local_experts.{e}.linear_fc{number}.weight"] for e in range(8)]
        )
        torch.testing.assert_close(
            grouped.gradients[f"experts.linear_fc{number}.weight"], together, rtol=1e-5, atol=1e-5
        )


def test_an_expert_without_tokens_gets_a_gradient_of_zero() -> None:
    for implementation in ("grouped", "sequential"):
        layer, config = layer_of({"experts_impl": implementation, **BIASED})
        layer.router.expert_bias.copy_(torch.tensor([-9.0] * 6 + [0, 0]))
        made = run(layer, *inputs_of(config, torch.float32))
        assert made.counts == [0] * 6 + [64, 64]
        firsts = [
            gradient.flatten(-2).abs().amax(-1).flatten()
            for name, gradient in made.gradients.items()
            if name.endswith("linear_fc1.weight")
        ]
        assert [value > 0 for value in torch.cat(firsts).tolist()] == [False] * 6 + [True] * 2


def test_a_later_token_drops_no_earlier_one() -> None:
    """Capacity depends only on earlier tokens; otherwise the future would leak."""
    layer, config = layer_of({"capacity_factor": 1.0})
    hidden, _ = inputs_of(config, torch.float32)
    before = layer(hidden)[0]
    hidden = hidden.detach().clone()
    hidden[9:] = torch.randn(hidden[9:].shape, generator=torch.Generator().manual_seed(3))
    after = layer(hidden)[0]
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


def test_loads_are_the_shares_of_the_choices_and_biases_move_against_them() -> None:
    group, applied = single_rank().groups.tp_dp_cp, torch.tensor(True)
    counts = torch.tensor([8, 0, 4, 4, 1, 7, 2, 6])
    balanced, _ = layer_of({})
    balanced.router.counts.copy_(counts)
    update_routers([balanced.router], group, applied)
    assert balanced.router.loads.tolist() == (counts / 32).tolist()
    biased, _ = layer_of({**BIASED, "bias_update_rate": 0.5})
    before = biased.router.expert_bias.clone()
    biased.router.counts.copy_(counts)
    update_routers([biased.router], group, applied)
    moved = biased.router.expert_bias - before
    torch.testing.assert_close(moved, 0.5 * torch.tensor([-1.0, 1, 0, 0, 1, -1, 1, -1]))
    for layer in (balanced, biased):
        assert not layer.router.counts.any()
        held = [each.clone() for each in layer.router.balance()]
        layer.router.counts.copy_(counts.flip(0))
        update_routers([layer.router], group, torch.tensor(False))
        assert all(torch.equal(*pair) for pair in zip(held, layer.router.balance(), strict=True))
        assert not layer.router.counts.any()


def test_buffers_and_routing_stay_exact_in_a_model_of_bf16() -> None:
    for moe in (BIASED, {}):
        layer, config = layer_of(moe, precision="bf16")
        assert layer.router.weight.dtype == torch.bfloat16
        assert [each.dtype for each in layer.router.balance()] == [torch.float32]
        assert layer.router.counts.dtype == torch.int64
    hidden, _ = inputs_of(config, torch.bfloat16)
    routing = layer.router(hidden)
    assert routing.weights.dtype == torch.float32
    logits = hidden.flatten(0, 1).float() @ layer.router.weight.float().T
    assert torch.equal(routing.experts, logits.softmax(-1).topk(2).indices)
