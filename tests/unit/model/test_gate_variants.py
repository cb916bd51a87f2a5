"""Compares all forms of gates with their equations in plain fp64 torch: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsa_train.config import Config
from gsa_train.model.flops import count_parameters, flops_per_token
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    DENSE,
    SPARSE,
    random_batches,
    read_stats,
    tiny_config,
    tiny_model,
    token_losses,
)

LENGTH, HEADS, KV_HEADS, D_K, HIDDEN = 11, 4, 2, 4, 12
NONE = {"value_gate": False, "output_gate": False}
ONLY = {
    "G1": {"value_gate": False}, "G2": {"output_gate": False}, "G3": {**NONE, "key_gate": True},
    "G4": {**NONE, "query_gate": True}, "G5": {**NONE, "projection_gate": True},
}  # fmt: skip
ON_HEADS = {"key_gate": True, "query_gate": True}
ALL = {**ON_HEADS, "projection_gate": True}
HEADWISE = {"gate_granularity": "headwise"}
SHARED = {"gate_sharing": "head_shared"}
INDEPENDENT = {"gate_input": "input_independent"}
VARIANTS: dict[str, dict[str, Any]] = {
    **ONLY,
    "all five": ALL,
    "headwise": {**ON_HEADS, **HEADWISE},
    "head-shared": {**ON_HEADS, **SHARED},
    "headwise and head-shared": {**ON_HEADS, **HEADWISE, **SHARED},
    "additive SiLU": {**ALL, "gate_form": "additive", "gate_activation": "silu"},
    "additive identity": {**ONLY["G1"], "gate_form": "additive", "gate_activation": "identity"},
    "NS-sigmoid": {**ALL, "gate_activation": "ns_sigmoid"},
    "SiLU": {**ALL, "gate_activation": "silu"},
    "identity": {**ONLY["G1"], "gate_activation": "identity"},
    "input-independent": {**ALL, **INDEPENDENT},
    "input-independent, head-shared": {**ON_HEADS, **INDEPENDENT, **SHARED},
    "RMSNorm": {**NONE, "output_transform": "rms_norm"},
    "SiLU without a gate": {**NONE, "output_transform": "silu"},
}


def config_of(gsa: dict[str, Any], model: dict[str, Any] | None = None, sparse: bool = False) -> Config:
    """Return a config with one layer, dense or with an indexer that selects every key."""
    if sparse:
        gsa = {**gsa, "k_base": LENGTH, "k_max": LENGTH, "adaptive_k": "off"}
    return tiny_config(
        [SPARSE if sparse else DENSE],
        gsa={"attention": "sparse" if sparse else "dense", **gsa},
        model={"num_layers": 1, "hidden_size": HIDDEN, **(model or {})},
        train={"seq_len_tokens": LENGTH},
    )


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    **{name: (gsa, {}, False) for name, gsa in VARIANTS.items()},
    "keys and queries after their norms": ({**NONE, **ON_HEADS, **HEADWISE}, {"qk_norm": True}, False),
    **{f"sparse, {name}": (VARIANTS[name], {}, True) for name in ("G5", "headwise", "RMSNorm")},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_its_equations(name: str) -> None:
    config = config_of(*LAYERS[name])
    model = tiny_model(config)
    layer = model.attentions[0].double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    enter_phase(model, config.phases[0])
    h, cotangent = torch.randn(2, 2, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    rates = 100.0 ** (-torch.arange(0, D_K, 2, dtype=torch.float64) / D_K)
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), rates).repeat(1, 2)

    ours = h.clone().requires_grad_()
    out, bias = layer(ours.transpose(0, 1), None, angles[:, None, None])
    assert bias is None
    out.transpose(0, 1).backward(cotangent)

    theirs = h.clone().requires_grad_()
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in layer.named_parameters()
        if not name.startswith("indexer.")
    }
    expected = straight_line(theirs, weights, config, angles)
    expected.backward(cotangent)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(out.transpose(0, 1).detach(), expected.detach(), **close)
    torch.testing.assert_close(ours.grad, theirs.grad, **close)
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert weight.grad.abs().max() > 1e-3, name
        torch.testing.assert_close(layer.get_parameter(name).grad, weight.grad, **close)


def straight_line(
    h: torch.Tensor, w: dict[str, torch.Tensor], config: Config, angles: torch.Tensor
) -> torch.Tensor:
    """Compute the layer's result [B, L, d] by the equations of arXiv 2505.06708, section 2."""
    g, group = config.gsa, HEADS // KV_HEADS
    qkv = (h @ w["linear_qkv.weight"].T).unflatten(-1, (KV_HEADS, group + 2, D_K))
    q, k, v = qkv[..., :group, :].flatten(2, 3), qkv[..., group, :], qkv[..., group + 1, :]
    logits = logits_on_heads(h, w, config)

    def gate(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        score = {
            "sigmoid": 1 / (1 + torch.exp(-x)),
            "silu": x / (1 + torch.exp(-x)),
            "ns_sigmoid": 0.5 + 0.5 / (1 + torch.exp(-x)),
            "identity": x,
        }[g.gate_activation]
        return y * score if g.gate_form == "multiplicative" else y + score

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.model.norm_epsilon).sqrt() * weight

    if config.model.qk_norm:
        q, k = norm(q, w["q_layernorm.weight"]), norm(k, w["k_layernorm.weight"])
    if g.value_gate:
        v = gate(v, logits["value"])
    if g.key_gate:
        k = gate(k, logits["key"])
    if g.query_gate:
        q = gate(q, logits["query"])
    half, cos, sin = D_K // 2, angles.cos()[:, None], angles.sin()[:, None]
    q, k = (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthc,bshc->bhts", q, k) / D_K**0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhts,bshc->bthc", scores.softmax(-1), v)
    if g.output_gate:
        out = gate(out, logits["output"])
    if g.output_transform == "rms_norm":
        out = norm(out, w["output_layernorm.weight"])
    if g.output_transform == "silu":
        out = out / (1 + torch.exp(-out))
    result = out.flatten(2) @ w["linear_proj.weight"].T
    if g.projection_gate:
        x = w["projection_gate.bias"].expand_as(result)
        if g.gate_input == "query_dependent":
            x = x + h @ w["projection_gate.weight"].T
        result = gate(result, x)
    return result


def logits_on_heads(h: torch.Tensor, w: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Slice each gate's logits [B, L, heads, channels] out of the parameters head by head."""
    g = config.gsa
    shared, size = g.gate_sharing == "head_shared", 1 if g.gate_granularity == "headwise" else D_K
    groups, group = (1, 1) if shared else (KV_HEADS, HEADS // KV_HEADS)
    widths = {"value": 1, "output": group, "key": 1, "query": group}
    names = [name for name in widths if getattr(g, f"{name}_gate")]
    if not names:
        return {}
    independent = g.gate_input == "input_independent"
    prefix = "head_gate" if shared or independent else "linear_gate"
    x = w[f"{prefix}.bias"].expand(*h.shape[:2], -1)
    if not independent:
        x = x + h @ w[f"{prefix}.weight"].T
    start = {name: sum(widths[before] for before in names[: names.index(name)]) for name in names}
    per_group = x.unflatten(-1, (groups, sum(widths[name] for name in names), size))
    return {name: per_group[..., start[name] : start[name] + widths[name], :].flatten(2, 3) for name in names}


def test_sandwich_norm_norms_what_the_residual_stream_gets() -> None:
    config = config_of({}, {"sandwich_norm": True})
    model = tiny_model(config)
    layer = model.gpt.decoder.layers[0].double()
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in norms:
            weight = layer.get_parameter(f"{name}.weight")
            assert weight.eq(1).all()
            weight.copy_(torch.rand(HIDDEN, generator=generator, dtype=torch.float64) + 0.5)
    enter_phase(model, DENSE)
    h = torch.randn(LENGTH, 2, HIDDEN, generator=generator, dtype=torch.float64)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.model.norm_epsilon).sqrt()
        return x / scale * layer.get_parameter(f"{name}.weight")

    out, _ = layer(h, attention_mask=None, rotary_pos_emb=None)
    attended, _ = layer.self_attention(norm(h, norms[0]), None, None)
    stream = h + norm(attended, norms[1])
    first, second = (norm(stream, norms[2]) @ layer.mlp.linear_fc1.weight.T).chunk(2, -1)
    made = (first * first.sigmoid() * second) @ layer.mlp.linear_fc2.weight.T
    torch.testing.assert_close(out, stream + norm(made, norms[3]), rtol=1e-9, atol=1e-11)


# --- what counts, starts, decays and leaves ----------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted(name: str) -> None:
    config = config_of(VARIANTS[name], {"sandwich_norm": True})
    model = tiny_model(config)
    count = count_parameters(config.model, config.gsa, config.moe)
    assert count.total == sum(parameter.numel() for parameter in model.gpt.parameters())
    gates = [p for p in model.gpt.parameters() if getattr(p, "gsa_gate", False)]
    assert count.gates == sum(parameter.numel() for parameter in gates)
    products = sum(parameter.numel() for parameter in gates if parameter.dim() == 2)
    assert flops_per_token(config.model, config.gsa, config.moe, DENSE, LENGTH).gates == 3 * 2 * products


def test_statistics_of_bounded_gates_alone() -> None:
    for activation, low in (("ns_sigmoid", 0.0), ("silu", None)):
        config = tiny_config([DENSE], gsa={"attention": "dense", "gate_activation": activation, **HEADWISE})
        model = tiny_model(config)
        enter_phase(model, DENSE)
        token_losses(model, random_batches(config)[0], measuring=True)
        stats = read_stats(model)
        if low is None:
            assert not any("gate" in name for name in stats)
        else:
            assert stats["output_gate_low"] == [low, low]
            assert all(0.5 < mean < 1 for mean in stats["value_gate_mean"])
