"""Compares the plain torch model of gsa_hf with explicit loops, and tests the code around its attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from oracle import LayerOptions, Yarn, gsa_layer

from gsa_hf import DENSE_LAYER
from helpers.hf import MODELS, PAPER, YARN, distinct_tokens, tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    **PAPER,
    "window": {"local_window": 3, "adaptive_k": "direct"},
    "window and rope": {"local_window": 5, "indexer_rope": True},
    "temperature": {"indexer_temperature": "learned"},
    "YaRN": {"indexer_rope": True, "rope_parameters": YARN},
    "dense below": {"dense_below": 20},
}


NAMES = {
    **{f"w_{name}": f"{name}_proj.weight" for name in "qkvo"},
    "w_vg": "value_gate_proj.weight",
    "b_vg": "value_gate_proj.bias",
    "w_og": "output_gate_proj.weight",
    "b_og": "output_gate_proj.bias",
    "w_iq": "indexer.wq.weight",
    "w_ik": "indexer.wk.weight",
    "w_iw": "indexer.weights_proj.weight",
    "b_j": "indexer.score_bias",
    "c_j": "indexer.weights_proj.bias",
}
"""Names of the loops' weights in a layer."""
NO_INDEXER = {"w_iq": (8, 32), "w_ik": (8, 32), "w_iw": (1, 32), "b_j": (1,), "c_j": (1,)}
"""Shapes for a dense layer, because the loops always compute scores."""
SAME = (
    *("value_gate", "output_gate", "indexer_activation", "adaptive_k", "dense_below", "indexer_rope"),
    "local_window",
)
"""Fields that the loops name as the config does."""


def oracle_of(model: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the first layer's attention by loops, from its input [L, d]."""
    config, attention = model.config, model.model.layers[0].self_attn
    indexer, state, rope = attention.indexer, attention.state_dict(), config.rope_parameters
    weights = {key: state[name].double() for key, name in NAMES.items() if name in state}
    more: dict[str, Any] = {"attention": "sparse"}
    if indexer is None:
        weights |= {key: torch.zeros(shape).double() for key, shape in NO_INDEXER.items()}
        more = {"attention": "dense", "variance_ema": 0.0, "inverse_temperature": 1.0}
    else:
        temperature = torch.as_tensor(indexer.inverse_temperature()).detach()
        more |= {"variance_ema": float(indexer.variance_ema), "inverse_temperature": float(temperature)}
    options = LayerOptions(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        1 if indexer is None else config.index_n_heads,
        *(config.index_head_dim, config.index_topk, config.k_min, config.k_max),
        rope_base=rope["rope_theta"],
        yarn=Yarn(4.0, 16, 0.1 * math.log(4) + 1, 3.0, 0.2) if rope["rope_type"] == "yarn" else None,
        **{name: getattr(config, name) for name in SAME},
        **more,
    )
    return gsa_layer(hidden.double(), weights, options)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_attention_and_indexer_loss_match_the_loops(name, attention, monkeypatch):
    monkeypatch.setitem(MODELS, "variant", {**VARIANTS[name], "num_hidden_layers": 1})
    if VARIANTS[name].get("layer_types"):
        monkeypatch.setitem(MODELS["variant"], "layer_types", [DENSE_LAYER])
    model = tiny_model("variant", attention=attention)
    if model.config.indexer_temperature == "learned":
        torch.nn.init.constant_(model.model.layers[0].self_attn.indexer.log_inverse_temperature, 0.7)
    seen: list[torch.Tensor] = []
    attend = model.model.layers[0].self_attn
    attend.register_forward_hook(lambda _, given, out: seen.extend((given[0], out[0])))
    length = 26
    loss = model.model(distinct_tokens(1, length), output_indexer_loss=True).indexer_loss
    hidden, out = seen
    expected = oracle_of(model, hidden[0].detach())
    torch.testing.assert_close(out[0].double(), expected["out"], rtol=2e-5, atol=2e-5)
    if attend.indexer is None:
        assert loss is None
        return
    assert expected["budget"].unique().numel() > 3 or model.config.adaptive_k == "off"
    # The first query has one causal key, and therefore no loss.
    torch.testing.assert_close(loss.double(), expected["kl"][1:].mean(), rtol=1e-4, atol=1e-6)


def test_attentions_and_hidden_states_are_returned() -> None:
    model, tokens = tiny_model(), distinct_tokens(1, 30)
    with torch.no_grad():
        outputs = model(tokens, output_attentions=True, output_hidden_states=True)
    assert len(outputs.attentions) == 2
    assert len(outputs.hidden_states) == 3
    for probs in outputs.attentions:
        torch.testing.assert_close(probs.sum(-1), torch.ones(1, 4, 30))


@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    model, lengths, room = tiny_model(name), (30, 23, 9), 30
    rows = [distinct_tokens(1, length, seed=length) for length in lengths]
    tokens, mask = torch.zeros(3, room, dtype=torch.long), torch.zeros(3, room, dtype=torch.long)
    places = [slots_of_tokens(side, length, room) for length in lengths]
    for row, (place, alone) in enumerate(zip(places, rows, strict=True)):
        tokens[row, place], mask[row, place] = alone[0], 1
    with torch.no_grad():
        together = model(tokens, attention_mask=mask).logits
        for row, (place, alone) in enumerate(zip(places, rows, strict=True)):
            torch.testing.assert_close(together[row, place], model(alone).logits[0], rtol=1e-4, atol=1e-4)


def slots_of_tokens(side: str, length: int, room: int) -> torch.Tensor:
    if side == "between":
        return torch.randperm(room, generator=torch.Generator().manual_seed(length))[:length].sort().values
    return torch.arange(length) + (room - length if side == "left" else 0)


@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_positions_that_start_again_are_documents(name: str, attention: str) -> None:
    """Documents need no cache and no mask. With either, transformers lets them attend to each other."""
    model = tiny_model(name, attention=attention)
    rows = [distinct_tokens(1, length, seed=length) for length in (13, 17)]
    positions = torch.cat([torch.arange(13), torch.arange(17)])[None]
    with torch.no_grad():
        packed = model(torch.cat(rows, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(row).logits for row in rows], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    ones = torch.ones_like(positions)
    for options in ({}, {"attention_mask": ones}, {"attention_mask": ones, "use_cache": False}):
        with torch.no_grad():
            together = model(torch.cat(rows, 1), position_ids=positions, **options).logits
        torch.testing.assert_close(together[:, :13], alone[:, :13], rtol=1e-4, atol=1e-4)
        assert (together[:, 13:] - alone[:, 13:]).abs().max() > 0.1


def test_bf16_keeps_the_average_and_stays_close() -> None:
    model, tokens = tiny_model(index_topk=64, k_min=64, k_max=64), distinct_tokens(2, 30)
    with torch.no_grad():
        exact = model(tokens).logits
        half = model.to(torch.bfloat16)(tokens).logits
    assert model.model.layers[0].self_attn.indexer.variance_ema.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert (exact - half).abs().max() < 0.05 * exact.abs().max()


def test_logits_to_keep() -> None:
    model, tokens = tiny_model(), distinct_tokens(2, 12)
    with torch.no_grad():
        whole, last = model(tokens).logits, model(tokens, logits_to_keep=3).logits
        some = model(tokens, logits_to_keep=torch.tensor([0, 5])).logits
    torch.testing.assert_close(last, whole[:, -3:])
    torch.testing.assert_close(some, whole[:, [0, 5]])


def test_the_kernels_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model(attention="gsa")
    with pytest.raises(ValueError, match="'gsa' with the model on cpu; move it to a CUDA device"):
        model(distinct_tokens(1, 4))
