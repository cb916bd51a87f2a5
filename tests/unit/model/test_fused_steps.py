"""Tests that kernels and torch give the same loss, gradients and statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gsa_kernels import api, limits
from gsa_kernels.indexer.score_inputs import score_inputs
from gsa_kernels.loss import op as loss_op
from gsa_kernels.loss.triton_launch import Blocks, Inputs
from gsa_kernels.types import Geometry, Indexer, Selection
from gsa_train.config import PhaseConfig, RopeScalingConfig
from gsa_train.config.kernel_checks import unsupported_by_kernels
from gsa_train.model.mcore import config as mcore_config
from gsa_train.model.mcore.config import uses_fused_ops
from gsa_train.model.probes import query_sample
from gsa_train.phases import enter_phase
from helpers.fused_steps import VARIANTS, assert_same_step, one_step, take_over_of_neighbours
from helpers.single_rank import (
    DENSE,
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

SELECTIONS = ("window, rope and reuse", "sparse-only", "lists", "plain and norm", "qsa and lists")
CASES = [  # each option once, because the interpreter is slow
    *((name, SPARSE) for name in ("paper", *SELECTIONS)),
    *(("learned temperature", WARM_UP), ("gated-only", DENSE_ALL)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "phase"), CASES, ids=[f"{v}-{p.name}" for v, p in CASES])
def test_one_step_matches_the_reference(variant: str, phase: PhaseConfig) -> None:
    gsa = VARIANTS[variant]
    assert_same_step(one_step(gsa, phase, fused=True), one_step(gsa, phase, fused=False))


IN_RUNS = [CASES[0], *CASES[3:5], CASES[-2]]
"""All causal keys, bits and lists."""


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "phase"), IN_RUNS, ids=[f"{v}-{p.name}" for v, p in IN_RUNS])
def test_runs_of_queries_make_the_step_of_the_whole_sequence(
    variant: str, phase: PhaseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test also covers the sampled queries, here 4 to 7 and 16 to 19."""
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    gsa, cuts = VARIANTS[variant], (0, 7, 12, 24)
    whole = one_step(gsa, phase, fused=False)
    for fused in (False, True):
        runs = one_step(gsa, phase, fused, cuts=cuts)
        take_over_of_neighbours(whole, runs)
        assert_same_step(runs, whole)


@pytest.mark.slow
def test_the_loss_takes_the_sums_that_selection_and_attention_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of each run of queries gets them, with a learned temperature, a window and recomputation."""
    for name, value in {"STRETCH": 4, "STRETCHES": 2, "GROUP": 2}.items():
        monkeypatch.setattr(query_sample, name, value)
    blocks = Blocks(32, 32, 4, 32, 4, segment=32)
    seen: list[Inputs] = []
    monkeypatch.setattr(loss_op, "choose_blocks", lambda inputs: (seen.append(inputs), blocks)[1])
    gsa = {"indexer_temperature": "learned", "local_window": 3}
    whole = one_step(gsa, SPARSE, fused=False, heads=8)
    runs = one_step(gsa, SPARSE, fused=True, recompute="selective", cuts=(0, 7, 24), heads=8)
    assert sorted(inputs.q_idx.shape[1] for inputs in seen) == [7, 17]
    for inputs in seen:
        assert inputs.log_sum is not None
        assert inputs.log_sum.shape == inputs.q_idx.shape[:2]
        assert inputs.target_sum == 8
    take_over_of_neighbours(whole, runs)
    assert_same_step(runs, whole)


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


def test_auto_takes_no_key_lists_in_cuda_graphs_and_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `auto` takes key lists at these small lengths. Above the longest packed mask it always does."""
    for name, value in {"GATHERED_FROM_TOKENS": 16, "GATHERED_BUDGETS": 1}.items():
        monkeypatch.setattr(limits, name, value)
    config = tiny_config([SPARSE], model={"head_dim": 32, "num_layers": 1}, gsa={"indexer_dim": 16})
    model = tiny_model(config)
    over_chunks, formats, select = model.attentions[0].over_chunks, [], api.select

    def recorded(*arguments: Any, **how: Any) -> Selection:
        formats.append((selection := select(*arguments, **how)).format)
        return selection

    monkeypatch.setattr(api, "select", recorded)
    over_chunks.implementation = "triton"
    cases = ((SPARSE, False, 4096), (SPARSE, True, 4096), (WARM_UP, False, 4096), (SPARSE, True, 8))
    for phase, captured, longest in cases:
        enter_phase(model, phase)
        over_chunks.captured = captured
        monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", longest)
        token_losses(model, random_batches(config)[0])
    assert formats == ["key_lists", "packed_mask", "packed_mask", "key_lists"]


def test_a_named_kernel_that_cannot_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for kernel in ("auto", "gathered"):
        tiny_model(tiny_config([SPARSE], gsa={"attention_kernel": kernel}))
    (warning,) = [record.message for record in caplog.records if "attention_kernel" in record.message]
    assert warning == "gsa.attention_kernel = gathered: no fused kernel runs sparse attention here"


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


# --- `train.fused_ops`: the rest of the layer by fused kernels ------------------------------------------------


def fused_ops_step(monkeypatch: pytest.MonkeyPatch, fused: bool, phase: Any, **sections: Any) -> Any:
    monkeypatch.setattr(mcore_config, "uses_fused_ops", lambda config, device: fused)
    sections["model"] = {"head_dim": 32, "init_std": 0.2, **sections.get("model", {})}
    config = tiny_config([phase], **sections)
    model = tiny_model(config, variance_ema=0.02)
    names = [name for name, _ in model.gpt.named_parameters()]
    result, gradients = step_gradients(model, phase, random_batches(config), config, measures=True)
    return result, gradients, read_stats(model), names


RECOMMENDED = {"indexer_activation": "relu", "indexer_norm": True, "indexer_rope": True}
FUSED_OPS = {
    "GSA": (SPARSE, {}),
    "warm-up": (WARM_UP, {}),
    "G2 only, tied": (SPARSE, {"gsa": {"output_gate": False}, "model": {"tie_embeddings": True}}),
    "standard": (DENSE, {"gsa": {"attention": "dense", "value_gate": False, "output_gate": False}}),
    "qk_norm": (SPARSE, {"model": {"qk_norm": True}}),
    "qkv_bias": (SPARSE, {"model": {"qkv_bias": True}}),
    "half of the channels turn": (SPARSE, {"model": {"rotary_percent": 0.5}}),
    "YaRN": (
        SPARSE,
        {
            "model": {"rope_base": 100.0, "rope_scaling": RopeScalingConfig("yarn", 4.0, 16)},
            "gsa": {"indexer_rope": True},
        },
    ),
    "the indexer's norms": (SPARSE, {"gsa": {"indexer_norm": True, "indexer_activation": "plain"}}),
    "the recommended indexer, warm-up": (WARM_UP, {"gsa": RECOMMENDED}),
    "the recommended indexer, recomputed layers": (
        SPARSE,
        {"gsa": RECOMMENDED, "train": {"recompute": "full"}},
    ),
    "recomputed layers": (SPARSE, {"train": {"recompute": "full"}}),
}


@pytest.mark.parametrize("case", FUSED_OPS)
def test_a_step_matches_megatron_core(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    phase, sections = FUSED_OPS[case]
    plain, expected, plain_stats, plain_names = fused_ops_step(monkeypatch, False, phase, **sections)
    result, gradients, stats, names = fused_ops_step(monkeypatch, True, phase, **sections)
    assert names == plain_names
    torch.testing.assert_close(result.loss_sum, plain.loss_sum, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.grad_norm, plain.grad_norm, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert error < 1e-4, (name, error)
    for name, values in plain_stats.items():
        assert stats[name] == pytest.approx(values, rel=1e-4, nan_ok=True), name


def test_which_device_fuses() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def config(value: str) -> Any:
        base = tiny_config()
        return dataclasses.replace(base, train=dataclasses.replace(base.train, fused_ops=value))

    assert [uses_fused_ops(config(value), gpu) for value in ("auto", "triton", "none")] == [True, True, False]
    assert [uses_fused_ops(config(value), cpu) for value in ("auto", "none")] == [False, False]
    with pytest.raises(ValueError, match=r"train.fused_ops = triton: there is no CUDA device"):
        uses_fused_ops(config("triton"), cpu)
