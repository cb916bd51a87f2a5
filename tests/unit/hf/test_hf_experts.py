"""Tests mixtures of experts in transformers: routing by token, whatever computes the products, and errors."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_hub.errors import StrictDataclassClassValidationError

from gsa_eval.convert.hf_config import from_hf_config
from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_hf.decoding import FusedDecoder
from gsa_hf.experts_gsa import GSASparseMLP
from gsa_train.config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.4,
    "index_n_heads": 2, "index_head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0],
    "routed_scaling_factor": 2.5,
}  # fmt: skip
TOKENS = torch.arange(20).view(2, 10)


def model(implementation: str = "eager", **fields: Any) -> GSAForCausalLM:
    torch.manual_seed(1)
    config = GSAConfig(**{**SIZES, **fields})
    config._experts_implementation = implementation
    return GSAForCausalLM(config)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_every_token_gets_its_experts_by_their_weights(score: str) -> None:
    layer = model(scoring_func=score, router_bias=True).model.layers[1].mlp
    assert isinstance(layer, GSASparseMLP)
    assert not isinstance(model().model.layers[0].mlp, GSASparseMLP)
    bias = layer.gate.e_score_correction_bias
    assert bias is not None
    bias.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0, -5.0, 0.0]))  # every token takes expert 1, and none takes 4
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = layer(x)
        for row in range(2):
            for place in range(5):
                h = x[row, place]
                logits = layer.gate.weight @ h
                scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
                best = sorted(range(6), key=lambda expert: -(scores[expert] + bias[expert]).item())[:2]
                assert 1 in best
                out = layer.shared_experts(h)
                for expert in best:
                    gate, up = (layer.experts.gate_up_proj[expert] @ h).chunk(2)
                    made = layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                    out = out + 2.5 * scores[expert] / scores[best].sum() * made
                torch.testing.assert_close(found[row, place], out, rtol=1e-5, atol=1e-5)


def test_how_experts_are_multiplied_changes_nothing() -> None:
    """All implementations of transformers give the same values and gradients."""
    found = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        made = model(implementation)
        made(TOKENS, labels=TOKENS).loss.backward()
        gradients = {name: each.grad for name, each in made.named_parameters() if each.grad is not None}
        found[implementation] = made(TOKENS).logits, gradients
    logits, gradients = found.pop("eager")
    assert any(".mlp.gate." in name for name in gradients)
    for others, of_others in found.values():
        torch.testing.assert_close(others, logits, rtol=1e-5, atol=1e-5)
        assert of_others.keys() == gradients.keys()
        for name, each in gradients.items():
            torch.testing.assert_close(of_others[name], each, rtol=1e-4, atol=1e-5)


def test_a_model_with_experts_saves_loads_and_generates(tmp_path: Any) -> None:
    made = model(router_bias=True, scoring_func="sigmoid").eval()
    made.save_pretrained(tmp_path)
    back = GSAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    bias = back.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias is not None
    assert bias.dtype == torch.float32  # small steps would be rounded away
    exact = GSAForCausalLM.from_pretrained(tmp_path)
    whole = exact.generate(TOKENS[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    again = exact.generate(TOKENS[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=False)
    assert whole.tolist() == again.tolist()


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="num_experts is 6; decode by the model"):
        FusedDecoder(model(layer_types=["full_attention"] * 3))
    for fields, message in (
        ({"norm_topk_prob": False}, "norm_topk_prob is False; pass True"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; pass 1 to num_experts 6"),
    ):
        with pytest.raises(StrictDataclassClassValidationError, match=message):
            GSAConfig(**{**SIZES, **fields})
    message = r"mlp_only_layers = \[1\]: in training the layers with experts have a fixed interval"
    with pytest.raises(ValueError, match=message):
        from_hf_config(GSAConfig(**{**SIZES, "num_hidden_layers": 4, "mlp_only_layers": [1]}))


@pytest.mark.parametrize(
    ("dense", "first", "interval"),
    [([], 0, 1), ([0], 1, 1), ([1, 3], 0, 2), ([0, 2], 1, 2), ([0, 1, 2], 3, 4)],
)
def test_which_layers_have_experts_is_read_back(dense: list[int], first: int, interval: int) -> None:
    config = from_hf_config(GSAConfig(**{**SIZES, "num_hidden_layers": 4, "mlp_only_layers": dense}))
    assert (config.moe.first_dense_layers, config.moe.layer_interval) == (first, interval)
    assert isinstance(config.model, ModelConfig)
