"""Tests that no token changes an earlier one, to the last bit, in the whole model."""

from typing import Any

import pytest
import torch

from gsa_data.pack import document_ids
from gsa_train.model.mcore.build import Model
from gsa_train.phases import enter_phase
from helpers.single_rank import SPARSE, random_batches, shared_mask, tiny_config, tiny_model

LENGTH, EOS = 16, 0
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "eq. 8 to the letter": {"adaptive_k": "direct"},
    "window": {"local_window": 3, "indexer_rope": True},
    "reuse": {"selection_reuse": 2},
    "indexer norm": {"indexer_norm": True, "indexer_activation": "plain"},
    "qsa": {"indexer_activation": "qsa"},
    "sparse-only": {"indexer_activation": "relu", "value_gate": False, "output_gate": False},
}


def build(variant: str) -> Model:
    model = tiny_model(tiny_config(gsa=VARIANTS[variant]), variance_ema=0.02)
    enter_phase(model, SPARSE)
    return model


def run(
    model: Model, tokens: torch.Tensor, labels: torch.Tensor, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses [B, L] and selections [B, L, layers, L] of one training forward pass."""
    selections: list[torch.Tensor] = []
    hooks = [
        attention.register_forward_hook(lambda *_: selections.append(shared_mask(model)))
        for attention in model.attentions
    ]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    documents = document_ids(tokens, EOS) if packed else None
    losses = model.module(tokens, positions, documents, labels=labels)
    for hook in hooks:
        hook.remove()
    return losses.detach(), torch.stack(selections, 2)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_changed_tokens_leave_everything_before_them_as_it_was(variant: str, packed: bool) -> None:
    model = build(variant)
    batch = random_batches(tiny_config(), seed=1)[0]
    # The labels stay, because a changed label would change the loss of the previous position.
    losses, selections = run(model, batch.tokens, batch.labels, packed)
    generator = torch.Generator().manual_seed(2)
    selections_moved = 0
    for start in range(1, LENGTH):
        for stop in {start + 1, LENGTH}:  # one token, and all the rest (documents may end elsewhere)
            tokens = batch.tokens.clone()
            new = torch.randint(0, 32, (2, stop - start), generator=generator)
            tokens[:, start:stop] = torch.where(new == tokens[:, start:stop], (new + 1) % 32, new)
            losses_after, selections_after = run(model, tokens, batch.labels, packed)
            assert torch.equal(losses_after[:, :start], losses[:, :start]), start
            assert torch.equal(selections_after[:, :start], selections[:, :start]), start
            assert (losses_after[:, start] != losses[:, start]).all()
            selections_moved += int((selections_after != selections).sum())
    assert selections_moved > 0
