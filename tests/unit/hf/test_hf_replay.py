"""Tests that scoring attends to the keys that generation selected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gsa_hf import replayed_selections
from helpers.hf import distinct_tokens, tiny_model

OPTIONS: dict[str, Any] = {
    "do_sample": True,
    "max_new_tokens": 24,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def generated(model: Any, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, mask and the logits of new tokens, [3, 24, vocab], for prompts with padding on the left."""
    prompts, mask = distinct_tokens(3, 20), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :padding] = 0
    torch.manual_seed(0)
    found = model.generate(prompts, attention_mask=mask, **OPTIONS)
    return found.sequences, torch.cat([mask, mask.new_ones(3, 24)], 1), torch.stack(found.logits, 1)


@pytest.mark.parametrize("name", ["window-rope-reuse", "groups-reuse", "mixed"])
@torch.no_grad()
def test_a_policy_scores_its_own_tokens(name: str) -> None:
    """A changed indexer selects other keys, but with replay the logits are equal up to rounding."""
    model = tiny_model(name)
    with replayed_selections(model):
        tokens, mask, expected = generated(model, padding=5)
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.wq.weight.neg_()
        order = torch.tensor([2, 0])
        # Less padding on the left, and padding on the right
        inputs = torch.nn.functional.pad(tokens[order], (0, 3)), torch.nn.functional.pad(mask[order], (0, 3))
        replayed = model(inputs[0], attention_mask=inputs[1], use_cache=False).logits[:, 19:43]
    own = model(inputs[0], attention_mask=inputs[1], use_cache=False).logits[:, 19:43]
    torch.testing.assert_close(replayed, expected[order], rtol=1e-4, atol=1e-5)
    assert (own - expected[order]).abs().max() > 1e-2


def test_the_indexer_learns_on_the_selected_keys() -> None:
    """The backward pass, also with recomputation, sees the selection that it is given."""
    model = tiny_model(indexer_loss_coef=1.0)
    with replayed_selections(model), torch.no_grad():
        tokens, _, _ = generated(model, padding=0)
    losses = []
    recomputing = copy.deepcopy(model).train()
    recomputing.gradient_checkpointing_enable()
    selection = torch.ones(2, 20, 20, dtype=torch.bool)
    for each in (model.train(), recomputing):
        outputs = each(tokens[:2, :20], labels=tokens[:2, :20], selections=[selection, selection])
        outputs.loss.backward()
        losses.append(outputs.indexer_loss.detach())
    assert torch.equal(*losses)
    for (name, plain), other in zip(model.named_parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(plain.grad, other.grad, msg=name)
    everything = model(tokens[:2, :20], labels=tokens[:2, :20], selections=[~selection, ~selection])
    assert everything.indexer_loss != losses[0], "queries without a key keep the indexer's choice"


@torch.no_grad()
def test_what_was_not_generated_is_refused() -> None:
    model = tiny_model()
    with replayed_selections(model):
        tokens, _, _ = generated(model, padding=0)
        with pytest.raises(ValueError, match=r"row 1 of input_ids was not generated .* in the last 1 calls"):
            model(torch.stack([tokens[0], tokens[1] + 1]))
    with replayed_selections(model, generations=2):
        generated(model, padding=3)
        generated(model, padding=0)
        model(tokens)
    model(tokens + 1)  # the hooks are gone
    with pytest.raises(ValueError, match="selections has 1 tensors; pass 2"):
        model(tokens, selections=[torch.ones(3, 44, 44, dtype=torch.bool)])
    with (
        pytest.raises(ValueError, match=r"model is Linear without a gsa_hf\.GSAModel"),
        replayed_selections(torch.nn.Linear(1, 1)),
    ):
        pass
