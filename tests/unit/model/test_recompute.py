"""Tests that recomputation in the backward pass changes memory, but no number."""

import weakref
from typing import Any

import pytest
import torch

from gsa_train.config import PhaseConfig
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    step_gradients,
    tiny_config,
    tiny_model,
    token_losses,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "reuse": {"selection_reuse": 2},
    "window": {"local_window": 5},
    "gated-only": {"attention": "dense"},
    "sparse-only": {"indexer_activation": "relu", "value_gate": False, "output_gate": False},
    "learned temperature": {"indexer_temperature": "learned"},
    "experts": {},
    "experts with biases": {},
}
BALANCED = {"experts": 8, "expert_ffn_hidden_size": 8, "shared_expert_ffn_hidden_size": 8}
BIASED = {**BALANCED, "balancing": "aux_free", "router_score": "sigmoid"}
MOE = {"experts": BALANCED, "experts with biases": BIASED}
DENSE_ALL = PhaseConfig(attention="dense", train="all")


def one_step(
    variant: str, recompute: str, phase: PhaseConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, list[float]], list[torch.Tensor]]:
    """Return loss, gradients, statistics, and moving averages and balances of one logged step."""
    gsa = VARIANTS[variant]
    phase = DENSE_ALL if gsa.get("attention") == "dense" else phase
    config = tiny_config(
        [phase],
        model={"num_layers": 4},
        gsa=gsa,
        moe=MOE.get(variant, {}),
        train={"recompute": recompute, "recompute_num_layers": gsa.get("selection_reuse", 1)},
    )
    model = tiny_model(config, variance_ema=0.02)
    result, gradients = step_gradients(model, phase, random_batches(config), config, measures=True)
    averages = [a.variance.ema.clone() for a in model.attentions if a.variance is not None]
    averages += [held.clone() for router in model.routers for held in router.balance()]
    return result.loss_sum, gradients, read_stats(model), averages


@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=lambda phase: phase.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_gradients_and_statistics_are_bitwise_the_same(variant: str, phase: PhaseConfig) -> None:
    loss, gradients, stats, averages = one_step(variant, "none", phase)
    assert all(gradient.any() for gradient in gradients.values())
    for recompute in ("selective", "full"):
        again = one_step(variant, recompute, phase)
        assert torch.equal(again[0], loss)
        assert again[1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(again[1][name], gradient), f"{recompute}: {name}"
        assert repr(again[2]) == repr(stats)  # as text: NaN of a layer without indexer equals itself
        assert all(torch.equal(*pair) for pair in zip(again[3], averages, strict=True))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_selections_go_with_the_backward_pass_though_the_loss_stays(recompute: str) -> None:
    """Long sequences have large lists, and the schedule holds the loss into the next micro-batch."""
    config = tiny_config([SPARSE], train={"recompute": recompute})
    model = tiny_model(config)
    enter_phase(model, SPARSE)
    selections: list[weakref.ref[torch.Tensor]] = []
    for attention in model.attentions:
        attention.register_forward_hook(
            lambda *_: selections.append(weakref.ref(model.runtime.shared_selection[0]))
        )
    loss = token_losses(model, random_batches(config)[0]).mean()
    assert model.runtime.shared_selection is None
    if recompute == "selective":
        assert all(selection() is not None for selection in selections)
    loss.backward()
    assert len(selections) == config.model.num_layers
    assert all(selection() is None for selection in selections)


def test_recomputed_layers_make_no_rotary_tables_of_their_own() -> None:
    """Recomputation detaches its input angles. Tables that the layers share live as long as the model."""
    runtime, angles = tiny_model(tiny_config([SPARSE])).runtime, torch.randn(6, 1, 1, 8)
    tables = runtime.rotary_tables(angles, 1.0)
    assert all(a is b for a, b in zip(runtime.rotary_tables(angles.detach(), 1.0), tables, strict=True))
    for other, magnitude in ((angles, 1.25), (angles.clone(), 1.0), (angles[:4], 1.0)):
        assert runtime.rotary_tables(other, magnitude)[0] is not tables[0]
