"""Fields of mixtures of experts that must fit each other, on a config that is right until one thing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa_eval.convert.hf_config import to_hf_config
from gsa_train.config import (
    Config,
    ConfigError,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PhaseConfig,
    load_config,
)
from gsa_train.config.checks import check_config
from gsa_train.config.moe import expert_layers

BASE = """
model: {num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 4, ffn_hidden_size: 128, vocab_size: 512}
moe: {experts: 8, expert_ffn_hidden_size: 32}
train: {global_batch_size: 24}
phases: [{name: sparse, steps: 10}]
"""
WORLD = 8
CASES: list[tuple[list[str], list[str]]] = [
    (["moe.experts=0"], ["moe.expert_ffn_hidden_size = 32", "without effect, for moe.experts = 0"]),
    (["moe.experts=-1"], ["moe.experts = -1", "negative"]),
    (["moe.top_k=9"], ["moe.experts = 8", "fewer than moe.top_k = 9"]),
    (["moe.top_k=1"], ["moe.top_k = 1", "always 1", "set it to 2 or more"]),
    (["moe.top_k=0"], ["moe.top_k = 0", "below 1"]),
    (["moe.first_dense_layers=4"], ["moe.first_dense_layers = 4", "model.num_layers = 4"]),
    (["moe.layer_interval=0"], ["moe.layer_interval = 0", "below 1"]),
    (["moe.experts=9", "parallel.expert=2"], ["moe.experts = 9", "not a multiple of parallel.expert = 2"]),
    (
        ["moe.shared_expert_ffn_hidden_size=9", "parallel.tensor=2"],
        ["moe.shared_expert_ffn_hidden_size = 9", "parallel.tensor = 2"],
    ),
    (["moe.expert_ffn_hidden_size=36"], ["moe.expert_ffn_hidden_size = 36", "multiples of 8", "sequential"]),
    (
        ["moe.expert_ffn_hidden_size=8", "parallel.tensor=2", "parallel.expert_tensor=2"],
        ["moe.expert_ffn_hidden_size = 8", "a rank has 4 of it", "parallel.expert_tensor = 2"],
    ),
    (["model.hidden_size=60"], ["model.hidden_size = 60", "multiples of 8", "moe.experts_impl"]),
    (
        ["moe.expert_ffn_hidden_size=33", "parallel.tensor=2", "parallel.expert_tensor=2"],
        ["moe.expert_ffn_hidden_size = 33", "not a multiple of parallel.expert_tensor = 2"],
    ),
    (["moe.balancing=aux_free"], ["moe.balancing = aux_free", "moe.router_score = softmax", "sigmoid"]),
    (
        ["moe.bias_update_rate=0.1"],
        ["moe.bias_update_rate = 0.1", "moe.balancing = global_batch", "to aux_free"],
    ),
    (
        ["moe.balancing=none", "moe.balance_coeff=0.1"],
        ["moe.balance_coeff = 0.1", "moe.balancing = none", "to global_batch"],
    ),
    (["moe.capacity_factor=0.5"], ["moe.capacity_factor = 0.5", "even share", "1 or more"]),
    (["moe.capacity_factor=-1"], ["moe.capacity_factor = -1.0", "negative"]),
    (["moe.routed_scale=0"], ["moe.routed_scale = 0.0", "not positive"]),
    (["parallel.expert_tensor=2"], ["parallel.expert_tensor = 2", "neither 1 nor parallel.tensor = 1"]),
    (
        ["parallel.tensor=2", "parallel.sequence=off"],
        ["parallel.sequence = false", "with experts", "set it to true"],
    ),
    (
        ["moe.experts=12", "parallel.expert=3"],
        ["world size = 8", "has 8 tensor x", "multiple of parallel.expert = 3", "start 6 or 9 ranks", "as 4"],
    ),
    (
        ["moe.experts=16", "parallel.expert=8", "parallel.pipeline=2"],
        ["world size = 8", "a pipeline stage has 4 tensor x", "start 16 ranks", "such as 4"],
    ),
    (
        ["parallel.expert=4", "parallel.optimizer_instances=4"],
        ["parallel.optimizer_instances = 4", "does not divide the 2 replicas of an expert"],
    ),
    (["parallel.strategy=deepspeed"], ["parallel.strategy = deepspeed", "moe.experts = 8", "to megatron"]),
    (["moe.expert=8"], ["moe.expert = 8", "unknown key", "moe.experts"]),
    (["moe.balancing=loss"], ["moe.balancing = loss", "none, global_batch, aux_free"]),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize(("overrides", "fragments"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_a_broken_rule_is_one_line(base: Path, overrides: list[str], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides, WORLD, need_data=False)
    (line,) = caught.value.problems
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.expert=8"],
        ["parallel.tensor=2", "parallel.expert=4", "parallel.expert_tensor=2"],
        ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2", "parallel.expert=4"],
        ["parallel.expert=2", "parallel.optimizer_instances=4"],
        ["moe.balancing=aux_free", "moe.router_score=sigmoid", "moe.bias_update_rate=0.1"],
        ["moe.experts_impl=sequential", "moe.expert_ffn_hidden_size=33"],
        ["moe.capacity_factor=1.25", "moe.z_loss_coeff=0", "moe.routed_scale=2.5"],
    ],
)
def test_what_is_allowed(base: Path, overrides: list[str]) -> None:
    load_config(base, overrides, WORLD, need_data=False)


def test_graphs_of_passes_are_allowed_on_one_rank(base: Path) -> None:
    graphs = ["train.cuda_graphs=true", "logging.every_steps=2"]
    load_config(base, graphs, 1, need_data=False)
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs = true: parallel\.expert = 2"):
        load_config(base, [*graphs, "parallel.expert=2"], 2, need_data=False)


def test_experts_cannot_be_split_where_there_are_none() -> None:
    config = Config(parallel=ParallelConfig(expert=2), phases=[PhaseConfig(name="sparse", steps=10)])
    (line,) = check_config(config, 2)
    assert line.startswith("parallel.expert = 2: there is no expert to split, for moe.experts = 0")


@pytest.mark.parametrize(
    ("moe", "layers"),
    [
        (MoEConfig(), []),
        (MoEConfig(experts=8), [0, 1, 2, 3, 4, 5]),
        (MoEConfig(experts=8, first_dense_layers=1), [1, 2, 3, 4, 5]),
        (MoEConfig(experts=8, layer_interval=2), [0, 2, 4]),
        (MoEConfig(experts=8, first_dense_layers=1, layer_interval=3), [1, 4]),
    ],
)
def test_which_layers_have_experts(moe: MoEConfig, layers: list[int]) -> None:
    assert expert_layers(Config(model=ModelConfig(num_layers=6), moe=moe)) == layers


def test_an_export_to_transformers_names_the_field() -> None:
    wrong = r"moe\.capacity_factor = 1\.5: the model of transformers \(gsa_hf\) does not have it"
    with pytest.raises(ValueError, match=wrong):
        to_hf_config(Config(moe=MoEConfig(experts=8, capacity_factor=1.5)))
