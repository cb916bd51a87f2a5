"""Tests the costs of mixtures of experts in a dry run: parameters and memory of the ranks."""

from pathlib import Path

import pytest

from gsa_train.config import Config, load_config
from gsa_train.model.flops import count_parameters
from gsa_train.planning.dry_run import describe
from gsa_train.planning.memory.estimate import estimate_memory, worst_expert_load
from gsa_train.planning.memory.experts import most_rows, routed_rows
from gsa_train.planning.memory.sizes import sizes_of

GSA = Path(__file__).parents[2] / "configs" / "gsa_1.7b.yaml"
EXPERTS = ["moe.experts=64", "moe.top_k=4", "moe.expert_ffn_hidden_size=512"]
EXPERTS += ["moe.shared_expert_ffn_hidden_size=1024", "moe.first_dense_layers=1"]
EXPERT_8 = [*EXPERTS, "parallel.expert=8"]


def load(overrides: list[str], world_size: int = 8) -> Config:
    return load_config(GSA, overrides, world_size=world_size, need_data=False)


def test_experts_are_spread_over_their_own_ranks() -> None:
    config = load(EXPERT_8)
    count, phase = count_parameters(config.model, config.gsa, config.moe), config.phases[-1]
    of_all = count.total - count.experts
    estimate = estimate_memory(config, phase, 8, 0)
    assert estimate.weights == pytest.approx(2 * (of_all + count.experts / 8))
    assert estimate.gradients == pytest.approx(4 * (of_all + count.experts / 8))
    # Each expert and its state are on one of eight ranks. All else has eight replicas, and an eighth of the state each.
    assert estimate.optimizer == pytest.approx(12 * (of_all / 8 + count.experts / 8))
    split = [*EXPERTS, "parallel.tensor=4", "parallel.expert_tensor=4", "parallel.expert=2"]
    config = load(split)
    replicated = count.norms + count.indexer + count.router
    estimate = estimate_memory(config, phase, 8, 0)
    of_rank = (of_all - replicated) / 4 + replicated + count.experts / 8
    assert estimate.weights == pytest.approx(2 * of_rank)


def test_rows_of_a_rank() -> None:
    """Each of eight ranks has four sequences of 4096 tokens, with four choices each."""
    even = 4 * 4096 * 4
    config = load(EXPERT_8)
    sizes = sizes_of(config)
    assert (routed_rows(config, sizes), most_rows(config, sizes)) == (even, 8 * even)
    limited = load([*EXPERT_8, "moe.capacity_factor=1.5"])
    assert most_rows(limited, sizes) == 1.5 * even
    few = load([*EXPERT_8, "moe.experts=16"])  # two experts on a rank are two choices of a token
    assert most_rows(few, sizes) == 8 * even / 2
    alone = load(EXPERTS)
    assert most_rows(alone, sizes) == routed_rows(alone, sizes) == even
    assert worst_expert_load(alone, 8, 0) == 0
    # Rows, both halves of SwiGLU's input, and its weighted output, of 23 layers; one weight each; two of the last
    # layer's outputs.
    more = 7 * even
    kept = 23 * more * (2 * (2048 + 3 * 512) + 4)
    assert worst_expert_load(config, 8, 0) == pytest.approx(kept + 2 * 2 * more * 2048)
    recomputed = load([*EXPERT_8, "train.recompute=full"])
    assert worst_expert_load(recomputed, 8, 0) == pytest.approx(kept / 23 + 2 * 2 * more * 2048)


def test_a_dry_run_tells_of_experts() -> None:
    config = load(EXPERT_8, 16)
    report, count = describe(config, 16), count_parameters(config.model, config.gsa, config.moe)
    for line in (
        "23 layers with 64 experts, top 4: 8 on a rank, in 2 replicas",
        f"active in a token  {count.active:,}",
        "more where one rank's get all tokens of all its layers",
    ):
        assert line in report
    assert "expert" not in describe(load([]), 8).replace("--mfu", "")
