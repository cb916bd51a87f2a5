"""Every check between fields, on a config that is right until one thing is changed."""

from unittest.mock import Mock

import pytest

from gsa_train.config import Config, ConfigError, PhaseConfig, load_config
from gsa_train.config.checks import check_config, check_packages
from gsa_train.config.parallel import data_parallel_size
from helpers.broken_rules import BROKEN_RULES

BASE = """
model: {num_layers: 8, hidden_size: 64, num_heads: 4, num_kv_heads: 4, ffn_hidden_size: 128, vocab_size: 512}
train: {global_batch_size: 24}
phases:
  - {name: warmup, steps: 10, attention: dense, train: indexer, lr: 1.0e-3, min_lr: 1.0e-3}
  - {name: sparse, steps: 10}
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def test_the_base_is_right(base):
    assert check_config(load_config(base, world_size=8, need_data=False), 8) == []


SIZES = """
    model.num_layers model.hidden_size model.num_heads model.num_kv_heads model.head_dim model.ffn_hidden_size
    model.vocab_size gsa.indexer_heads gsa.indexer_dim gsa.k_base gsa.k_min gsa.k_max gsa.selection_block
    gsa.selection_reuse parallel.tensor parallel.context parallel.pipeline train.seq_len_tokens train.micro_batch_size
    train.global_batch_size train.recompute_num_layers data.num_lanes data.prefetch_blocks
    """


@pytest.mark.parametrize(
    ("overrides", "fragments"), BROKEN_RULES, ids=[" ".join(case[0]) for case in BROKEN_RULES]
)
def test_a_broken_rule_is_one_line(base, overrides, fragments):
    found = [line for line in check_config(load_config(base, overrides), 8) if fragments[0] in line]
    assert len(found) == 1
    for fragment in fragments:
        assert fragment in found[0]
    assert ": " in found[0]
    assert "; " in found[0]


@pytest.mark.parametrize("field", SIZES.split())
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_are_positive(base, field, value):
    found = check_config(load_config(base, [f"{field}={value}", "train.recompute=full"]), 8)
    assert f"{field} = {value}: below 1; give 1 or more" in found


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "phases.0.attention=dense",
            "phases.0.train=base",
            "gsa.attention=dense",
            "phases.1.attention=dense",
        ],
        ["phases.1.train=base"],
        ["phases.1.attention=dense"],
        ["gsa.selection_block=4", "gsa.local_window=4"],
        ["gsa.selection_reuse=4", "parallel.pipeline=2"],
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layers=[1,3,3,1]"],
        ["model.num_layers=9", "parallel.pipeline=2", "parallel.pipeline_layers=[5,4]"],
        ["parallel.context=2", "gsa.selection_block=32", "gsa.local_window=32"],
        ["train.recompute=full", "gsa.selection_reuse=2", "train.recompute_num_layers=4"],
        ["train.recompute_num_layers=3"],
        ["train.seq_len_tokens=257", "parallel.tensor=2", "parallel.sequence=off"],
        ["gsa.indexer_temperature=learned"],
        ["parallel.overlap_grad_reduce=on", "parallel.overlap_param_gather=on"],
        ["parallel.strategy=deepspeed", "parallel.zero_stage=3", "parallel.tensor=2"],
        ["parallel.optimizer_instances=4", "parallel.context=2", "parallel.pipeline=2"],
        ["gsa.adaptive_k=off", "gsa.gate_bias_init=-1", "train.grad_clip=0"],
    ],
)
def test_what_is_allowed(base, overrides):
    assert check_config(load_config(base, overrides), 8) == []


@pytest.mark.parametrize(
    ("world_size", "fragment"),
    [(0, "start 1 rank"), (3, "start 2 or 4 ranks"), (1, "start 2 ranks (a dry run: --world-size)")],
)
def test_the_world_size(base, world_size, fragment):
    config = load_config(base, ["parallel.tensor=2"])
    (problem,) = check_config(config, world_size)
    assert fragment in problem
    assert data_parallel_size(config, world_size) == 0


def test_deepspeed_must_be_installed(base, monkeypatch):
    config = load_config(base, ["parallel.strategy=deepspeed", "logging.wandb=disabled"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check_packages(config)
    assert "not installed" in problem
    assert "pip install '.[deepspeed]'" in problem
    assert check_packages(load_config(base, ["logging.wandb=disabled"])) == []


@pytest.mark.parametrize("spec", [None, Mock(origin=None)], ids=["nothing", "a folder of W&B's runs"])
def test_wandb_must_be_installed_where_it_is_used(base, monkeypatch, spec):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert check_packages(load_config(base)) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    for mode in ("auto", "offline"):
        (problem,) = check_packages(load_config(base, [f"logging.wandb={mode}"]))
        assert problem == (
            f"logging.wandb = {mode}: the package wandb is not installed; "
            "run pip install wandb, or set logging.wandb=disabled"
        )
    assert check_packages(load_config(base, ["logging.wandb=disabled"])) == []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert check_packages(load_config(base)) == []


def test_a_wrong_word_for_wandb_gets_the_right_ones(base):
    with pytest.raises(ConfigError, match="= off: not one of auto, online, offline, disabled"):
        load_config(base, ["logging.wandb=off"])


def test_a_config_made_in_python_is_checked_the_same_way():
    config = Config(phases=[PhaseConfig(steps=0)])
    assert check_config(config, 1) == ["phases.0.steps = 0: below 1; give 1 or more"]


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\u202eb"])
def test_a_phase_has_a_name_that_a_line_can_hold(name: str) -> None:
    (line,) = check_config(Config(phases=[PhaseConfig(name=name)]), 1)
    assert line.startswith(f"phases.0.name = {name!r}: has characters that are not visible")
