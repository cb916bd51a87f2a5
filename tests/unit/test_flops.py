"""Compares the count of parameters with real models, and operations with counts per query and key."""

import dataclasses

import pytest
import torch

from gsa_kernels.sampling import STRETCH_ROWS, sample_rows
from gsa_train.config import GSAConfig, ModelConfig, MoEConfig, PhaseConfig
from gsa_train.model.flops import (
    causal_mean_keys,
    count_parameters,
    flops_per_token,
    mean_selected_keys,
    peak_flops_per_second,
)
from helpers.single_rank import CONFIG, tiny_model

MODEL = ModelConfig(
    num_layers=4, hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=4, ffn_hidden_size=40, vocab_size=100
)
GSA = GSAConfig(indexer_heads=3, indexer_dim=8, k_base=5, k_min=2, k_max=9)
DENSE = MoEConfig()
WIDTHS = {"expert_ffn_hidden_size": 10, "shared_expert_ffn_hidden_size": 14}
EXPERTS = MoEConfig(experts=6, top_k=2, first_dense_layers=1, layer_interval=2, **WIDTHS)
"""In layers 1 and 3 of four."""
LENGTH = 23


VARIANTS = [
    (MODEL, GSA, EXPERTS),
    (MODEL, GSA, DENSE),
    (dataclasses.replace(MODEL, qk_norm=True, tie_embeddings=True), GSA, DENSE),
    (dataclasses.replace(MODEL, qkv_bias=True), GSA, DENSE),
    (MODEL, dataclasses.replace(GSA, indexer_activation="relu", value_gate=False, output_gate=False), DENSE),
    (MODEL, dataclasses.replace(GSA, indexer_temperature="learned", selection_reuse=2), DENSE),
    (MODEL, dataclasses.replace(GSA, attention="dense", output_gate=False), DENSE),
    (MODEL, dataclasses.replace(GSA, indexer_activation="plain", indexer_norm=True), DENSE),
    (MODEL, dataclasses.replace(GSA, indexer_activation="qsa"), DENSE),
    (MODEL, dataclasses.replace(GSA, local_window=6), DENSE),
]


PARTS = {
    **{name: name for name in ("router", "shared_experts", "experts", "indexer", "embedding")},
    "linear_fc": "mlp",
    "gate": "gates",
    "norm": "norms",
    "linear_": "attention",
    "output_layer": "output",
}
"""A part of a parameter's name (the first one that fits) -> field of the count."""


@pytest.mark.parametrize(("model", "gsa", "moe"), VARIANTS)
def test_parameters_match_the_model(model, gsa, moe):
    sequential = dataclasses.replace(moe, experts_impl="sequential")
    built = dataclasses.replace(CONFIG, model=model, gsa=gsa, moe=sequential)
    expected = dict.fromkeys((*PARTS.values(), "idle"), 0)
    for name, parameter in tiny_model(built).gpt.named_parameters():
        expected[next(field for part, field in PARTS.items() if part in name)] += parameter.numel()
    if moe.experts:
        expected["idle"] = expected["experts"] * (moe.experts - moe.top_k) // moe.experts
    count = count_parameters(model, gsa, moe)
    assert dataclasses.asdict(count) == expected
    assert count.total == sum(expected.values()) - expected["idle"]
    assert count.active == count.total - expected["idle"]
    assert count.overhead == expected["gates"] + expected["indexer"]
    assert count.overhead_percent == pytest.approx(100 * count.overhead / (count.total - count.overhead))


# ---- operations


def brute_force(
    model: ModelConfig, gsa: GSAConfig, moe: MoEConfig, phase: PhaseConfig, starts: list[int] | None = None
) -> dict[str, float]:
    """Count twice the multiply-adds of one sequence, query by query, divided by the tokens.

    Args:
        starts: start of each query's document; None: one document.
    """
    starts = starts or [0] * LENGTH
    d, n_h, n_kv, d_k = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    heads, dim = gsa.indexer_heads, gsa.indexer_dim
    forward = dict.fromkeys(("projections", "gates", "mlp", "router", "experts", "output", "attention"), 0)
    indexer = dict.fromkeys(("indexer_projections", "indexer_scores"), 0)
    learned_scores = target = dense = 0
    for query in range(LENGTH):
        visible = set(range(starts[query], query + 1))
        # The indexer may select any k_base keys; the oldest overlap the window least.
        chosen = set(range(starts[query], query + 1)[: gsa.k_base])
        selected = visible & (chosen | {s for s in visible if query - s < gsa.local_window})
        attended = selected if phase.attention == "sparse" else visible
        forward["output"] += d * model.vocab_size
        for layer in range(model.num_layers):
            forward["projections"] += d * n_h * d_k + 2 * d * n_kv * d_k + n_h * d_k * d
            forward["gates"] += gsa.value_gate * d * n_kv * d_k + gsa.output_gate * d * n_h * d_k
            if moe.experts and layer in (1, 3):
                forward["router"] += d * moe.experts
                forward["experts"] += moe.top_k * 3 * d * moe.expert_ffn_hidden_size
                forward["experts"] += 3 * d * moe.shared_expert_ffn_hidden_size
            else:
                forward["mlp"] += 3 * d * model.ffn_hidden_size
            forward["attention"] += sum(2 * n_h * d_k for _ in attended)
            dense += sum(2 * n_h * d_k for _ in visible)
            owns = gsa.attention == "sparse" and layer % gsa.selection_reuse == 0
            if not owns or (phase.attention == "dense" and phase.train == "base"):
                continue
            weighted = gsa.indexer_activation in ("sigmoid", "relu")
            indexer["indexer_projections"] += d * dim + d * heads * dim + weighted * d * heads
            indexer["indexer_scores"] += sum(heads * dim + heads for _ in visible)
            learned_scores += sum(heads * dim + heads for _ in attended)
            target += n_h * d_k * len(attended)

    base = 1 if phase.train == "indexer" else 3
    learns = phase.train != "base"
    counts = {part: base * number for part, number in forward.items()}
    counts["indexer_projections"] = (3 if learns else 1) * indexer["indexer_projections"]
    counts["indexer_scores"] = indexer["indexer_scores"] + (2 * learned_scores if learns else 0)
    counts["kl_target"] = target if learns else 0
    counts["dense_equivalent"] = 3 * (sum(forward.values()) - forward["attention"] + dense)
    return {part: 2 * number / LENGTH for part, number in counts.items()}


PHASES = [PhaseConfig(attention="dense", train=train) for train in ("indexer", "base", "all")]
PHASES += [PhaseConfig(attention="sparse", train=train) for train in ("all", "base")]


RUNS = [
    (model, gsa, moe, phase)
    for model, gsa, moe in VARIANTS
    for phase in PHASES
    if gsa.attention == "sparse" or (phase.attention == "dense" and phase.train != "indexer")
]


SAMPLED = [(6 * STRETCH_ROWS, 0.3333), (2 * STRETCH_ROWS, 0.25), (STRETCH_ROWS, 0.5)]


@pytest.mark.parametrize(
    ("length", "fraction"), SAMPLED, ids=["of stretches", "fewer stretches than n", "one stretch"]
)
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_an_indexer_loss_of_some_queries_costs_in_proportion(length, fraction, attention):
    whole = dataclasses.replace(GSA, local_window=6, k_base=10**6)
    gsa = dataclasses.replace(whole, indexer_loss_row_fraction=fraction)
    phase = PhaseConfig(attention=attention, train="all")
    draws = {sample_rows(length, fraction, seed)[0] for seed in range(50)}
    rows = torch.arange(1, length + 1).double()  # keys of each query
    taken = sum(rows[draw.rows()].sum().item() for draw in draws) / len(draws)

    count, full = (flops_per_token(MODEL, each, DENSE, phase, length) for each in (gsa, whole))
    select_only = flops_per_token(MODEL, whole, DENSE, PhaseConfig(attention="sparse", train="base"), length)
    assert count.kl_target == pytest.approx(full.kl_target * taken / rows.sum().item())
    gradients = full.indexer_scores - select_only.indexer_scores
    share = len(torch.cat([draw.rows() for draw in draws])) / len(draws) / len(rows)
    assert count.indexer_scores == pytest.approx(select_only.indexer_scores + gradients * share)
    unchanged = {"kl_target": 0, "indexer_scores": 0}
    assert dataclasses.replace(count, **unchanged) == dataclasses.replace(full, **unchanged)


def test_queries_with_few_keys_select_all_of_them():
    few = dataclasses.replace(GSA, dense_below=8)
    assert mean_selected_keys(few, ONE_DOCUMENT[:, :9].tolist()) == (1 + 2 + 3 + 4 + 5 + 6 + 7 + 5 + 5) / 9


# ---- documents

ONE_DOCUMENT = torch.arange(1, LENGTH + 1)[None]
STARTS = [0] * 9 + [9] * 12 + [21] * 2
"""Three documents."""
THREE_DOCUMENTS = ONE_DOCUMENT - torch.tensor([STARTS])


@pytest.mark.parametrize(("model", "gsa", "moe", "phase"), RUNS)
def test_operations_match_the_loops_also_where_documents_end(model, gsa, moe, phase):
    selected = mean_selected_keys(gsa, THREE_DOCUMENTS.tolist())
    visible = float(THREE_DOCUMENTS.double().mean())
    assert visible == (9 * 10 / 2 + 12 * 13 / 2 + 3) / LENGTH
    count = flops_per_token(model, gsa, moe, phase, LENGTH, selected, visible)
    assert dataclasses.asdict(count) == pytest.approx(brute_force(model, gsa, moe, phase, STARTS))
    whole, expected = flops_per_token(model, gsa, moe, phase, LENGTH), brute_force(model, gsa, moe, phase)
    assert dataclasses.asdict(whole) == pytest.approx(expected)
    assert whole.total == pytest.approx(sum(expected.values()) - expected["dense_equivalent"])
    assert count.dense_equivalent < whole.dense_equivalent
    assert count.total < whole.total
    assert flops_per_token(model, gsa, moe, phase, LENGTH, mean_visible=causal_mean_keys(LENGTH)) == whole


def test_peaks_are_known_or_none():
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops_per_second("NVIDIA B200", "fp32") is None
    for unknown in ("", "cpu", "NVIDIA H20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_flops_per_second(unknown, "bf16") is None
