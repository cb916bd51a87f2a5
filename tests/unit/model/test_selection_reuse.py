"""Tests layers in groups: the first layer selects, and the others attend to the same keys without an indexer."""

import torch

from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.types import Selection
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    SPARSE,
    random_batches,
    read_stats,
    shared_mask,
    tiny_config,
    tiny_model,
    token_losses,
)

CONFIG = tiny_config(model={"num_layers": 4}, gsa={"selection_reuse": 2})


def test_each_group_shares_one_selection_and_groups_differ() -> None:
    model = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(model, SPARSE)
    seen: list[torch.Tensor] = []
    for attention in model.attentions:
        attention.register_forward_hook(lambda *_: seen.append(shared_mask(model)))
    token_losses(model, random_batches(CONFIG)[0])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[1], seen[2])


def test_a_following_layer_attends_to_exactly_the_keys_of_the_shared_selection() -> None:
    model = tiny_model(CONFIG)
    enter_phase(model, SPARSE)
    follower = model.attentions[1]
    generator = torch.Generator().manual_seed(3)
    selected = torch.rand(1, 16, 16, generator=generator).tril() > 0.6
    selected |= torch.eye(16, dtype=torch.bool)
    unused = torch.zeros(())
    model.runtime.shared_selection = [Selection(pack_mask(selected), None, unused, unused)]
    h = torch.randn(16, 1, 16, generator=generator)

    with torch.no_grad():
        out = follower(h)[0]
        for key in range(16):
            moved = h.clone()
            moved[key] += torch.randn(16, generator=generator)
            changed = (follower(moved)[0] != out).any(-1).flatten()
            assert torch.equal(changed, selected[0, :, key]), key


def test_layers_without_indexer_report_recall_but_no_loss_of_their_own() -> None:
    model = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(model, SPARSE)
    token_losses(model, random_batches(CONFIG)[0], measuring=True)
    stats = read_stats(model)
    assert [value == value for value in stats["indexer_kl"]] == [True, False, True, False]
    assert all(0 < value <= 1 for value in stats["recall"])
