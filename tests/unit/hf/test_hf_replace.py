"""Tests Gated Sparse Attention in place of other models' attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from gsa_hf import DENSE_LAYER, INDEXED_LAYER, GSAConfig, collected_indexer_loss, replace_attention_with_gsa
from gsa_hf.modeling_gsa import CACHE_ARGUMENT
from helpers.hf import distinct_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
HOSTS = {
    "llama": LlamaConfig(attention_bias=True, head_dim=16, **SIZES),
    "mistral": MistralConfig(sliding_window=None, **SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(head_dim=8, **SIZES),
}
INDEX: dict[str, Any] = {
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "k_min": 3, "k_max": 16, "indexer_rope": True,
    "local_window": 4,
}  # fmt: skip


GROUPS = {**INDEX, "key_group_size": 3}


def host(name: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(HOSTS[name])
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", list(HOSTS))
def test_dense_and_without_gates_nothing_changes(name: str) -> None:
    model, tokens = host(name), distinct_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits[mask.bool()]
        no_gates = {"value_gate": False, "output_gate": False}
        dense = GSAConfig(**no_gates, num_hidden_layers=2, layer_types=[DENSE_LAYER] * 2)
        replace_attention_with_gsa(model, dense)
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            after = model(tokens, attention_mask=mask).logits[mask.bool()]
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6 * float(before.abs().max()))


@pytest.mark.parametrize(("name", "fields"), [*((name, INDEX) for name in HOSTS), ("llama", GROUPS)])
def test_sparse_layers_generate_on_the_host_s_caches(name: str, fields: dict[str, Any]) -> None:
    model, tokens = host(name), distinct_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    options: dict[str, Any] = {"do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 20}
    prompts = {"input_ids": tokens, "attention_mask": mask}
    before = model.generate(**prompts, **options)
    replace_attention_with_gsa(model, GSAConfig(**fields), layers=[1])
    assert model.config.layer_types == [DENSE_LAYER, INDEXED_LAYER]
    model.model.layers[1].self_attn.indexer.variance_ema.fill_(0.01)
    found = model.generate(**prompts, **options)
    assert not torch.equal(found, before)
    assert torch.equal(found, model.generate(**prompts, use_cache=False, **options))
    assert torch.equal(found, model.generate(**prompts, cache_implementation="static", **options))
    held = DynamicCache(config=model.config)
    model.generate(**prompts, **{CACHE_ARGUMENT: held}, **options)
    assert held.layers[1].indexer_keys.shape[:2] == (2, 31)


def test_the_indexers_learn() -> None:
    model, tokens = host("qwen3"), distinct_tokens(2, 16)
    replace_attention_with_gsa(model, GSAConfig(**INDEX, indexer_loss_coef=1.0))
    with pytest.raises(ValueError, match="no layer has an indexer loss"):
        collected_indexer_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for _ in range(8):
        outputs = model(tokens, labels=tokens, use_cache=False)
        kl = collected_indexer_loss(model)
        assert not kl.requires_grad
        outputs.loss.backward()
        losses.append(float(outputs.loss.detach()))
        assert model.model.layers[0].self_attn.indexer.wq.weight.grad.abs().max() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "of_host", "layers", "fields", "message"),
    [
        ("gpt2", {}, "all", {}, "model_type is 'gpt2'; pass a model of llama, mistral, qwen2, qwen3"),
        ("llama", {}, [2], {}, r"layers is \[2\]; pass 'all' or numbers from 0 to 1"),
        ("mistral", {"sliding_window": 64}, "all", {}, "sliding_window 64; leave it out of layers, or load"),
        ("llama", {"attention_dropout": 0.1}, "all", {}, "attention_dropout is 0.1; load the model with 0"),
        ("llama", {}, "all", {"sandwich_norm": True}, "sandwich_norm is True; pass False"),
        ("llama", {}, "all", {"index_topk_freq": 2}, "index_topk_freq is 2; pass 1"),
    ],
)
def test_what_cannot_be_replaced(name, of_host, layers, fields, message):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    config = AutoConfig.for_model("gpt2", **sizes) if name == "gpt2" else copy.deepcopy(HOSTS[name])
    for field, value in of_host.items():
        setattr(config, field, value)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        replace_attention_with_gsa(model, GSAConfig(**INDEX, **fields), layers=layers)


def test_gates_of_other_forms_learn_and_generate() -> None:
    """Gates start open, so that the host's outputs do not change at first."""
    tokens = distinct_tokens(2, 12)
    for form in (
        {"gate_form": "additive", "gate_activation": "identity", "gate_input": "input_independent"},
        {"key_gate": True, "projection_gate": True, "gate_activation": "ns_sigmoid"},
    ):
        model = host("qwen3")
        before = model(tokens).logits
        config = GSAConfig(**form, layer_types=[DENSE_LAYER] * 2, num_hidden_layers=2)
        replace_attention_with_gsa(model, config)
        for name, parameter in model.named_parameters():
            if name.endswith("gate_proj.bias") and "additive" not in form.values():
                torch.nn.init.constant_(parameter, 30.0)
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)
        model(tokens, labels=tokens).loss.backward()
        gates = [parameter for name, parameter in model.named_parameters() if "gate_proj.bias" in name]
        assert len(gates) == 2 * (2 if "additive" in form.values() else 4)
        if "additive" in form.values():
            assert all(each.grad.abs().max() > 0 for each in gates)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
        cached = model.generate(input_ids=tokens, **options)
        assert torch.equal(cached, model.generate(input_ids=tokens, use_cache=False, **options))
