"""Tests that scoring attends to the keys that generation selected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from gsa_hf import replayed_selections
from gsa_hf.kernels_gsa import attended_keys
from helpers.hf import distinct_tokens, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, Any] = {
    "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "index_head_dim": 16,
}  # fmt: skip
"""Sizes that the kernels take"""
KERNELS: dict[str, Any] = {"marks": pytest.mark.gpu if DEVICE == "cuda" else ()}
"""The kernels run in Triton's interpreter, or on a GPU. Other attention runs on the CPU."""


def model_of(name: str, attention: str, **changes: Any) -> Any:
    model = tiny_model(name, **(SIZES if attention == "gsa" else {}), **changes)
    model.set_attn_implementation(attention)
    return model.to(DEVICE if attention == "gsa" else "cpu")


def generated(model: Any, padding: int, new: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, mask and the logits of new tokens, [3, new, vocab], for prompts with padding on the left."""
    prompts, mask = distinct_tokens(3, 20), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :padding] = 0
    torch.manual_seed(0)
    options: dict[str, Any] = {"do_sample": True, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(
        prompts.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new, **options
    )
    mask = torch.cat([mask, mask.new_ones(3, new)], 1).to(model.device)
    return found.sequences, mask, torch.stack(found.logits, 1)


@pytest.mark.parametrize(
    ("name", "attention", "changes"),
    [
        ("window-rope-reuse", "eager", {}),
        ("mixed", "eager", {}),
        pytest.param("window-rope-reuse", "gsa", {}, **KERNELS),
        pytest.param("mixed", "gsa", {"dense_below": 23}, **KERNELS),  # the prompts select all keys
    ],
)
@torch.no_grad()
def test_a_policy_scores_its_own_tokens(name: str, attention: str, changes: dict[str, Any]) -> None:
    """A changed indexer selects other keys, but with replay the logits are equal up to rounding."""
    model, new = model_of(name, attention, **changes), 6 if attention == "gsa" else 24
    places, given, attended = slice(19, 19 + new), [], []
    with replayed_selections(model):
        tokens, mask, expected = generated(model, 5, new)
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.wq.weight.neg_()
        order = torch.tensor([2, 0])
        # Less padding on the left, and padding on the right
        inputs = torch.nn.functional.pad(tokens[order], (0, 3)), torch.nn.functional.pad(mask[order], (0, 3))
        model.model.register_forward_pre_hook(
            lambda _, args, passed: given.extend(passed.get("selections") or []), with_kwargs=True
        )
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.register_forward_hook(
                    lambda each, _, passed, outputs: attended.append(keys_of(each, passed, outputs[2])),
                    with_kwargs=True,
                )
        replayed = model(inputs[0], attention_mask=inputs[1], use_cache=False).logits[:, places]
    for recorded, used in zip(given, attended, strict=True):
        scored = recorded.any(-1)
        assert scored.sum() == mask[order, :-1].sum()
        assert torch.equal(recorded[scored], used[scored])
    own = model(inputs[0], attention_mask=inputs[1], use_cache=False).logits[:, places]
    torch.testing.assert_close(replayed, expected[order], rtol=1e-3, atol=1e-3)
    assert (own - expected[order]).abs().max() > 1e-2


def keys_of(layer: Any, passed: dict[str, Any], selection: Any) -> torch.Tensor:
    if layer.config._attn_implementation != "gsa":
        return selection
    place = passed["kernel_pass"]
    return attended_keys(selection, place, layer.config, place.length)


@pytest.mark.parametrize("attention", ["eager", pytest.param("gsa", **KERNELS)])
def test_the_indexer_learns_on_the_selected_keys(attention: str) -> None:
    """The backward pass, also with recomputation and by the kernels, sees the selection that it is given."""
    model = tiny_model(indexer_loss_coef=1.0, **SIZES)
    tokens, mask = distinct_tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :4], mask[1, 17:] = 0, 0
    selection = (torch.rand(2, 20, 20) < 0.4) | torch.eye(20, dtype=torch.bool)
    losses = []
    recomputing = copy.deepcopy(model).train()
    recomputing.gradient_checkpointing_enable()
    recomputing.set_attn_implementation(attention)
    recomputing.to(DEVICE if attention == "gsa" else "cpu")
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 4] = -100  # it follows padding, whose output is arbitrary
    for each in (model.train(), recomputing):
        inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        inputs = {name: value.to(each.device) for name, value in inputs.items()}
        outputs = each(**inputs, selections=[selection.to(each.device)] * 2, use_cache=False)
        outputs.loss.backward()
        losses.append(outputs.indexer_loss.detach().cpu())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for (name, plain), other in zip(model.named_parameters(), recomputing.parameters(), strict=True):
        scale = 2e-3 * float(plain.grad.abs().max())
        torch.testing.assert_close(other.grad.cpu(), plain.grad, rtol=2e-3, atol=scale, msg=name)
    none = torch.zeros(2, 20, 20, dtype=torch.bool, device=each.device)
    everything = each(**inputs, selections=[none, none], use_cache=False)
    assert everything.indexer_loss != losses[-1], "queries without a key keep the indexer's choice"


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
