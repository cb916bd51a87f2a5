"""What train.cuda_graphs does not go together with, a line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa_train.config import Config, load_config
from gsa_train.config.train import check_graphs

GSA = Path(__file__).resolve().parents[2] / "configs" / "gsa_1.7b.yaml"


NOT_OVERLAPPED = ("parallel.overlap_grad_reduce=off", "parallel.overlap_param_gather=off")


def config_with(*overrides: str) -> Config:
    return load_config(GSA, ["train.cuda_graphs=on", *NOT_OVERLAPPED, *overrides], need_data=False)


SHARED = ("gsa.selection_block=32", "gsa.local_window=32")
EXPERTS = ("moe.experts=8", "moe.top_k=2", "moe.expert_ffn_hidden_size=64")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.seq_len_tokens=8192",),
        ("train.seq_len_tokens=32768", *SHARED),
        ("train.seq_len_tokens=131072", *SHARED),
        ("train.seq_len_tokens=16384", "gsa.attention_kernel=masked"),
        (
            "parallel.optimizer_instances=2",
            "gsa.attention=dense",
            "phases.0.train=all",
            "phases.1.attention=dense",
        ),
        (*EXPERTS, "moe.shared_expert_ffn_hidden_size=64", "moe.first_dense_layers=1"),
        (*EXPERTS, "moe.router_score=sigmoid", "moe.balancing=aux_free"),
    ],
)
def test_what_is_allowed(overrides: tuple[str, ...]) -> None:
    assert check_graphs(config_with(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "wrong", "remedy"),
    [
        (("parallel.tensor=2",), "parallel.tensor = 2 exchanges tensors", "set that to 1"),
        (("parallel.context=2",), "parallel.context = 2 exchanges tensors", "set that to 1"),
        (("parallel.pipeline=2",), "parallel.pipeline = 2 exchanges tensors", "set that to 1"),
        (("parallel.strategy=deepspeed",), "parallel.strategy = deepspeed", "set that to megatron"),
        (
            ("parallel.overlap_grad_reduce=on",),
            "parallel.overlap_grad_reduce = true",
            "set that and parallel.overlap_param_gather to false",
        ),
        (("train.recompute=full",), "train.recompute = full", "set that to none"),
        (("train.recompute=selective",), "train.recompute = selective", "set that to none"),
        (("train.fused_ops=none",), "train.fused_ops = none", "set that to auto"),
        (("gsa.attention_impl=reference",), "gsa.attention_impl = reference", "set that to auto"),
        (("gsa.indexer_loss_row_fraction=0.25",), "gsa.indexer_loss_row_fraction = 0.25", "set that to 1"),
        (("logging.every_steps=1",), "logging.every_steps = 1", "set that to 2 or more"),
        (
            ("train.seq_len_tokens=16384",),
            "gsa.attention_kernel = auto and train.seq_len_tokens = 16384",
            "masked",
        ),
        (("gsa.attention_kernel=gathered",), "gsa.attention_kernel = gathered", "masked"),
        (("train.seq_len_tokens=65536",), "of 65536 tokens (train.seq_len_tokens)", "gsa.selection_block"),
        ((*EXPERTS, "moe.experts_impl=sequential"), "moe.experts_impl = sequential", "set that to grouped"),
        ((*EXPERTS, "train.precision=fp32"), "train.precision = fp32", "set that precision to bf16"),
        ((*EXPERTS, "parallel.expert=2"), "parallel.expert = 2 reads back", "set that to 1"),
        ((*EXPERTS, "moe.capacity_factor=1.25"), "moe.capacity_factor = 1.25", "set that to 0"),
    ],
)
def test_what_is_not(overrides: tuple[str, ...], wrong: str, remedy: str) -> None:
    (line,) = check_graphs(config_with(*overrides))
    assert line.startswith("train.cuda_graphs = true: ")
    assert wrong in line
    assert remedy in line.partition("; ")[2]
    assert line.endswith(", or train.cuda_graphs to false")


def test_without_graphs_nothing_is_wrong() -> None:
    assert check_graphs(load_config(GSA, ["parallel.tensor=2"], need_data=False)) == []
