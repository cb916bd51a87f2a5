"""Compares `attn_implementation="gsa"` with "eager" in Triton's interpreter; tests/gpu/test_hf_on_gpu.py uses a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from gsa_hf import DENSE_LAYER, INDEXED_LAYER
from gsa_hf.modeling_gsa import CACHE_ARGUMENT
from gsa_kernels import api
from helpers.hf import distinct_tokens, losses_and_gradients, padded, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU instead")

KERNEL_SIZES: dict[str, Any] = {
    "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "index_head_dim": 16,
}  # fmt: skip
OTHER_GATES: dict[str, Any] = {"key_gate": True, "projection_gate": True, "gate_activation": "ns_sigmoid"}


def model_of(**changes: Any) -> Any:
    return tiny_model(**{**KERNEL_SIZES, **changes})


def a_cache(model: Any, kind: str) -> Cache:
    static = kind == "static"
    return StaticCache(model.config, max_cache_len=40) if static else DynamicCache(config=model.config)


def steps(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, prompt: int, kind: str, swap_at: int | None = None
) -> torch.Tensor:
    """Return logits of the prompt and of one token after the other; at `swap_at` the sequences change places."""
    held, found = {CACHE_ARGUMENT: a_cache(model, kind)}, []
    places = [(0, prompt), *((t, t + 1) for t in range(prompt, tokens.shape[1]))]
    with torch.no_grad():
        for first, end in places:
            if first == swap_at:
                held[CACHE_ARGUMENT].reorder_cache(torch.tensor([1, 0]))
                tokens, mask = tokens.flip(0), mask.flip(0)
            given = {"attention_mask": mask[:, :end], "use_cache": True}
            found.append(model(tokens[:, first:end], **given, **held).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("changes", "kind", "swap_at"),
    [
        ({"layer_types": [DENSE_LAYER, INDEXED_LAYER]}, "dynamic", 19),
        ({"index_topk_freq": 2, "indexer_rope": True, "local_window": 2}, "static", 19),
        ({**OTHER_GATES, "num_hidden_layers": 1}, "dynamic", None),
    ],
    ids=["dense-and-sparse", "reuse", "gates"],
)
def test_prompt_and_decoding(changes, kind, swap_at):
    """The batch has padding in front, and sequences may change places in the cache."""
    model = model_of(**changes)
    tokens, mask = padded(20, 3)
    expected = steps(model, tokens, mask, 18, kind, swap_at)
    model.set_attn_implementation("gsa")
    found = steps(model, tokens, mask, 18, kind, swap_at)
    real = mask.bool()
    if swap_at is not None:
        real[:, swap_at:] = real[:, swap_at:].flip(0)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def test_short_inputs_attend_to_all_keys(monkeypatch):
    """A prompt with fewer keys than `dense_below` uses dense attention and computes no scores. Decoding then passes
    this limit."""
    model, length = model_of(index_topk_freq=2, dense_below=24, k_max=8), 27
    tokens, mask = padded(length, 3)
    expected = steps(model, tokens, mask, length, "dynamic")
    selects = Mock(side_effect=api.select)
    monkeypatch.setattr(api, "select", selects)
    model.set_attn_implementation("gsa")
    found = steps(model, tokens, mask, 20, "static")
    assert selects.call_count == 0
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    model.config.layer_types = [DENSE_LAYER] * len(model.model.layers)
    for layer in model.model.layers:
        layer.self_attn.indexer, layer.self_attn.is_sparse = None, False
    model.set_attn_implementation("eager")
    dense = steps(model, tokens, mask, length, "dynamic")
    few = mask.bool() & (mask.cumsum(1) < 24)
    torch.testing.assert_close(found[few], dense[few], rtol=1e-4, atol=1e-4)
    assert (found - dense)[:, -1].abs().max() > 1e-2


def test_loss_and_gradients() -> None:
    """The sequences have padding in front or at the end."""
    learned = {"indexer_loss_coef": 1.0, "indexer_temperature": "learned"}
    model = model_of(num_hidden_layers=1, **learned).train()
    tokens, mask = padded(20, 3)
    mask[0, 17:] = 0
    found = losses_and_gradients(model, tokens, mask)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_autocast() -> None:
    """In autocast the rotary embedding leaves queries and keys in fp32, but the kernels take one dtype."""
    model, tokens = model_of(num_hidden_layers=1, indexer_loss_coef=1.0).train(), distinct_tokens(2, 20)
    found = []
    for attention in ("sdpa", "gsa"):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(tokens, labels=tokens, use_cache=False)
            new = model.eval().generate(tokens, max_new_tokens=2, do_sample=False)
        outputs.loss.backward()
        found.append(torch.stack([outputs.loss.detach(), outputs.indexer_loss.detach()]))
        assert new.shape == (2, 22)
        model.train()
    torch.testing.assert_close(*found, rtol=2e-3, atol=1e-3)


def test_pieces_and_documents() -> None:
    model, tokens = model_of(num_hidden_layers=1), distinct_tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    seen: tuple[dict[str, Any], ...] = ({}, {"attention_mask": torch.ones_like(tokens), "use_cache": False})
    with torch.no_grad():
        whole = model(tokens).logits
        packed = model(tokens, position_ids=positions, use_cache=False).logits
        together = [model(tokens, position_ids=positions, **options).logits for options in seen]
        model.set_attn_implementation("gsa")
        held = {CACHE_ARGUMENT: a_cache(model, "static"), "use_cache": True}
        pieces = [model(piece, **held).logits for piece in tokens.split([11, 9], 1)]
        documents = model(tokens, position_ids=positions, use_cache=False).logits
        by_kernels = [model(tokens, position_ids=positions, **options).logits for options in seen]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(documents, packed, rtol=1e-4, atol=1e-4)
    for found, expected in zip(by_kernels, together, strict=True):  # documents attend to each other
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (found - packed).abs().max() > 0.1


def test_what_the_kernels_cannot_run() -> None:
    model = model_of(num_hidden_layers=1)
    model.set_attn_implementation("gsa")
    tokens, mask = padded(20, 3)
    gaps = mask.clone()
    gaps[0, 5] = 0
    with pytest.raises(ValueError, match="attention_mask has gaps"):
        model(tokens, attention_mask=gaps)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        model(tokens, attention_mask=torch.ones(2, 1, 20, 20))
    held = {CACHE_ARGUMENT: a_cache(model, "dynamic"), "use_cache": True}
    with torch.no_grad():
        model(tokens, attention_mask=mask.flip(1), **held)
        mask = torch.nn.functional.pad(mask.flip(1), (0, 1), value=1)
        with pytest.raises(ValueError, match="one token follows padding after a sequence"):
            model(tokens[:, :1], attention_mask=mask, **held)
