"""Compares the router and expert metrics of logged steps with counts token by token."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from gsa_train.metrics.record import (
    Interval,
    Measured,
    attention_metrics,
    data_totals,
    expert_metrics,
    send_step,
    step_record,
)
from gsa_train.metrics.record_format import to_scalars, validation_prefixes
from gsa_train.model.flops import flops_per_token
from gsa_train.model.mcore.build import Model
from gsa_train.model.probes.stats import EXTREMES, MEANS, VECTORS
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.step import evaluation_step
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)

SIZES: dict[str, Any] = {"experts": 8, "expert_ffn_hidden_size": 8, "first_dense_layers": 1}
BALANCED = {**SIZES, "capacity_factor": 1.0}
BIASED = {**SIZES, "balancing": "aux_free", "router_score": "sigmoid", "z_loss_coeff": 0.0}
KEYS = {"router_entropy", "router_z", "expert_loads", "expert_load_max", "expert_load_min"}
SOME = {"router_balance", "dropped_share", "expert_bias_range"}
"""Metrics of some mixtures only."""


class Seen:
    """Holds the inputs and outputs of the second layer's router."""

    def __init__(self, model: Model) -> None:
        (self.router,) = model.routers
        self.logits: list[list[float]] = []
        self.experts: list[list[int]] = []
        self.kept: list[list[bool]] = []
        self.router.register_forward_hook(self._see)

    def _see(self, module: torch.nn.Module, inputs: tuple[torch.Tensor], routing: Any) -> None:
        (hidden,) = inputs
        self.logits += (hidden.detach().flatten(0, 1).double() @ self.router.weight.double().T).tolist()
        self.experts += routing.experts.tolist()
        self.kept += [] if routing.kept is None else routing.kept.tolist()


def by_tokens(seen: Seen, score: str, loads: Any, biases: Any) -> dict[str, float]:
    entropies, z_losses, balance = [], [], []
    for logits in seen.logits:
        z_losses.append(math.log(sum(map(math.exp, logits))) ** 2)
        scores = [math.exp(each) if score == "softmax" else 1 / (1 + math.exp(-each)) for each in logits]
        shares = [each / sum(scores) for each in scores]
        entropies.append(-sum(each * math.log(each) for each in shares))
        if loads is not None:
            balance.append(8 * sum(each * load for each, load in zip(shares, loads, strict=True)))
    counts = Counter(expert for experts in seen.experts for expert in experts)
    mean = sum(counts.values()) / 8
    found = {
        "router_entropy": sum(entropies) / len(entropies),
        "router_z": sum(z_losses) / len(z_losses),
        "expert_load_max": max(counts[expert] for expert in range(8)) / mean,
        "expert_load_min": min(counts[expert] for expert in range(8)) / mean,
    }
    if loads is not None:
        found["router_balance"] = sum(balance) / len(balance)
    if seen.kept:
        dropped = [not kept for of_token in seen.kept for kept in of_token]
        found["dropped_share"] = sum(dropped) / len(dropped)
    if biases is not None:
        found["expert_bias_range"] = max(biases) - min(biases)
    return found


@pytest.mark.parametrize("moe", [BALANCED, BIASED], ids=["balanced", "biased"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_metrics_match_all_tokens(moe: dict[str, Any], recompute: str) -> None:
    """The test compares the second of two layers in the second step, also if layers run twice."""
    config = tiny_config(moe=moe, train={"recompute": recompute})
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    take_step(model, optimizer, random_batches(config, 0), config, lr=1e-2)
    held = (model.routers[0].loads, model.routers[0].expert_bias)
    loads, bias = (None if each is None else each.tolist() for each in held)
    seen = Seen(model)
    take_step(model, optimizer, random_batches(config, 1), config, lr=1e-2, step=1, measures=True)
    found = attention_metrics(model.runtime.stats.read())
    expected = by_tokens(seen, config.moe.router_score, loads, bias)
    assert found.keys() >= KEYS
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
        first, second = found[f"layer_{name}"]
        assert math.isnan(first)
        assert second == found[name]
    assert SOME & found.keys() == SOME & expected.keys()
    assert 0 < found["expert_load_min"] < 1 < found["expert_load_max"]
    first_layer, second_layer = found["expert_loads"]
    assert all(map(math.isnan, first_layer))
    counts = Counter(expert for experts in seen.experts for expert in experts)
    assert second_layer == [round(counts[expert] * 8 / sum(counts.values()), 4) for expert in range(8)]
    if moe is BALANCED:
        assert found["dropped_share"] > 0.05
    close_optimizer(model, optimizer)


@pytest.mark.parametrize("phase", [WARM_UP, DENSE, SPARSE], ids=lambda phase: phase.name)
@pytest.mark.parametrize(("moe", "measures"), [({}, True), (BALANCED, False), (BIASED, True)])
def test_logged_steps_and_validations_measure_experts(phase: Any, moe: Any, measures: bool) -> None:
    config = tiny_config([phase], moe=moe)
    model = tiny_model(config)
    optimizer = build_optimizer(model, phase, config)
    take_step(model, optimizer, random_batches(config), config, lr=1e-3, measures=measures)
    of_step = read_stats(model)
    close_optimizer(model, optimizer)
    evaluation_step(model, random_batches(config), config, single_rank(), measures=measures)
    for found in (of_step, read_stats(model)):
        measured = {name.partition("/")[0] for name in found} & (KEYS | SOME)
        assert measured >= {"router_entropy", "expert_loads"} if moe and measures else measured == set()


def test_operations_of_dropped_choices_do_not_count() -> None:
    config = tiny_config(moe=BALANCED)
    stats, interval = tiny_model(config).runtime.stats, Interval(1, 1000, 1.0, 0.0)
    stats.add("dropped_share", 1, torch.tensor([True, False, False, False]))
    measured = Measured(interval, data_totals=data_totals({}, config.data))
    reduced = send_step(stats, torch.ones(()), 1.0, measured, single_rank())()
    record = step_record(reduced, interval, SPARSE, config, single_rank(), "fp32")
    # One forward and two backward products, multiplication and addition, two experts, three matrices.
    routed = 3 * 2 * 2 * 3 * config.model.hidden_size * config.moe.expert_ffn_hidden_size
    flops = flops_per_token(config.model, config.gsa, config.moe, SPARSE, 16).total - 0.25 * routed
    assert record["tflops_per_second"] == pytest.approx(1000 * flops / 1e12)


def test_loads_have_no_curves() -> None:
    shares = [[None, 0.5], [None, 0.125], [None, 0.25], [None, 0.125]]
    record = {"step": 1, "phase": "sparse", "loss": 3.0, "tokens": 10, **expert_metrics(shares)}
    assert record["expert_loads"][1] == [2.0, 0.5, 1.0, 0.5]
    assert (record["expert_load_max"], record["expert_load_min"]) == (2.0, 0.5)
    scalars = to_scalars(record)
    assert scalars["moe/expert_load_max"] == scalars["moe_layers/expert_load_max/layer_01"] == 2.0
    assert not any("expert_loads" in tag for tag in scalars)


def test_no_statistic_is_taken_for_the_loss_of_a_validation_set() -> None:
    """`validation_<name>_loss` belongs to a set <name>."""
    names = (*MEANS, *EXTREMES, *VECTORS)
    record = {"event": "validation", "validation_set": "web", **{f"validation_{name}": 1.0 for name in names}}
    assert validation_prefixes(record) == {"validation": "web"}
