"""Tests the size of initial weights by kind; tests/distributed/test_many_layouts.py compares ranks that shard them."""

from __future__ import annotations

import dataclasses
import math

import torch

from gsa_train.model.mcore.init import _full_matrix
from helpers.single_rank import named_weights, single_rank, tiny_config, tiny_model

CONFIG = tiny_config(model={"hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 128, "init_std": 0.02})


def test_tied_last_stage_draws_the_embedding_for_its_output_layer() -> None:
    tied = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, tie_embeddings=True))
    embedding = tiny_model(tied).gpt.embedding.word_embeddings.weight
    for name in ("output_layer.weight", "embedding.word_embeddings.weight"):
        assert torch.equal(_full_matrix(name, embedding, tied, single_rank()), embedding)
    assert not torch.equal(_full_matrix("output_layer.weight", embedding, CONFIG, single_rank()), embedding)
    assert "output_layer.weight" not in named_weights(tiny_model(tied))


def test_matrices_have_the_configured_spread_and_output_projections_less() -> None:
    reduced = CONFIG.model.init_std / math.sqrt(2 * CONFIG.model.num_layers)
    kinds = set()
    for name, weight in named_weights(tiny_model(CONFIG)).items():
        if weight.dim() == 1:
            continue
        into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        kinds.add(into_residual)
        expected = reduced if into_residual else CONFIG.model.init_std
        # The standard error of a standard deviation is std / sqrt(2 n).
        assert abs(weight.std() / expected - 1) < 4 / math.sqrt(2 * weight.numel()), name
        assert abs(weight.mean()) < 4 * expected / math.sqrt(weight.numel()), name
    assert kinds == {True, False}


def test_vectors_start_at_their_fixed_values() -> None:
    gsa = {"gate_bias_init": 0.5, "projection_gate": True, "indexer_temperature": "learned"}
    config = tiny_config(model={"qk_norm": True}, gsa=gsa)
    found = set()
    for name, weight in named_weights(tiny_model(config)).items():
        if weight.dim() > 1:
            continue
        *_, module, kind = name.split(".")
        found.add(f"{module}.{kind}")
        expected = 1.0 if "norm" in module else 0.5 if "gate" in module else 0.0
        assert (weight == expected).all(), name
    assert found == {
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "final_layernorm.weight",
        "q_layernorm.weight",
        "k_layernorm.weight",
        "linear_gate.bias",
        "projection_gate.bias",
        "indexer.score_bias",
        "indexer.weight_bias",
        "indexer.log_inverse_temperature",
    }


def test_every_matrix_and_every_seed_has_its_own_draw() -> None:
    weights = named_weights(tiny_model(CONFIG))
    other_seed = named_weights(
        tiny_model(dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, seed=7)))
    )
    matrices = [name for name, weight in weights.items() if weight.dim() > 1]
    starts = {tuple(weights[name].flatten()[:4].tolist()) for name in matrices}
    assert len(starts) == len(matrices)
    assert not any(torch.equal(weights[name], other_seed[name]) for name in matrices)
