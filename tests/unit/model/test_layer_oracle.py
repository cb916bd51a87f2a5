"""Compares GSASelfAttention, as the model builds it, with the looped oracle in fp64: values and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import oracle
import pytest
import torch
from oracle import LayerOptions, Yarn, random_weights

from gsa_train.config import Config, PhaseConfig, RopeScalingConfig
from gsa_train.model.gsa_attention import GSASelfAttention
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.phases import enter_phase
from helpers.single_rank import DENSE, SPARSE, WARM_UP, read_stats, shared_mask, tiny_config, tiny_model

LENGTH = 13
PACKED = [[0] * 4 + [1] * 6 + [2] * 3, [0] * 5 + [1] * 8]
VARIANCE_EMA = 0.014
KL_SCALE = 0.37
NO_GATES = {"value_gate": False, "output_gate": False}


# One pair of channels is slowed down by half of the factor: the second of a head's two, and one of the indexer's three.
YARN = RopeScalingConfig("yarn", 4.0, 16, beta_fast=3.0, beta_slow=0.2, attention_factor=1.2)


@dataclass(frozen=True)
class Case:
    gsa: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    packing: list[list[int]] | None = None
    phase: PhaseConfig = SPARSE
    ema: float = VARIANCE_EMA
    log_inverse_temperature: float | None = None


CASES = {
    "GSA": Case(),
    "GSA, packed": Case(packing=PACKED),
    "GSA, first step": Case(ema=0.0),
    "budget of eq. 8 to the letter": Case({"adaptive_k": "direct"}, packing=PACKED),
    "standard": Case({"attention": "dense", **NO_GATES}, phase=DENSE),
    "gated-only, packed": Case({"attention": "dense"}, phase=DENSE, packing=PACKED),
    "sparse-only": Case({"indexer_activation": "relu", "adaptive_k": "off", **NO_GATES}),
    "one key-value head": Case(model={"num_kv_heads": 1}),
    "as many key-value heads": Case(model={"num_kv_heads": 4}, packing=PACKED),
    "indexer rope": Case({"indexer_rope": True}, model={"rope_base": 100.0}),
    "indexer norm, rope, packed": Case(
        {"indexer_norm": True, "indexer_rope": True},
        model={"rope_base": 100.0, "norm_epsilon": 0.01},
        packing=PACKED,
        ema=2e-5,
    ),
    "indexer norm, warm-up": Case({"indexer_norm": True}, phase=WARM_UP),
    "plain": Case({"indexer_activation": "plain"}, packing=PACKED),
    "qsa": Case({"indexer_activation": "qsa", "adaptive_k": "off"}, packing=PACKED),
    "dense below, packed": Case({"dense_below": 7}, packing=PACKED),
    "dense below, window": Case({"dense_below": 9, "local_window": 4}),
    "YaRN": Case({"indexer_rope": True}, model={"rope_base": 100.0, "rope_scaling": YARN}),
    "window, packed": Case({"local_window": 3}, packing=PACKED),
    "learned temperature": Case({"indexer_temperature": "learned"}, log_inverse_temperature=0.75),
    "fixed temperature": Case({"indexer_temperature": 8.0}),
    "warm-up": Case(phase=WARM_UP),
    "warm-up, packed": Case(phase=WARM_UP, packing=PACKED),
    "dense, all trained": Case(
        phase=PhaseConfig(attention="dense", train="all"), packing=PACKED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_oracle(name: str) -> None:
    case = CASES[name]
    config = tiny_config(
        [case.phase],
        gsa=case.gsa,
        model={"num_layers": 1, "hidden_size": 12, **case.model},
        train={"seq_len_tokens": LENGTH},
    )
    model = tiny_model(config, case.ema)
    layer = model.attentions[0].double()
    log_beta = torch.tensor(case.log_inverse_temperature or 0.0, dtype=torch.float64, requires_grad=True)
    options = oracle_options(config, case, log_beta)
    weights = random_weights(options, config.model.hidden_size, seed=7)
    load_weights(layer, weights, log_beta, config)
    enter_phase(model, case.phase)
    generator = torch.Generator().manual_seed(11)
    h, cotangent = torch.randn(2, 2, LENGTH, 12, dtype=torch.float64, generator=generator)

    ours_h = h.clone().requires_grad_()
    ours = run_layer(model, layer, ours_h, case, cotangent)

    theirs_h = h.clone().requires_grad_()
    rows = [oracle.gsa_layer(theirs_h[b], weights, options, case.packing and case.packing[b]) for b in (0, 1)]
    theirs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    # values
    assert_close(ours, theirs["out"], "out")
    stats = read_stats(model)
    has_indexer = layer.indexer is not None
    if has_indexer:
        assert torch.equal(shared_mask(model), theirs["selected"])
        visible = torch.tensor([seen(case, b) for b in (0, 1)])
        counted = int((visible >= 2).sum())
        assert 0 < counted < visible.numel()
        assert_close(layer.variance.step_sum, theirs["variance"].sum(), "variance")
        assert stats["variance"][0] == pytest.approx(theirs["variance"].sum().item() / counted, rel=1e-9)
        assert stats["indexer_kl"][0] == pytest.approx(theirs["kl"].sum().item() / counted, rel=1e-9)
        budget = theirs["budget"].double()
        chosen = budget[budget < visible]
        if case == Case():  # queries leave keys out, and different numbers of them
            assert len(chosen.unique()) >= 3
        assert stats["k_mean"][0] == pytest.approx(chosen.mean().item(), rel=1e-12)
        assert (stats["k_min"][0], stats["k_max"][0]) == (chosen.min(), chosen.max())
        assert stats["dense_query_share"][0] == pytest.approx(1 - len(chosen) / counted, rel=1e-12)
    else:
        assert not {"indexer_kl", "variance", "k_mean"} & stats.keys()

    # gradients of the language model's side
    base = {"h": theirs_h, **{k: w for k, w in weights.items() if k not in INDEXER}}
    grads = dict(zip(base, torch.autograd.grad(theirs["out"], list(base.values()), cotangent), strict=True))
    parameters = dict(layer.named_parameters())
    fused = fused_base(grads, config)
    if case.phase.train == "indexer":
        assert ours_h.grad is None
        assert all(parameters[k].grad is None for k in fused)
    else:
        assert_close(ours_h.grad, grads["h"], "d out / d h")
        for key, expected in fused.items():
            assert_close(parameters[key].grad, expected, f"d out / d {key}")

    # gradients of the indexer loss
    trained = {k: w for k, w in weights.items() if k in INDEXER} if has_indexer else {}
    if case.log_inverse_temperature is not None:
        trained["log_beta"] = log_beta
    assert {f"indexer.{INDEXER[k]}" for k in trained} | fused.keys() == parameters.keys()
    for key in trained:
        (expected,) = torch.autograd.grad(theirs["kl"].sum(), trained[key], retain_graph=True)
        actual = parameters[f"indexer.{INDEXER[key]}"].grad
        tolerance = 1e-6 if key == "log_beta" else 1e-9  # beta is fp32
        assert_close(actual.reshape(expected.shape), KL_SCALE * expected, f"d KL / d {key}", tolerance)


def seen(case: Case, sequence: int) -> list[int]:
    documents = case.packing[sequence] if case.packing else [0] * LENGTH
    return [sum(documents[s] == documents[t] for s in range(t + 1)) for t in range(LENGTH)]


# --- between the oracle's weights and the layer's ---------------------------------------------------------

INDEXER = {
    "w_iq": "query_weight", "w_ik": "key_weight", "w_iw": "head_weight", "b_j": "score_bias",
    "c_j": "weight_bias", "n_iq": "query_norm_weight", "n_ik": "key_norm_weight",
    "log_beta": "log_inverse_temperature",
}  # fmt: skip


def oracle_options(config: Config, case: Case, log_beta: torch.Tensor) -> LayerOptions:
    m, g = config.model, config.gsa
    # The layer keeps its average, and beta = exp(log beta), in fp32.
    beta = log_beta.float().exp().double() if g.indexer_temperature == "learned" else g.indexer_temperature
    named = {**vars(m), **vars(g)}
    others: dict[str, Any] = {
        "attention": case.phase.attention,
        "variance_ema": torch.tensor(case.ema).item(),
        "yarn": Yarn(4.0, 16, 1.2, 3.0, 0.2) if m.rope_scaling == YARN else None,
        "inverse_temperature": beta,
    }
    same = {each.name for each in fields(LayerOptions)} - others.keys()
    return LayerOptions(**{name: named[name] for name in same}, **others)


def fused_base(w: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return matrices (or gradients) of the base as the layer stores them: row blocks per key-value head."""
    m = config.model
    r = m.num_heads // m.num_kv_heads

    def rows(name: str, first_head: int, heads: int) -> list[torch.Tensor]:
        return [w[name][first_head * m.head_dim : (first_head + heads) * m.head_dim]] if name in w else []

    groups = range(m.num_kv_heads)
    qkv = [x for g in groups for x in rows("w_q", g * r, r) + rows("w_k", g, 1) + rows("w_v", g, 1)]
    gate = [x for g in groups for x in rows("w_vg", g, 1) + rows("w_og", g * r, r)]
    bias = [x for g in groups for x in rows("b_vg", g, 1) + rows("b_og", g * r, r)]
    fused = {"linear_qkv.weight": torch.cat(qkv), "linear_proj.weight": w["w_o"]}
    if gate:
        fused |= {"linear_gate.weight": torch.cat(gate), "linear_gate.bias": torch.cat(bias)}
    return fused


@torch.no_grad()
def load_weights(
    layer: GSASelfAttention, weights: dict[str, torch.Tensor], log_beta: torch.Tensor, config: Config
) -> None:
    parameters = dict(layer.named_parameters())
    for name, value in fused_base(weights, config).items():
        parameters[name].copy_(value)
    if layer.indexer is None:
        return
    for ours, theirs in INDEXER.items():
        if f"indexer.{theirs}" in parameters:
            parameters[f"indexer.{theirs}"].copy_(log_beta if ours == "log_beta" else weights[ours])
    if layer.indexer.rotary is not None:  # its frequencies are fp32
        layer.indexer.rotary.inv_freq = frequencies(config.gsa.indexer_dim, layer.config)


# --- running the layer ------------------------------------------------------------------------------------


def run_layer(
    model: Model, layer: GSASelfAttention, h: torch.Tensor, case: Case, cotangent: torch.Tensor
) -> torch.Tensor:
    """Run one training pass, forward and backward, as a step does; h and the result are [B, L, d]."""
    runtime = model.runtime
    warm_up = case.phase.train == "indexer"
    runtime.attention_pass = replace(
        runtime.attention_pass, measuring=True, kl_grad_scale=KL_SCALE, base_has_graph=not warm_up
    )
    documents = None if case.packing is None else torch.tensor(case.packing)
    angles = torch.outer(
        torch.arange(LENGTH, dtype=torch.float64), frequencies(layer.config.kv_channels, layer.config)
    )
    with torch.set_grad_enabled(not warm_up):
        out, bias = layer(h.transpose(0, 1), documents, torch.cat([angles, angles], -1)[:, None, None])
    assert bias is None
    out = out.transpose(0, 1)
    if not warm_up:
        out.backward(cotangent)
    return out.detach()


def frequencies(dim: int, config: GSATransformerConfig) -> torch.Tensor:
    rates = config.rotary_base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return rates if config.yarn is None else config.yarn.scaled(rates, config.rotary_base)


def assert_close(
    actual: torch.Tensor | None, expected: torch.Tensor, what: str, tolerance: float = 1e-9
) -> None:
    """Check equality up to a fraction of the largest entry."""
    assert actual is not None, what
    assert actual.shape == expected.shape, what
    largest = expected.abs().max()
    assert largest > 0, f"{what}: nothing to compare"
    error = (actual - expected).abs().max()
    assert error <= tolerance * largest, f"{what}: off by {error:.2e} of {largest:.2e}"
