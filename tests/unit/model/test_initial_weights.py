"""Initial weights: their size by kind, and that another parallel layout starts the same model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from gsa_train.model.mcore.init import _full_matrix, _local_part, global_named_parameters, initialize_weights
from helpers.single_rank import named_weights, single_rank, tiny_config, tiny_model

CONFIG = tiny_config(model={"hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 128, "init_std": 0.02})

# dimension and stride by which tensor parallelism splits each matrix
SPLITS = {
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_gate.weight": (0, 1),
    "linear_gate.bias": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
}


def split_of(name: str) -> tuple[int, int] | None:
    return next((split for ending, split in SPLITS.items() if name.endswith(ending)), None)


def tensor_parallel_parts(
    parameter: torch.nn.Parameter, name: str, ranks: int
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """For each rank of a split model: its parameter, as megatron-core would make it, and its initial value."""
    for rank in range(ranks):
        parallel = dataclasses.replace(single_rank(), tensor_rank=rank, tensor_size=ranks)
        shape = list(parameter.shape)
        if parameter.tensor_model_parallel:
            shape[parameter.partition_dim] //= ranks
        local = torch.nn.Parameter(torch.zeros(shape))
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(local, attribute, getattr(parameter, attribute))
        yield local, _local_part(_full_matrix(name, local, CONFIG, parallel), local, parallel)


def test_megatron_marks_what_tensor_parallelism_splits() -> None:
    for name, parameter in tiny_model(CONFIG).gpt.named_parameters():
        split = split_of(name)
        assert getattr(parameter, "tensor_model_parallel", False) == (split is not None), name
        if split is not None:
            assert (parameter.partition_dim, parameter.partition_stride) == split, name


def test_tensor_parallel_parts_make_up_the_unsplit_matrix() -> None:
    ranks = 2
    for name, parameter in tiny_model(CONFIG).gpt.named_parameters():
        split = split_of(name)
        if split is None or parameter.dim() == 1:
            continue
        parts = [value for _, value in tensor_parallel_parts(parameter, name, ranks)]
        dim, stride = split
        # stride 2: every rank holds a part of the gate's half and a part of the value's half
        pieces = [part.chunk(stride, dim) for part in parts]
        whole = torch.cat([pieces[rank][half] for half in range(stride) for rank in range(ranks)], dim)
        assert torch.equal(whole, parameter), name
        assert not torch.equal(parts[0], parts[1]), name


def test_a_rank_of_the_gated_feed_forward_holds_the_same_rows_of_both_halves() -> None:
    """What the model computes: rank r multiplies its rows of the gate with its rows of the value."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    parameter = dict(tiny_model(CONFIG).gpt.named_parameters())[name]
    second = list(tensor_parallel_parts(parameter, name, 2))[1][1]
    assert torch.equal(second, torch.cat([parameter[48:96], parameter[144:192]]))


def test_replicated_parameters_are_the_same_on_every_tensor_parallel_rank() -> None:
    name = "decoder.layers.0.self_attention.indexer.query_weight"
    parameter = dict(tiny_model(CONFIG).gpt.named_parameters())[name]
    for rank in (0, 1):
        parallel = dataclasses.replace(single_rank(), tensor_rank=rank, tensor_size=2)
        value = _local_part(_full_matrix(name, parameter, CONFIG, parallel), parameter, parallel)
        assert torch.equal(value, parameter)


def test_a_pipeline_stage_draws_the_layers_of_the_whole_model() -> None:
    whole_config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, num_layers=4))
    whole = named_weights(tiny_model(whole_config))
    stage = tiny_model(CONFIG).gpt  # two layers, taken for the second half of four
    for layer in stage.decoder.layers:
        layer.layer_number += 2
    initialize_weights(stage, whole_config, single_rank())
    names = []
    for name, parameter in global_named_parameters(stage):
        assert torch.equal(parameter, whole[name]), name
        names.append(name)
    assert {name.split(".")[2] for name in names if name.startswith("decoder.layers")} == {"2", "3"}


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
        # the standard error of a standard deviation is std / sqrt(2 n)
        assert abs(weight.std() / expected - 1) < 4 / math.sqrt(2 * weight.numel()), name
        assert abs(weight.mean()) < 4 * expected / math.sqrt(weight.numel()), name
    assert kinds == {True, False}


def test_vectors_start_at_their_fixed_values() -> None:
    config = tiny_config(
        model={"qk_norm": True}, gsa={"gate_bias_init": 0.5, "indexer_temperature": "learned"}
    )
    found = set()
    for name, weight in named_weights(tiny_model(config)).items():
        if weight.dim() > 1:
            continue
        *_, module, kind = name.split(".")
        found.add(f"{module}.{kind}")
        expected = 1.0 if "norm" in module else 0.5 if module == "linear_gate" else 0.0
        assert (weight == expected).all(), name
    assert found == {
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "final_layernorm.weight",
        "q_layernorm.weight",
        "k_layernorm.weight",
        "linear_gate.bias",
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
