"""Tests every check between fields, on a valid config with one change."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from gsa_eval.convert.hf_config import to_hf_config
from gsa_train.config import Config, ConfigError, ModelConfig, MoEConfig, load_config
from gsa_train.config.checks import check_config, check_packages
from gsa_train.config.model import check_rotary
from gsa_train.config.parallel import data_parallel_size
from gsa_train.config.train import check_graphs
from helpers.broken_rules import BROKEN_RULES, GRAPH_RULES, MOE_RULES, ROTARY_RULES, SHORT, rules_of

BASE = """
model: {num_layers: 8, hidden_size: 64, num_heads: 4, num_kv_heads: 4, ffn_hidden_size: 128, vocab_size: 512}
train: {global_batch_size: 24}
phases:
  - {name: warmup, steps: 10, attention: dense, train: indexer, lr: 1.0e-3, min_lr: 1.0e-3}
  - {name: sparse, steps: 10}
"""

MOE_BASE = """
model: {num_layers: 4, hidden_size: 64, num_heads: 4, num_kv_heads: 4, ffn_hidden_size: 128, vocab_size: 512}
moe: {experts: 8, expert_ffn_hidden_size: 32}
train: {global_batch_size: 24}
phases: [{name: sparse, steps: 10}]
"""
GSA = Path(__file__).resolve().parents[2] / "configs" / "gsa_1.7b.yaml"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.fixture
def moe_base(tmp_path: Path) -> Path:
    path = tmp_path / "moe.yaml"
    path.write_text(MOE_BASE)
    return path


SIZES = """
    model.num_layers model.hidden_size model.num_heads model.num_kv_heads model.head_dim model.ffn_hidden_size
    model.vocab_size gsa.indexer_heads gsa.indexer_dim gsa.k_base gsa.k_min gsa.k_max
    gsa.selection_reuse parallel.tensor parallel.context parallel.pipeline train.seq_len_tokens
    train.micro_batch_size train.global_batch_size train.recompute_num_layers data.num_lanes
    data.prefetch_blocks data.packing_pool_documents evaluate.max_blocks checkpoint.every_steps
    checkpoint.keep_last checkpoint.retry_after_steps logging.every_steps phases.1.steps
"""
NOT_NEGATIVE = """
    monitor.loss_min_rise_nats monitor.recheck_every_steps gsa.dense_below checkpoint.keep_every_steps
    phases.1.min_lr phases.1.warmup_steps phases.1.kl_coeff train.weight_decay evaluate.every_steps
    checkpoint.save_retries run.seed run.time_limit_minutes run.slurm_margin_minutes evaluate.tasks_every_steps
    parallel.hang_limit_seconds
"""
POSITIVE = """
    model.rotary_percent phases.1.indexer_lr_mult phases.1.gate_lr_mult train.adam_epsilon
    parallel.timeout_minutes logging.straggler_ratio
"""


def with_ids(table: str) -> list[object]:
    return [pytest.param(*row, id=" ".join(row[0])) for row in rules_of(table)]


@pytest.mark.parametrize(
    ("fields", "value", "said"),
    [
        (SIZES, "0", "below 1; give 1 or more"),
        (NOT_NEGATIVE, "-1", "negative"),
        (POSITIVE, "0", "not positive"),
    ],
    ids=["sizes", "not negative", "positive"],
)
def test_the_least_values(base: Path, fields: str, value: str, said: str) -> None:
    overrides = ["train.recompute=full", *(f"{field}={value}" for field in fields.split())]
    found = "\n".join(check_config(load_config(base, overrides), 8))
    expected = {field: rf"^{field} = {value}(\.0)?: {said}" for field in fields.split()}
    assert [field for field, line in expected.items() if not re.search(line, found, re.M)] == []


@pytest.mark.parametrize(("overrides", "fragments"), with_ids(BROKEN_RULES))
def test_a_broken_rule_is_one_line(base: Path, overrides: list[str], fragments: list[str]) -> None:
    (line,) = [line for line in check_config(load_config(base, overrides), 8) if fragments[0] in line]
    assert [fragment for fragment in (*fragments, ": ", "; ") if fragment not in line] == [], line


@pytest.mark.parametrize(("overrides", "fragments"), with_ids(MOE_RULES) + with_ids(ROTARY_RULES))
def test_a_refused_config_has_one_line(moe_base: Path, overrides: list[str], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(moe_base, overrides, 8, need_data=False)
    (line,) = caught.value.problems
    assert [fragment for fragment in fragments if fragment not in line] == [], line


def with_graphs(overrides: list[str]) -> list[str]:
    """Return the problems with CUDA graphs of a shipped config with these overrides."""
    config = load_config(GSA, ["train.cuda_graphs=on", *overrides], need_data=False)
    return list(check_graphs(config, replicas=8))


@pytest.mark.parametrize(("overrides", "fragments"), with_ids(GRAPH_RULES))
def test_what_cuda_graphs_do_not_go_with_is_one_line(overrides: list[str], fragments: list[str]) -> None:
    (line,) = with_graphs(overrides)
    assert [fragment for fragment in fragments if fragment not in line] == [], line
    assert line.startswith("train.cuda_graphs = true: ")
    assert line.endswith(", or train.cuda_graphs to false")


ALLOWED = """
phases.0.attention=dense phases.0.train=base gsa.attention=dense phases.1.attention=dense
phases.1.train=base
phases.1.attention=dense
gsa.selection_reuse=4 parallel.pipeline=2
parallel.pipeline=2 parallel.virtual_pipeline=2 parallel.pipeline_layers=[1,3,3,1]
model.num_layers=9 parallel.pipeline=2 parallel.pipeline_layers=[5,4]
train.recompute=full gsa.selection_reuse=2 train.recompute_num_layers=4
train.recompute_num_layers=3
train.seq_len_tokens=257 parallel.tensor=2 parallel.sequence=off
gsa.indexer_temperature=learned
parallel.overlap_grad_reduce=on parallel.overlap_param_gather=on
parallel.strategy=deepspeed parallel.zero_stage=3 parallel.tensor=2
parallel.optimizer_instances=4 parallel.context=2 parallel.pipeline=2
gsa.adaptive_k=off gsa.gate_bias_init=-1 train.grad_clip=0
"""
ALLOWED_WITH_EXPERTS = """
parallel.expert=8
parallel.tensor=2 parallel.expert=4 parallel.expert_tensor=2
parallel.tensor=2 parallel.pipeline=2 parallel.context=2 parallel.expert=4
parallel.expert=2 parallel.optimizer_instances=4
moe.balancing=aux_free moe.router_score=sigmoid moe.bias_update_rate=0.1
moe.experts_impl=sequential moe.expert_ffn_hidden_size=33
moe.capacity_factor=1.25 moe.z_loss_coeff=0 moe.routed_scale=2.5
"""
ALLOWED_WITH_GRAPHS = """
gsa.indexer_loss_row_fraction=0.25
train.seq_len_tokens=8192
train.seq_len_tokens=32768
parallel.optimizer_instances=2 gsa.attention=dense phases.0.train=all phases.1.attention=dense
EXPERTS moe.shared_expert_ffn_hidden_size=64 moe.first_dense_layers=1
EXPERTS moe.router_score=sigmoid moe.balancing=aux_free
"""


def test_what_is_allowed(base: Path, moe_base: Path) -> None:
    for row in ["", *ALLOWED.strip().splitlines()]:
        assert check_config(load_config(base, row.split()), 8) == [], row
    for row in ["", *ALLOWED_WITH_EXPERTS.strip().splitlines()]:
        load_config(moe_base, row.split(), 8, need_data=False)
    for row in ["", *ALLOWED_WITH_GRAPHS.strip().splitlines()]:
        words = [each for word in row.split() for each in SHORT.get(word, [word])]
        assert with_graphs(words) == [], row
    assert list(check_graphs(load_config(GSA, ["parallel.tensor=2"], need_data=False), 8)) == []
    yarn = load_config(moe_base, SHORT["YARN"], world_size=1, need_data=False).model.rope_scaling
    assert (yarn.rope_type, yarn.factor) == ("yarn", 4.0)


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
        assert problem.startswith(f"logging.wandb = {mode}: the package wandb is not installed; ")
        assert problem.endswith("run pip install wandb, or set logging.wandb=disabled")
    assert check_packages(load_config(base, ["logging.wandb=disabled"])) == []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert check_packages(load_config(base)) == []


def test_an_export_to_transformers_names_the_field() -> None:
    wrong = r"moe\.capacity_factor = 1\.5: the model of transformers \(gsa_hf\) does not have it"
    with pytest.raises(ValueError, match=wrong):
        to_hf_config(Config(moe=MoEConfig(experts=8, capacity_factor=1.5)))


@pytest.mark.parametrize(
    ("size", "share", "channels"),
    [(64, 0.35, 22), (100, 0.29, 28), (50, 0.29, 14), (10, 0.25, 2), (25, 0.25, 6), (64, 1.0, 64)],
)
def test_a_share_is_rounded_down_to_channels(base: Path, size: int, share: float, channels: int) -> None:
    """0.29 * 100 is 28.999999999999996, also in megatron-core and transformers."""
    fields = [f"model.head_dim={size}", f"model.rotary_percent={share}"]
    assert load_config(base, fields, world_size=1, need_data=False).model.rotary_channels == channels


def test_the_remedy_for_a_share_is_right_for_each_size() -> None:
    for size in range(2, 258):
        for share in (0.001, 0.3, 0.58, 0.77, 0.999):
            for line in check_rotary(Config(model=ModelConfig(head_dim=size, rotary_percent=share))):
                remedy = float(line.partition("; give ")[2].partition(",")[0])
                model = ModelConfig(head_dim=size, rotary_percent=remedy)
                assert list(check_rotary(Config(model=model))) == [], line
