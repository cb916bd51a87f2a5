"""`GatedSparseAttention` against the looped oracle, Triton's against the reference's, and the example that uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import oracle
import pytest
import torch
from composition import random_weights

from gsa_kernels.layer import GatedSparseAttention, LayerOptions, LayerOutput
from gsa_kernels.types import BudgetRule

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, HIDDEN, EMA = 2, 13, 12, 0.014
DOCUMENTS = [[0] * 4 + [1] * 6 + [2] * 3, [0] * 5 + [1] * 8]
STARTS = [[0] * 4 + [4] * 6 + [10] * 3, [0] * 5 + [5] * 8]
PARAMETERS = {
    "w_q": "query.weight",
    "w_k": "key.weight",
    "w_v": "value.weight",
    "w_vg": "value_gate.weight",
    "b_vg": "value_gate.bias",
    "w_og": "output_gate.weight",
    "b_og": "output_gate.bias",
    "w_o": "output.weight",
    "w_iq": "indexer_query.weight",
    "w_ik": "indexer_key.weight",
    "w_iw": "indexer_head_weight.weight",
    "b_j": "score_bias",
    "c_j": "head_weight_bias",
}


@pytest.mark.parametrize(
    ("attention", "shared", "packed"),
    [
        ("sparse", {}, True),
        ("sparse", {"selection_block": 4, "local_window": 5}, True),
        ("dense", {}, False),
    ],
)
def test_the_layer_equals_the_oracle(
    attention: Literal["dense", "sparse"], shared: dict[str, int], packed: bool
) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "indexer_heads": 3, "indexer_dim": 4, **shared}
    rule = {"k_base": 4, "k_min": 2, "k_max": 7}
    wanted_options = oracle.LayerOptions(**sizes, **rule, attention=attention, variance_ema=EMA)
    weights = random_weights(wanted_options, HIDDEN, seed=7)
    layer = GatedSparseAttention(
        LayerOptions(HIDDEN, rule=BudgetRule(**rule), **sizes), implementation="reference"
    ).double()
    layer.load_state_dict(
        {PARAMETERS[name]: weight.detach() for name, weight in weights.items()}
        | {"variance_ema": torch.tensor(EMA)}
    )
    generator = torch.Generator().manual_seed(11)
    h, cotangent = torch.randn(2, BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=generator)

    ours_h, theirs_h = h.clone().requires_grad_(), h.clone().requires_grad_()
    starts = torch.tensor(STARTS, dtype=torch.int32) if packed else None
    ours = layer(ours_h, attention=attention, document_starts=starts)
    rows = [
        oracle.gsa_layer(theirs_h[b], weights, wanted_options, DOCUMENTS[b] if packed else None)
        for b in range(BATCH)
    ]
    theirs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    visible = [[t + 1 - (STARTS[b][t] if packed else 0) for t in range(LENGTH)] for b in range(BATCH)]
    block = shared.get("selection_block", 1)
    counted = sum(seen >= 2 for of_sequence in visible for seen in of_sequence[::block])
    assert 0 < counted < theirs["kl"].numel()
    theirs_mean = theirs["kl"].sum() / counted
    near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}  # statistics and log-sum-exps are fp32
    torch.testing.assert_close(ours.out, theirs["out"], **near)
    torch.testing.assert_close(ours.indexer_loss.double(), theirs_mean, **near)
    assert torch.equal(ours.selection.budget.long(), theirs["budget"])
    assert layer.variance_sum[1] == counted
    torch.testing.assert_close(layer.variance_sum[0], theirs["variance"].sum(), **near)

    names = list(weights)
    theirs_total = (theirs["out"] * cotangent).sum() + theirs_mean
    wanted = torch.autograd.grad(theirs_total, [theirs_h, *weights.values()], allow_unused=True)
    ((ours.out * cotangent).sum() + ours.indexer_loss).backward()
    parameters = dict(layer.named_parameters())
    found = [ours_h.grad, *(parameters[PARAMETERS[name]].grad for name in names)]
    for name, gradient, expected in zip(["h", *names], found, wanted, strict=True):
        torch.testing.assert_close(
            gradient, expected, **near, msg=lambda text, name=name: f"d / d {name}: {text}"
        )


def step(
    layer: GatedSparseAttention, hidden: torch.Tensor, **mode: Any
) -> tuple[LayerOutput, list[torch.Tensor]]:
    layer.zero_grad()
    result = layer(hidden, **mode)
    loss = (result.out * torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)).sum()
    if result.indexer_loss is not None:
        loss = loss + result.indexer_loss
    loss.backward()
    return result, [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("mode", "shared"),
    [
        ({}, {}),
        ({"attention": "dense"}, {}),
        ({"learns": False}, {"selection_block": 16, "local_window": 16}),
    ],
)
def test_triton_and_the_reference_agree(mode: dict[str, Any], shared: dict[str, int]) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(3)
    options = LayerOptions(24, 4, 1, 32, BudgetRule(6, 2, 12), indexer_heads=2, indexer_dim=16, **shared)
    ours = GatedSparseAttention(options, implementation="triton").to(device)
    wanted = GatedSparseAttention(options, implementation="reference").to(device)
    wanted.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, 40, 24, device=device)
    (result, gradients), (expected, expected_gradients) = (
        step(layer, hidden, **mode) for layer in (ours, wanted)
    )
    torch.testing.assert_close(result.out, expected.out)
    assert (result.indexer_loss is None) == (expected.indexer_loss is None) == (mode.get("learns") is False)
    if result.indexer_loss is not None:
        torch.testing.assert_close(result.indexer_loss, expected.indexer_loss)
    assert len(gradients) == (13 if "learns" not in mode else 8)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-4, atol=2e-5)


def test_the_average_of_the_variances() -> None:
    torch.manual_seed(3)
    options = LayerOptions(24, 2, 2, 8, BudgetRule(6, 2, 12), variance_ema_decay=0.75)
    layer = GatedSparseAttention(options, implementation="reference")
    hidden = torch.randn(3, 20, 24)
    layer.update_variance_ema()
    assert layer.variance_ema == 0  # nothing was selected
    means = [layer(part).selection.variance[:, 1:].mean() for part in hidden.split([1, 2])]
    layer.update_variance_ema()
    first = (means[0] + 2 * means[1]) / 3
    torch.testing.assert_close(layer.variance_ema, first)
    layer(hidden[:1])
    layer.update_variance_ema()
    torch.testing.assert_close(layer.variance_ema, 0.75 * first + 0.25 * means[0], rtol=1e-2, atol=0)
    before = layer.variance_ema.clone()
    layer.eval()
    layer(hidden)
    layer.update_variance_ema()
    assert torch.equal(layer.variance_ema, before)
    assert layer.bfloat16().variance_ema.dtype == torch.float32
    assert layer.query.weight.dtype == torch.bfloat16


def test_what_a_layer_refuses() -> None:
    rule = BudgetRule(6, 2, 12)
    with pytest.raises(ValueError, match="num_heads is 3"):
        LayerOptions(24, 3, 2, 8, rule)
    with pytest.raises(ValueError, match="head_dim is 7"):
        LayerOptions(24, 4, 2, 7, rule)
    layer = GatedSparseAttention(LayerOptions(24, 4, 2, 8, rule), implementation="reference")
    with pytest.raises(ValueError, match="hidden has shape"):
        layer(torch.zeros(1, 5, 23))
    with pytest.raises(ValueError, match="attention is 'full'"):
        layer(torch.zeros(1, 5, 24), attention="full")


@pytest.mark.slow
def test_the_example_learns() -> None:
    example = ROOT / "examples" / "gsa_in_your_model.py"
    result = subprocess.run(
        [sys.executable, str(example), "20"],
        env={"PYTHONPATH": str(ROOT / "kernels"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^step (\d+): loss ([\d.]+), indexer loss ([\d.]+)$", result.stdout, re.MULTILINE)
    assert [line[0] for line in lines] == ["10", "20"]
    assert float(lines[1][1]) < float(lines[0][1]) < 5.5  # log 256 at the start
    assert float(lines[1][2]) > 0
