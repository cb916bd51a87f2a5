"""Tests the configs of this repository."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from gsa_train.config import RopeScalingConfig, load_config
from gsa_train.config.file_checks import check_data
from gsa_train.model.flops import count_parameters

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("gsa", "standard", "sparse_only", "gated_only")
SHIPPED = [f"{name}_{size}.yaml" for name in MODELS for size in ("1.7b", "7b", "moe_15b_a2b")]
LONGER = ["gsa_1.7b_4k_to_32k.yaml", "gsa_1.7b_32k_to_128k.yaml"]


@pytest.mark.parametrize("name", [*SHIPPED, *LONGER, "paper_gsa_1.7b.yaml"])
def test_shipped_configs_need_only_their_data(name):
    config = load_config(CONFIGS / name, world_size=8, need_data=False)
    assert config.run.name == name.removesuffix(".yaml")
    assert config.data.attend_across_documents == (config.train.seq_len_tokens > 8192)
    missing = {line.split(" = ")[0] for line in check_data(config.data)}
    assert missing <= {"data.train_dir", "data.validation_dir", "data.tokenizer"}


def test_the_recipe_for_long_contexts_goes_on_where_the_run_before_ended():
    runs = [load_config(CONFIGS / name) for name in ("gsa_1.7b.yaml", *LONGER)]
    for before, after in itertools.pairwise(runs):
        assert after.checkpoint.initial_weights == f"{before.run.dir}/{before.run.name}"
        assert after.train.seq_len_tokens > before.train.seq_len_tokens
        assert after.data.attend_across_documents
        assert after.gsa == before.gsa
        base = {"rope_base": after.model.rope_base, "rope_scaling": after.model.rope_scaling}
        assert after.model == dataclasses.replace(before.model, **base)
    short, middle, long = runs
    assert (short.model.rope_base, middle.model.rope_base, long.model.rope_base) == (1e4, 1e6, 1e6)
    scaling = long.model.rope_scaling
    assert (short.model.rope_scaling, middle.model.rope_scaling) == (RopeScalingConfig(),) * 2
    assert scaling.rope_type == "yarn"
    assert scaling.original_max_position_embeddings == middle.train.seq_len_tokens
    assert scaling.factor == long.train.seq_len_tokens / middle.train.seq_len_tokens


def test_the_recommended_models_differ_from_the_paper_in_their_indexer_and_budget():
    recommended, paper = (load_config(CONFIGS / f"{name}.yaml") for name in ("gsa_1.7b", "paper_gsa_1.7b"))
    selection = {"indexer_rope": True, "indexer_norm": True, "indexer_activation": "relu", "indexer_heads": 8}
    selection |= {
        "local_window": 64,
        "k_base": 1024,
        "k_min": 256,
        "k_max": 2048,
        "indexer_loss_row_fraction": 0.25,
    }
    assert recommended.gsa == dataclasses.replace(paper.gsa, **selection)
    assert recommended == dataclasses.replace(paper, run=recommended.run, gsa=recommended.gsa)
    for other in ("gsa_7b", "gsa_moe_15b_a2b", "gsa_1.7b_32k", "gsa_1.7b_128k", "sft_1.7b"):
        assert load_config(CONFIGS / f"{other}.yaml").gsa == recommended.gsa


@pytest.mark.parametrize("size", ["1.7b", "7b", "moe_15b_a2b"])
def test_the_four_models_differ_where_the_paper_says(size):
    attention = {"gsa": "sparse", "standard": "dense", "sparse_only": "sparse", "gated_only": "dense"}
    configs = {name: load_config(CONFIGS / f"{name}_{size}.yaml") for name in MODELS}
    gsa, sparse_only = configs["gsa"], configs["sparse_only"]
    assert (gsa.gsa.indexer_activation, gsa.gsa.adaptive_k) == ("relu", "inverse")
    assert (sparse_only.gsa.indexer_activation, sparse_only.gsa.adaptive_k) == ("relu", "off")
    for name, config in configs.items():
        assert config.gsa.attention == attention[name]
        assert config.gsa.value_gate == config.gsa.output_gate == (name in ("gsa", "gated_only"))
        for section in ("model", "moe", "train", "parallel"):
            assert getattr(config, section) == getattr(gsa, section)
        trained = [phase.steps for phase in config.phases if phase.train == "all"]
        assert trained == [gsa.phases[-1].steps]


@pytest.mark.parametrize("name", ["gsa_1.7b", "gsa_7b"])
def test_powers_of_2_of_gpus_are_accepted(name):
    for gpus in (8, 16, 64, 128, 256):
        overrides = ["train.micro_batch_size=1"]
        load_config(CONFIGS / f"{name}.yaml", overrides, world_size=gpus, need_data=False)


def test_the_mixture_of_experts_has_the_size_of_the_published_one():
    """arXiv 2505.06708 has 15B parameters, 2.54B of them active, 128 experts, top 8."""
    config = load_config(CONFIGS / "standard_moe_15b_a2b.yaml", world_size=8, need_data=False)
    count = count_parameters(config.model, config.gsa, config.moe)
    assert (round(count.total / 1e9, 1), round(count.active / 1e9, 2)) == (15.0, 2.54)
    assert (config.moe.experts, config.moe.top_k, config.moe.balancing) == (128, 8, "global_batch")


def test_the_demo_with_experts_has_the_active_parameters_of_the_demo():
    dense, experts = (load_config(CONFIGS / f"{name}.yaml", world_size=2) for name in ("demo", "demo_moe"))
    for section in ("phases", "train", "evaluate", "gsa", "data"):
        assert getattr(dense, section) == getattr(experts, section)
    assert (dense.moe.experts, experts.moe.experts, experts.parallel.expert) == (0, 8, 2)
    counts = [count_parameters(each.model, each.gsa, each.moe) for each in (dense, experts)]
    assert counts[1].active - counts[1].router == counts[0].total
