"""Compares `attn_implementation="gsa"` on a CUDA device with "eager" and "sdpa", and runs decoding as a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from gsa_hf import DENSE_LAYER, INDEXED_LAYER
from gsa_hf.modeling_gsa import CACHE_ARGUMENT
from helpers import hf
from helpers.hf import distinct_tokens, losses_and_gradients, tiny_model

KERNEL_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "index_head_dim": 32, "index_topk": 64,
    "k_min": 16, "k_max": 128, "initializer_range": 0.1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gsa": {"indexer_rope": True},
    "sparse-only": {
        "value_gate": False, "output_gate": False, "indexer_activation": "relu", "adaptive_k": "off",
        "indexer_rope": True,
    },
    "mixed": {"layer_types": [DENSE_LAYER, INDEXED_LAYER]},
    "reuse": {"index_topk_freq": 2, "local_window": 8, "indexer_rope": True},
    "gates": {
        "indexer_rope": True, "key_gate": True, "projection_gate": True, "gate_activation": "ns_sigmoid",
        "sandwich_norm": True,
    },
}  # fmt: skip
LENGTH, PROMPT = 400, 370


def model_of(name: str = "gsa", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return tiny_model(**{**KERNEL_SIZES, **VARIANTS[name], **changes}).to("cuda", dtype)


def padded(pads: int = 37, length: int = LENGTH) -> list[torch.Tensor]:
    return [each.cuda() for each in hf.padded(length, pads, rows=3)]


def assert_nearly_all_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Let 5% of the rows differ, because rounding may change the last selected key of a row."""
    far = (found - expected).abs().amax(-1) > 2e-3 * expected.abs().max()
    assert far.float().mean() < 0.05


@pytest.mark.parametrize("name", list(VARIANTS))
def test_prompts_and_decoding(name: str) -> None:
    """fp32 is compared with eager, with both kinds of caches and a padded batch."""
    model, (tokens, mask) = model_of(name), padded()
    real = mask.bool()
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, use_cache=False).logits[real]
        model.set_attn_implementation("gsa")
        whole = model(tokens, attention_mask=mask, use_cache=False).logits[real]
        assert_nearly_all_close(whole, expected)
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=512)):
            held = {CACHE_ARGUMENT: cache, "use_cache": True}
            found = [model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], **held).logits]
            for t in range(PROMPT, LENGTH):
                found.append(model(tokens[:, t : t + 1], attention_mask=mask[:, : t + 1], **held).logits)
            assert_nearly_all_close(torch.cat(found, 1)[real], expected)


@pytest.mark.parametrize("name", ["gsa", "reuse"])
@pytest.mark.parametrize("use_mask", [False, True])
def test_a_step_is_a_cuda_graph(name: str, use_mask: bool) -> None:
    """The step is captured once and replayed; nothing is read back from the device."""
    model, (tokens, mask) = model_of(name, torch.bfloat16), padded()
    model.set_attn_implementation("gsa")
    if not use_mask:
        mask = torch.ones_like(mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cached_mask = torch.nn.functional.pad(mask, (0, 512 - LENGTH), value=1)

    def prompt() -> dict[str, Any]:
        held = {CACHE_ARGUMENT: StaticCache(model.config, max_cache_len=512), "use_cache": True}
        model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], position_ids=positions[:, :PROMPT], **held)
        return held

    with torch.no_grad():
        held, plain = prompt(), []
        for t in range(PROMPT, LENGTH):
            here = slice(t, t + 1)
            given = {"attention_mask": cached_mask if use_mask else None, "position_ids": positions[:, here]}
            plain.append(model(tokens[:, here], **given, **held).logits)

        held = prompt()
        token, position = tokens[:, PROMPT : PROMPT + 1].clone(), positions[:, PROMPT : PROMPT + 1].clone()

        def step() -> torch.Tensor:
            given = {"attention_mask": cached_mask if use_mask else None, "position_ids": position}
            return model(token, **given, **held).logits

        def back() -> None:
            for layer in held[CACHE_ARGUMENT].layers:
                layer.cumulative_length.sub_(1)
                layer.indexer_cumulative_length.sub_(1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
                back()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        for t, expected in zip(range(PROMPT, LENGTH), plain, strict=True):
            token.copy_(tokens[:, t : t + 1])
            position.copy_(positions[:, t : t + 1])
            graph.replay()
            assert torch.equal(logits, expected), t


@pytest.mark.parametrize("name", ["gsa", "mixed"])
def test_generate(name: str) -> None:
    model, tokens = model_of(name), distinct_tokens(2, 90).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :21] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 60,
    }  # fmt: skip
    expected = model.generate(tokens, **options)
    model.set_attn_implementation("gsa")
    assert torch.equal(model.generate(tokens, **options), expected)
    assert torch.equal(model.generate(tokens, use_cache=False, **options), expected)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **options), expected)
    beams = {**options, "num_beams": 3}
    by_beams = model.generate(tokens, **beams)
    assert torch.equal(model.generate(tokens, cache_implementation="static", **beams), by_beams)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(tokens, **beams), by_beams)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gsa", "reuse"])
def test_loss_and_gradients(name: str, checkpointing: bool) -> None:
    model = model_of(name, indexer_loss_coef=1.0, indexer_temperature="learned").train()
    tokens, mask = padded(length=100)
    mask[0, 90:] = 0
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = losses_and_gradients(model, tokens, mask)
    for key, value in found[0].items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[1][key], value, rtol=2e-3, atol=2e-3 * scale, msg=key)


def test_bf16_is_as_close_as_eager() -> None:
    """The layers are dense, because rounding would decide selections."""
    exact, (tokens, mask) = model_of("gsa", layer_types=[DENSE_LAYER] * 2), padded()
    real = mask.bool()
    with torch.no_grad():
        wanted = exact(tokens, attention_mask=mask).logits[real]
        errors = {}
        half = exact.to(torch.bfloat16)
        for attention in ("eager", "gsa"):
            half.set_attn_implementation(attention)
            errors[attention] = float((half(tokens, attention_mask=mask).logits[real] - wanted).abs().max())
    assert errors["gsa"] <= 2 * errors["eager"]
