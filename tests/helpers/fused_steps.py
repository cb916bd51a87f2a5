"""Takes one step of a tiny model by the kernels or in plain torch, and compares both."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from gsa_kernels.fused.split_rotate_gate import op as prologue_op
from gsa_kernels.indexer.split_op import fused_split_projection
from gsa_train.config import PhaseConfig
from gsa_train.distributed.context_sharding import QueryChunk
from helpers.single_rank import random_batches, read_stats, step_gradients, tiny_config, tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "gated-only": {"attention": "dense"},
    "window, rope and reuse": {
        "local_window": 5,
        "indexer_rope": True,
        "selection_reuse": 2,
        "adaptive_k": "direct",
    },
    "sparse-only": {
        "indexer_activation": "relu",
        "value_gate": False,
        "output_gate": False,
        "adaptive_k": "off",
    },
    "plain and norm": {"indexer_activation": "plain", "indexer_norm": True},
    "qsa and lists": {"indexer_activation": "qsa", "adaptive_k": "off", "attention_kernel": "gathered"},
    "learned temperature": {"indexer_temperature": "learned"},
    "lists": {"attention_kernel": "gathered", "local_window": 3},
}


def one_step(
    gsa: dict[str, Any],
    phase: PhaseConfig,
    fused: bool,
    recompute: str = "none",
    cuts: Sequence[int] = (0, 24),
    heads: int = 4,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, list[float]], list[torch.Tensor]]:
    """Return loss, gradients, statistics, averages and clipped weights, by the kernels if `fused`, else by torch."""
    layers = gsa.get("selection_reuse", 1)  # the interpreter is slow
    config = tiny_config(
        [phase],
        model={"num_layers": layers, "num_heads": heads, "head_dim": 32, "init_std": 0.2},
        gsa={"indexer_dim": 16, "indexer_heads": 2, **gsa},
        train={"seq_len_tokens": 24, "global_batch_size": 2, "recompute": recompute},
    )
    # This threshold is not sensible, but it scales heads.
    config = replace(config, train=replace(config.train, qk_clip=2.0))
    model = tiny_model(config, variance_ema=0.01)
    if fused:
        for attention in model.attentions:
            attention.over_chunks.implementation = "triton"
            attention.heads_op = prologue_op.fused_split_rotate_gate
            if attention.indexer is not None:
                attention.indexer.split_op = fused_split_projection
    if len(cuts) > 2:  # as under context parallelism, with all chunks on this rank
        chunks = [QueryChunk(slice(start, stop), start, stop) for start, stop in pairwise(cuts)]
        for attention in model.attentions:
            attention.over_chunks.chunks = lambda length: chunks  # type: ignore[method-assign]
    batches = random_batches(config)
    result, gradients = step_gradients(model, phase, batches, config, measures=True)
    averages = [a.variance.ema.clone() for a in model.attentions if a.variance is not None]
    clipped = [attention.linear_qkv.weight.detach() for attention in model.attentions]
    return result.loss_sum, gradients, read_stats(model), averages + clipped


def take_over_of_neighbours(of: tuple, into: tuple) -> None:
    """Copy the statistics that compare neighbours, but not across runs of queries."""
    for name in ("adjacent_overlap", "union_ratio_32"):
        into[2].pop(name, None)
        if name in of[2]:
            into[2][name] = of[2][name]


def assert_same_step(fused: tuple, reference: tuple) -> None:
    loss, gradients, stats, averages = fused
    expected_loss, expected_gradients, expected_stats, expected_averages = reference
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, expected in expected_gradients.items():
        error = (gradients[name] - expected).norm() / expected.norm()
        assert error < 1e-4, (name, error)
    counted = stats.keys() - {"union_density"}  # the reference has no lists to count
    assert counted == expected_stats.keys(), counted ^ expected_stats.keys()
    for name, expected in expected_stats.items():
        if name == "max_activation_token":  # equal neighbouring tokens have equal values up to rounding
            continue
        assert stats[name] == pytest.approx(expected, rel=1e-4, nan_ok=True), (name, stats[name], expected)
    torch.testing.assert_close(averages, expected_averages, rtol=1e-5, atol=0)
