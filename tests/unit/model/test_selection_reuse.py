"""Tests layers in groups: the first layer selects, and the others attend to the same keys without an indexer."""

from typing import Any

import pytest
import torch

from gsa_data.pack import document_starts
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_kernels.types import Selection
from gsa_train.config import PhaseConfig
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    shared_mask,
    tiny_config,
    tiny_model,
    token_losses,
)

CONFIG = tiny_config(model={"num_layers": 4}, gsa={"selection_reuse": 2})
GROUP = {"selection_reuse": 2, "reuse_teacher": "group"}


def test_only_the_first_layer_of_a_group_owns_indexer_and_moving_average() -> None:
    model = tiny_model(CONFIG)
    names = [name for name, _ in model.gpt.named_parameters() if ".indexer." in name]
    assert {name.split(".")[2] for name in names} == {"0", "2"}
    assert [attention.variance is not None for attention in model.attentions] == [True, False, True, False]
    assert model.num_indexers == 2


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


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=["sparse", "warm-up"])
def test_an_indexer_learns_the_mean_attention_of_its_group(phase: PhaseConfig, packed: bool) -> None:
    """The KL and the gradients of the three projections equal plain torch on the layers' inputs."""
    config = tiny_config([phase], model={"num_layers": 4}, gsa={**GROUP, "indexer_activation": "relu"})
    model = tiny_model(config, variance_ema=0.02)
    enter_phase(model, phase)
    warm_up = phase.train == "indexer"
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    hidden: list[torch.Tensor] = []
    for attention in model.attentions:
        core = attention.over_chunks.core
        attention.over_chunks.core = Listening(core, given)  # type: ignore[assignment]
        if attention.indexer is not None:
            attention.indexer.register_forward_hook(lambda _, inputs, __: hidden.append(inputs[0]))
    scale = 0.37
    batch = random_batches(config, attend_across=not packed)[0]
    with torch.set_grad_enabled(not warm_up):
        losses = token_losses(
            model, batch, kl_grad_scale=scale, base_has_graph=not warm_up, measuring=True, trains_indexer=True
        )
    if not warm_up:
        (losses * 0).sum().backward()

    starts = torch.zeros_like(batch.tokens)
    if batch.document_ids is not None:
        starts = document_starts(batch.document_ids)
    positions = torch.arange(16)
    causal = (positions <= positions[:, None]) & (positions >= starts[..., None])
    kl = read_stats(model)["indexer_kl"]
    for group, leader in enumerate((0, 2)):
        indexer = model.attentions[leader].indexer
        assert indexer is not None
        attended = causal if warm_up else given[leader][2]
        assert attended is not None
        probs = []
        for q, k, selected in given[leader : leader + 2]:
            assert warm_up or torch.equal(selected, attended)
            logits = torch.einsum("bthc,bshc->bhts", q.double(), k.double().repeat_interleave(2, 2)) / 2
            probs.append(logits.masked_fill(~attended[:, None], -torch.inf).softmax(-1).mean(1))
        target = (probs[0] + probs[1]) / 2
        weights = [
            getattr(indexer, name).detach().double().requires_grad_()
            for name in ("query_weight", "key_weight", "head_weight")
        ]
        h = hidden[group].double()
        queries = (h @ weights[0].T).unflatten(-1, (3, 6))
        products = torch.einsum("tbjc,sbc->btjs", queries, h @ weights[1].T) / 6**0.5
        scores = torch.einsum("tbj,btjs->bts", h @ weights[2].T, products.relu())
        log_q = scores.masked_fill(~attended, -torch.inf).log_softmax(-1)
        terms = torch.where(target > 0, target * (target.clamp(min=1e-300).log() - log_q), 0)
        expected = terms.sum()
        for weight, name in zip(weights, ("query_weight", "key_weight", "head_weight"), strict=True):
            (gradient,) = torch.autograd.grad(scale * expected, weight, retain_graph=True)
            found = getattr(indexer, name).grad.double()
            assert (found - gradient).norm() < 1e-5 * gradient.norm(), (leader, name)
        assert kl[leader] == pytest.approx(expected.item() / int((causal.sum(-1) >= 2).sum()), rel=1e-5)
        assert (probs[0] - probs[1]).abs().max() > 0.1  # the leader alone would give another target
        assert kl[leader + 1] != kl[leader + 1]  # NaN
    assert model.runtime.group_target is None


class Listening:
    """Wraps a core, and keeps its queries, keys and selection."""

    def __init__(self, core: Any, given: list[Any]) -> None:
        self.core, self.given = core, given
        self.implementation, self.settings = core.implementation, core.settings

    def attend(self, inputs: Any, selection: Any, *others: Any) -> Any:
        mask = None if selection is None else unpack_mask(selection.packed_mask, inputs.k.shape[1])
        self.given.append((inputs.q.detach(), inputs.k.detach(), mask))
        return self.core.attend(inputs, selection, *others)
