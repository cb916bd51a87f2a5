"""The kernels train what plain torch trains: loss, every gradient, every statistic."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gsa_kernels.fused.gates import rows as gate_rows
from gsa_kernels.fused.split_rotate_gate import op as prologue_op
from gsa_kernels.indexer.triton_scores import score_inputs
from gsa_kernels.loss import op as kl_op
from gsa_kernels.loss.triton_launch import Blocks, Inputs
from gsa_kernels.types import Geometry, Indexer
from gsa_train.config import PhaseConfig
from gsa_train.config.kernel_checks import unsupported_by_kernels
from gsa_train.model.probes import query_sample
from gsa_train.phases import enter_phase
from helpers.fused_steps import VARIANTS, assert_same_step, one_step, take_over
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    step_gradients,
    tiny_config,
    tiny_model,
    token_losses,
)

DENSE_ALL = PhaseConfig(name="dense", attention="dense", train="all", steps=10, lr=1e-2, min_lr=1e-3)

CASES = [  # each option once, because the interpreter is slow
    ("paper", SPARSE),
    ("window, rope and reuse", SPARSE),
    ("sparse-only", SPARSE),
    ("learned temperature", WARM_UP),
    ("lists", SPARSE),
    ("plain and norm", SPARSE),
    ("qsa and lists", SPARSE),
    ("groups", SPARSE),
    ("groups", WARM_UP),
    ("groups over lists", SPARSE),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "phase"), CASES, ids=[f"{v}-{p.name}" for v, p in CASES])
def test_one_step_matches_the_reference(variant: str, phase: PhaseConfig) -> None:
    gsa = VARIANTS[variant]
    assert_same_step(one_step(gsa, phase, fused=True), one_step(gsa, phase, fused=False))


IN_RUNS = [CASES[0], *CASES[3:5], *CASES[-3:]]
"""All causal keys, bits, lists, and groups."""


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "phase"), IN_RUNS, ids=[f"{v}-{p.name}" for v, p in IN_RUNS])
def test_runs_of_queries_make_the_step_of_the_whole_sequence(
    variant: str, phase: PhaseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test also covers the sampled queries, here 4 to 7 and 16 to 19."""
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    gsa, cuts = VARIANTS[variant], (0, 7, 12, 24)
    if variant.startswith("groups"):  # no run cuts one
        cuts = (0, 16, 24)
    whole = one_step(gsa, phase, fused=False)
    for fused in (False, True):
        runs = one_step(gsa, phase, fused, cuts=cuts)
        if 7 in cuts:  # through the sampled queries
            for name in (
                "adjacent_overlap",
                "union_ratio_32",
            ):  # they compare neighbours, but not across runs
                take_over(name, whole, runs)
        assert_same_step(runs, whole)


@pytest.mark.slow
def test_the_loss_takes_the_sums_that_selection_and_attention_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bf16 kernels read these sums. The temperature is learned, and a window adds keys."""
    blocks = Blocks(32, 32, 4, 32, 4, segment=32, stacked=True)
    seen: list[Inputs] = []
    monkeypatch.setattr(kl_op, "choose_blocks", lambda inputs: (seen.append(inputs), blocks)[1])
    gsa = {"indexer_temperature": "learned", "local_window": 3}
    whole = one_step(gsa, SPARSE, fused=False)
    runs = one_step(gsa, SPARSE, fused=True, cuts=(0, 7, 24))
    for name in ("adjacent_overlap", "union_ratio_32"):
        take_over(name, whole, runs)
    assert_same_step(runs, whole)
    assert seen
    for inputs in seen:
        assert inputs.log_sum is not None
        assert inputs.log_sum.shape == inputs.q_idx.shape[:2]
        assert inputs.target_sum == 4


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (9, 16), (1, 16), (1, 14), (1, 130)])
def test_indexers_that_the_kernels_refuse_are_known_before_the_first_step(heads: int, dim: int) -> None:
    config = tiny_config(model={"head_dim": 32}, gsa={"indexer_heads": heads, "indexer_dim": dim})
    indexer = Indexer(torch.zeros(1, 1, heads, dim), torch.zeros(1, 1, dim), torch.zeros(1, 1, heads))
    if not unsupported_by_kernels(config):
        score_inputs(indexer, Geometry())
        return
    with pytest.raises(ValueError, match=r"indexer\.queries has"):
        score_inputs(indexer, Geometry())
    baseline = dataclasses.replace(config.gsa, attention="dense")
    assert unsupported_by_kernels(dataclasses.replace(config, gsa=baseline)) == []


@pytest.mark.slow
def test_the_gated_baseline_runs_on_the_dense_kernel() -> None:
    gsa = {"attention": "dense"}
    assert_same_step(one_step(gsa, DENSE_ALL, fused=True), one_step(gsa, DENSE_ALL, fused=False))


def test_statistics_beside_another_dense_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kernel returns no log-sum-exp, so our kernel computes it for the sampled queries."""
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    config = tiny_config([DENSE_ALL], model={"head_dim": 32}, gsa={"attention": "dense"})

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    found = []
    for other in (False, True):
        model = tiny_model(config)
        enter_phase(model, DENSE_ALL)
        if other:
            for attention in model.attentions:
                attention.over_chunks.implementation = "triton"
                attention.over_chunks.dense = dense
        token_losses(model, random_batches(config, attend_across=True)[0], measuring=True)
        found.append(read_stats(model)["sequence_start_attention"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_recomputing_the_core_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where G1's gradient is written does not matter either: without recomputation it needs no copy."""
    placed: list[bool] = []

    def take_projection(gradient: torch.Tensor) -> torch.Tensor | None:
        projection = gate_rows.take_projection(gradient)
        placed.append(projection is not None)
        return projection

    monkeypatch.setattr(prologue_op, "take_projection", take_projection)
    once, twice = (one_step({}, SPARSE, fused=True, recompute=mode) for mode in ("none", "selective"))
    assert placed[: len(placed) // 2] == [True] * (len(placed) // 2) != []
    assert torch.equal(once[0], twice[0])
    assert all(torch.equal(once[1][name], twice[1][name]) for name in once[1])
    assert once[2] == twice[2]


@pytest.mark.parametrize("part", ["linear_qkv", "indexer"])
@pytest.mark.parametrize("variant", ["paper", "lists"])
def test_no_kernel_stumbles_over_nan(variant: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with NaN is skipped, and logged like any other."""
    monkeypatch.setattr(query_sample, "SPARSE_EVERY", 1)  # some query leaves keys out
    gsa = VARIANTS[variant]
    config = tiny_config(
        [SPARSE],
        model={"num_layers": gsa.get("selection_reuse", 1), "head_dim": 32, "init_std": 0.2},
        gsa={"indexer_dim": 16, "indexer_heads": 2, "k_max": 6, **gsa},
        train={"seq_len_tokens": 24, "micro_batch_size": 1, "global_batch_size": 1},
    )
    model = tiny_model(config, variance_ema=0.02)
    for attention in model.attentions:
        attention.over_chunks.implementation = "triton"
    for name, parameter in model.gpt.named_parameters():
        if part in name:
            parameter.detach().view(-1)[:40] = torch.nan
    batches = random_batches(config, attend_across=True)
    result, _ = step_gradients(model, SPARSE, batches, config, measures=True)
    stats = read_stats(model)
    assert result.grad_norm.isnan()
    assert result.loss_sum.isnan() or part == "indexer"
    assert math.isnan(stats["variance" if part == "indexer" else "recall"][0])
    assert 0 < stats["selected_keys"][0] <= 24
