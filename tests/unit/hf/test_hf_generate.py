"""Tests generate() on transformers' own caches: results with and without a cache are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from helpers.hf import MODELS, distinct_tokens, tiny_model

GREEDY = {"do_sample": False, "no_repeat_ngram_size": 1}
"""Greedy without repeated tokens: in the first layer two keys of one token tie, and rounding decides."""


def padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    room = max(lengths)
    tokens, mask = torch.zeros(2, len(lengths), room, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, room - length :] = distinct_tokens(1, length, seed=row)[0]
        mask[row, room - length :] = 1
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_with_a_cache_as_without(name: str) -> None:
    """Budgets are adaptive."""
    model, prompts = tiny_model(name, attention="sdpa"), padded((14, 9))
    long = name in ("gsa", "window-rope-reuse")
    options: dict[str, Any] = {"max_new_tokens": 100 if long else 40, **GREEDY}
    found = model.generate(**prompts, **options)
    assert torch.equal(found, model.generate(**prompts, use_cache=False, **options))
    if long:
        assert torch.equal(found, model.generate(**prompts, cache_implementation="static", **options))


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_gaps_in_a_prompt_change_nothing(name: str, options: dict[str, Any]) -> None:
    model, prompt = tiny_model(name), distinct_tokens(1, 14)
    tokens, mask = torch.zeros(2, 1, 20, dtype=torch.long)
    slots = [0, 1, 2, 5, 6, 7, 8, 9, 10, 12, 13, 16, 18, 19]
    tokens[0, slots], mask[0, slots] = prompt[0], 1
    made = model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, **options)
    alone = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(made[:, 20:], alone[:, 14:])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_beams(name: str, static: bool) -> None:
    model, prompts = tiny_model(name), padded((11, 6))
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 24, "length_penalty": 0.5, **GREEDY}
    without = model.generate(**prompts, use_cache=False, **options)
    kept = {"cache_implementation": "static"} if static else {}
    assert torch.equal(model.generate(**prompts, **kept, **options), without)


@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_prompt_lookup_crops_the_cache(name: str) -> None:
    """Several tokens follow a cache at once, and some are removed again."""
    model, prompt = tiny_model(name, indexer_rope=True), distinct_tokens(1, 12).repeat(1, 2)
    plain = model.generate(prompt, max_new_tokens=30, do_sample=False)
    drafted = model.generate(prompt, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_a_prompt_in_pieces(name: str, static: bool) -> None:
    model, tokens = tiny_model(name), distinct_tokens(2, 30)
    cache = StaticCache(model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    pieces = []
    with torch.no_grad():
        whole = model(tokens).logits
        for piece in tokens.split([5, 9, 1, 1, 14], 1):
            pieces.append(model(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_cache_without_room_for_the_indexer_is_refused() -> None:
    with pytest.raises(ValueError, match="Cannot call `update_indexer`"):
        tiny_model()(distinct_tokens(1, 4), past_key_values=DynamicCache(), use_cache=True)
