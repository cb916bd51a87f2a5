"""Compares `GatedSparseAttention` with the looped oracle, Triton with the reference, and runs its examples."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import oracle
import pytest
import torch
from oracle import random_weights
from torch.utils.checkpoint import checkpoint

from gsa_kernels import GatedSparseAttention
from gsa_kernels.layer_config import GSAConfig
from gsa_kernels.rotary import YarnScaling

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, HIDDEN, EMA = 2, 13, 12, 0.014
RULE: dict[str, Any] = {"k_base": 6, "k_min": 2, "k_max": 12}
DOCUMENTS = [[0] * 4 + [1] * 6 + [2] * 3, [0] * 5 + [1] * 8]
STARTS = [[0] * 4 + [4] * 6 + [10] * 3, [0] * 5 + [5] * 8]
PARAMETERS = {
    "w_q": "q_proj.weight", "w_k": "k_proj.weight", "w_v": "v_proj.weight", "w_vg": "value_gate.weight",
    "b_vg": "value_gate.bias", "w_og": "output_gate.weight", "b_og": "output_gate.bias",
    "w_o": "o_proj.weight", "w_iq": "indexer_query.weight", "w_ik": "indexer_key.weight",
    "w_iw": "indexer_head_weight.weight", "b_j": "indexer_score_bias", "c_j": "indexer_head_weight_bias",
}  # fmt: skip
SPARSE_ONLY: dict[str, Any] = {
    "value_gate": False, "output_gate": False, "indexer_activation": "relu", "adaptive_k": "off",
}  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "choices", "packed"),
    [
        ("sparse", {}, True),
        ("sparse", {"local_window": 5, "dense_below": 6}, True),
        ("dense", {}, False),
        ("sparse", {"rope_base": 100.0, "rope_scaling": YarnScaling(4.0, 16, 3.0, 0.2)}, True),
        ("sparse", SPARSE_ONLY, False),
        ("dense", {"value_gate": False}, True),
        ("sparse", {"adaptive_k": "direct", "num_kv_heads": 1}, True),
        ("sparse", {"indexer_activation": "relu", "num_kv_heads": 4}, True),
    ],
    ids=str,
)
def test_the_layer_equals_the_oracle(
    attention: Literal["dense", "sparse"], choices: dict[str, Any], packed: bool
) -> None:
    fields = {"num_kv_heads": 2, "k_base": 4, "k_min": 2, "k_max": 7, **choices}
    config = GSAConfig(HIDDEN, 4, head_dim=6, indexer_heads=3, indexer_dim=4, **fields)
    wanted_options = oracle.LayerOptions(
        num_heads=4,
        head_dim=6,
        indexer_heads=3,
        indexer_dim=4,
        attention=attention,
        variance_ema=EMA,
        yarn=oracle.Yarn(4.0, 16, 0.1 * math.log(4) + 1, 3.0, 0.2) if "rope_scaling" in fields else None,
        **{name: value for name, value in fields.items() if name != "rope_scaling"},
    )
    weights = random_weights(wanted_options, HIDDEN, seed=7)
    layer = GatedSparseAttention(config).double()
    layer.load_state_dict(
        {PARAMETERS[name]: weight.detach() for name, weight in weights.items()}
        | {"variance_ema": torch.tensor(EMA)}
    )
    generator = torch.Generator().manual_seed(11)
    h, cotangent = torch.randn(2, BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=generator)

    ours_h, theirs_h = h.clone().requires_grad_(), h.clone().requires_grad_()
    starts = torch.tensor(STARTS, dtype=torch.int32) if packed else None
    ours = layer.forward_with_loss(ours_h, attention=attention, document_starts=starts)
    rows = [
        oracle.gsa_layer(theirs_h[b], weights, wanted_options, DOCUMENTS[b] if packed else None)
        for b in range(BATCH)
    ]
    theirs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}  # statistics and log-sum-exps are fp32
    torch.testing.assert_close(ours.output, theirs["out"], **near)
    # Rows with one causal key have neither a variance nor a KL, and do not count in the means.
    first = [[t - (STARTS[b][t] if packed else 0) < 1 for t in range(LENGTH)] for b in range(BATCH)]
    counted = ~torch.tensor(first)
    loss = theirs["kl"][counted].mean()
    torch.testing.assert_close(ours.indexer_loss.double(), loss, **near)
    assert torch.equal(ours.selection.budget.long(), theirs["budget"])
    assert layer.variance_sum[1] == counted.sum()
    torch.testing.assert_close(layer.variance_sum[0], theirs["variance"][counted].sum(), **near)
    output, cache, _ = layer(h, attention=attention, document_starts=starts)
    torch.testing.assert_close(output, ours.output)
    assert cache is None

    names = list(weights)
    theirs_total = (theirs["out"] * cotangent).sum() + loss
    wanted = torch.autograd.grad(theirs_total, [theirs_h, *weights.values()], allow_unused=True)
    ((ours.output * cotangent).sum() + ours.indexer_loss).backward()
    parameters = dict(layer.named_parameters())
    found = [ours_h.grad, *(parameters[PARAMETERS[name]].grad for name in names)]
    for name, gradient, expected in zip(["h", *names], found, wanted, strict=True):
        torch.testing.assert_close(
            gradient, expected, **near, msg=lambda text, name=name: f"d / d {name}: {text}"
        )


def step(
    layer: GatedSparseAttention, hidden: torch.Tensor, learns: bool, **mode: Any
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return output, indexer loss and all gradients. If `learns` is false, make the call that returns no loss."""
    layer.zero_grad()
    if learns:
        output, loss, _ = layer.forward_with_loss(hidden, **mode)
    else:
        output, loss = layer(hidden, **mode)[0], torch.zeros((), device=hidden.device)
    weight = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)
    ((output * weight).sum() + loss).backward()
    return output, loss, [p.grad for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("learns", "mode", "fields"),
    [
        (True, {}, {}),
        (True, {"attention": "dense"}, {"output_gate": False}),
        (False, {}, {"local_window": 16}),
    ],
)
def test_triton_and_the_reference_agree(learns: bool, mode: dict[str, Any], fields: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(3)
    config = GSAConfig(24, 4, 1, 32, indexer_heads=2, indexer_dim=16, **RULE, **fields)
    ours, wanted = (
        GatedSparseAttention(replace(config, implementation=name)).to(device)
        for name in ("triton", "reference")
    )
    wanted.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, 40, 24, device=device)
    (output, loss, gradients), (expected, expected_loss, expected_gradients) = (
        step(layer, hidden, learns, **mode) for layer in (ours, wanted)
    )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, expected_loss)
    gates = 2 * (config.value_gate + config.output_gate)
    assert len(gradients) == 4 + gates + (5 if learns else 0)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-4, atol=2e-5)


def test_the_average_of_the_variances() -> None:
    torch.manual_seed(3)
    layer = GatedSparseAttention(GSAConfig(24, 2, 2, 8, variance_ema_decay=0.75, **RULE))
    hidden = torch.randn(3, 20, 24)
    layer.update_variance_ema()
    assert layer.variance_ema == 0  # nothing was selected
    parts = [layer.forward_with_loss(part).selection.variance[:, 1:] for part in hidden.split([1, 2])]
    means = [part.mean() for part in parts]
    layer.update_variance_ema()
    first = (means[0] + 2 * means[1]) / 3
    torch.testing.assert_close(layer.variance_ema, first)
    layer(hidden[:1])
    layer.update_variance_ema()
    torch.testing.assert_close(layer.variance_ema, 0.75 * first + 0.25 * means[0], rtol=1e-2, atol=0)
    before = layer.variance_ema.clone()
    layer.eval()
    layer.forward_with_loss(hidden)
    layer.update_variance_ema()
    assert torch.equal(layer.variance_ema, before)
    assert layer.bfloat16().variance_ema.dtype == torch.float32
    assert layer.q_proj.weight.dtype == torch.bfloat16


def test_recomputation_changes_nothing() -> None:
    torch.manual_seed(3)
    layer = GatedSparseAttention(GSAConfig(24, 2, 2, 8, **RULE))
    x = torch.randn(2, 20, 24)
    found = []
    for recompute in (False, True):
        layer.zero_grad()
        layer.variance_ema.zero_()
        if recompute:
            result = checkpoint(layer.forward_with_loss, x, use_reentrant=False)
        else:
            result = layer.forward_with_loss(x)
        (result.output.square().sum() + result.indexer_loss).backward()
        layer.update_variance_ema()
        found.append([result.indexer_loss, layer.variance_ema.clone(), *(p.grad for p in layer.parameters())])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_the_call_that_the_authors_print() -> None:
    """The call is the authors' quick start (alfredcs/Gated-Sparse-Attention, README-quickstart.md) with our import."""
    config = GSAConfig(
        hidden_size=1024, num_heads=8, num_kv_heads=2, k_base=256, value_gate=True, output_gate=True
    )
    gsa = GatedSparseAttention(config)
    x = torch.randn(1, 512, 1024)
    positions = torch.arange(512).unsqueeze(0)
    output, _, _ = gsa(x, positions=positions)
    assert output.shape == (1, 512, 1024)
    assert bool(output.isfinite().all())


def test_a_layer_of_fields_matches_their_config() -> None:
    assert GatedSparseAttention(hidden_size=24, num_heads=4, num_kv_heads=2, **RULE).config == GSAConfig(
        hidden_size=24, num_heads=4, num_kv_heads=2, **RULE
    )
    with pytest.raises(ValueError, match="config is given with k_base; pass a config, or fields of one"):
        GatedSparseAttention(GSAConfig(), k_base=8)


def test_fields_of_earlier_names_are_refused_with_the_new_ones() -> None:
    with pytest.raises(ValueError, match="d_model is now hidden_size; n_heads is now num_heads: rename it"):
        GSAConfig(d_model=24, n_heads=4)  # type: ignore[call-arg]


def test_a_dense_layer_without_gates_is_the_attention_of_llama() -> None:
    """Names, RoPE and heads match, so that the weights of such a model can be loaded."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(3)
    theirs_config = llama.LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    )
    theirs = llama.LlamaAttention(theirs_config, layer_idx=0)
    config = GSAConfig(24, 4, 2, 8, value_gate=False, output_gate=False, **RULE)
    ours = GatedSparseAttention(config)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith(("indexer", "variance")) for name in missing)
    x, positions = torch.randn(2, 9, 24), torch.arange(3, 12)[None]
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    rope = llama.LlamaRotaryEmbedding(theirs_config)(x, positions)
    wanted, wanted_weights = theirs(x, rope, attention_mask=mask)
    output, _, weights = ours(x, positions=positions[0], attention="dense", need_weights=True)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(weights, wanted_weights)


def test_what_a_layer_starts_with() -> None:
    layer = GatedSparseAttention(GSAConfig(24, 2, 2, gate_bias_init=0.5, **RULE))
    assert layer.config.head_size == 12
    assert layer.value_gate.bias.eq(0.5).all()
    assert layer.output_gate.bias.eq(0.5).all()
    assert GatedSparseAttention(GSAConfig(24, 2, 2, **RULE)).output_gate.bias.eq(0).all()
    bare = GatedSparseAttention(GSAConfig(24, 2, 2, **RULE, **SPARSE_ONLY))
    assert not any("gate" in name or "bias" in name for name, _ in bare.named_parameters())
    assert sum(name.startswith("indexer") for name, _ in layer.named_parameters()) == 5
    paper = GSAConfig()
    assert (paper.hidden_size, paper.num_heads, paper.num_kv_heads, paper.head_size) == (4096, 32, 8, 128)
    assert (paper.k_min, paper.k_base, paper.k_max) == (256, 2048, 4096)
    assert (paper.indexer_heads, paper.indexer_dim, paper.gate_bias_init) == (4, 64, 0)


def test_a_layer_made_on_the_meta_device() -> None:
    layer = GatedSparseAttention(GSAConfig(24, 2, 2, **RULE))
    with torch.device("meta"):
        empty = GatedSparseAttention(layer.config)
    empty.to(torch.bfloat16).to_empty(device="cpu").float().load_state_dict(layer.state_dict())
    assert empty.variance_sum.tolist() == [0, 0]  # not in the state_dict
    assert empty.variance_ema.dtype == torch.float32
    x = torch.randn(1, 9, 24)
    assert torch.equal(empty(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3 and num_kv_heads 2"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"hidden_size": 22, "num_heads": 4}, "hidden_size is 22 and num_heads 4"),
        ({"head_dim": 7}, "head_dim is 7; pass an even number"),
        ({"indexer_activation": "tanh"}, "indexer_activation is 'tanh'"),
        ({"k_base": 1}, "k_base is 1 with k_min 2 and k_max 12; pass k_min <= k_base <= k_max"),
        ({"k_min": 0}, "k_min is 0"),
        ({"adaptive_k": True}, "adaptive_k is True"),
        ({"variance_ema_decay": 1.0}, "variance_ema_decay is 1.0"),
        ({"rope_base": 0.0}, "rope_base is 0.0"),
        ({"rope_base": 1.0, "rope_scaling": YarnScaling(4.0, 16)}, "rope_base is 1.0 with rope_scaling"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
        (
            {"implementation": "triton", "head_dim": 48},
            "head_dim is 48, which the kernels do not take; pass one of",
        ),
        (
            {"implementation": "triton", "head_dim": 32, "indexer_dim": 8},
            "indexer_dim is 8, .* pass 16 to 128",
        ),
    ],
)
def test_what_a_config_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GSAConfig(**{"hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, **RULE, **fields})


def test_what_a_layer_refuses() -> None:
    config = GSAConfig(24, 4, 2, 8, **RULE)
    layer = GatedSparseAttention(config)
    with pytest.raises(ValueError, match="x has shape"):
        layer(torch.zeros(1, 5, 23))
    with pytest.raises(ValueError, match="attention is 'full'"):
        layer(torch.zeros(1, 5, 24), attention="full")
    # An unsupported field raises an error only where the kernels would run.
    assert config.implementation_on(torch.device("cpu")) == "reference"
    with pytest.raises(
        ValueError, match=r"head_dim is 8, which the kernels do not take; .* implementation='reference'"
    ):
        config.implementation_on(torch.device("cuda"))


def test_the_code_in_the_docs_runs() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/kernels.md").read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["weights"].shape == (2, 4, 128, 128)
    assert names["result"].indexer_loss > 0
    assert names["layer"].variance_ema > 0
    assert names["cache"].length == 160
    assert names["kl_of_rows"].shape == (2, 128)
    assert names["indexer"].keys.grad is not None
    torch.testing.assert_close(names["decoded"], names["out"][:, -1])
    assert names["variance_ema"] > 0


EXAMPLE = ROOT / "examples" / "gsa_in_your_model.py"


def test_the_example_wants_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "ten"])
    with pytest.raises(SystemExit, match="ten: give a number of steps"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_example_learns() -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "20"],
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
