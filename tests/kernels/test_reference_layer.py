"""The whole layer, composed of `gsa_kernels` operations, against the looped oracle; and causality."""

from dataclasses import replace

import oracle
import pytest
import torch
from composition import gsa_layer, random_weights
from oracle import LayerOptions

HIDDEN = 12
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

BASE = LayerOptions(
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    indexer_heads=3,
    indexer_dim=6,
    k_base=5,
    k_min=2,
    k_max=9,
    variance_ema=0.02,
)

PACKED_17 = [0] * 5 + [1] * 9 + [2] * 3
PACKED_33 = [7] * 3 + [1] * 11 + [4] * 18 + [5]

LAYERS = {
    "paper, packed": (BASE, 17, PACKED_17),
    "first steps, temperature": (replace(BASE, variance_ema=0.0, inverse_temperature=12.5), 13, None),
    "direct, one key-value head": (replace(BASE, adaptive_k="direct", num_kv_heads=1), 17, PACKED_17),
    "off, as many key-value heads": (replace(BASE, adaptive_k="off", num_kv_heads=4), 17, PACKED_17),
    "relu, no gates": (
        replace(BASE, indexer_activation="relu", adaptive_k="off", value_gate=False, output_gate=False),
        17,
        PACKED_17,
    ),
    "relu, inverse": (replace(BASE, indexer_activation="relu", variance_ema=0.4), 13, None),
    "dense": (replace(BASE, attention="dense"), 17, PACKED_17),
    "dense below": (replace(BASE, k_max=6, dense_below=8), 17, PACKED_17),
    "window, indexer rope": (replace(BASE, local_window=4, indexer_rope=True), 17, PACKED_17),
    "block": (replace(BASE, local_window=4, selection_block=4), 13, None),
    "block, packed": (replace(BASE, local_window=6, selection_block=4, indexer_rope=True), 33, PACKED_33),
    "block, dense": (replace(BASE, local_window=4, selection_block=4, attention="dense"), 17, PACKED_17),
    "length 1": (BASE, 1, None),
    "length 2 in a block": (replace(BASE, local_window=4, selection_block=4), 2, None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_and_every_gradient_equal_the_oracle(name: str) -> None:
    options, length, documents = LAYERS[name]
    weights = random_weights(options, HIDDEN, seed=7)
    generator = torch.Generator().manual_seed(11)
    h = torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    # The second sequence is packed differently, so that the batch is not two of a kind.
    packing = None if documents is None else [documents, sorted(d % 2 for d in documents)]

    ours = gsa_layer(h, weights, options, None if packing is None else torch.tensor(packing))
    rows = [
        oracle.gsa_layer(h[b], weights, options, None if packing is None else packing[b]) for b in range(2)
    ]
    theirs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    for key in ("selected", "budget"):
        assert torch.equal(ours[key], theirs[key]), key
    for key in ("out", "kl", "variance"):
        torch.testing.assert_close(ours[key], theirs[key], **TOLERANCE)

    cotangents = {
        key: torch.randn(ours[key].shape, dtype=torch.float64, generator=generator) for key in ("out", "kl")
    }
    leaves = {"h": h, **weights}
    for key, cotangent in cotangents.items():
        actual = torch.autograd.grad(
            ours[key], list(leaves.values()), cotangent, retain_graph=True, allow_unused=True
        )
        expected = torch.autograd.grad(
            theirs[key], list(leaves.values()), cotangent, retain_graph=True, allow_unused=True
        )
        for leaf, a, e in zip(leaves, actual, expected, strict=True):
            assert (a is None) == (e is None), f"d {key} / d {leaf}"
            if a is not None:
                torch.testing.assert_close(
                    a, e, **TOLERANCE, msg=lambda m, w=f"d {key} / d {leaf}": f"{w}: {m}"
                )


def test_these_layers_do_select() -> None:
    """The cases above would prove little if every query attended to all it sees, or to equally many."""
    generator = torch.Generator().manual_seed(11)
    h = torch.randn(2, 33, HIDDEN, dtype=torch.float64, generator=generator)
    for mode in ("inverse", "direct"):
        options = replace(BASE, adaptive_k=mode)
        budget = gsa_layer(h, random_weights(options, HIDDEN, seed=5), options)["budget"][:, 10:]
        assert budget.max() < 10
        assert len(budget.unique()) >= 4


@pytest.mark.parametrize(("loss", "trained"), [("kl", True), ("out", False)])
def test_only_the_indexer_loss_trains_the_indexer(loss: str, trained: bool) -> None:
    weights = random_weights(BASE, HIDDEN, seed=0)
    h = torch.randn(1, 17, HIDDEN, dtype=torch.float64).requires_grad_()
    gsa_layer(h, weights, BASE)[loss].sum().backward()
    indexer = {"w_iq", "w_ik", "w_iw", "b_j", "c_j"}
    reached = {name for name, weight in weights.items() if weight.grad is not None}
    assert reached == (indexer if trained else set(weights) - indexer)
    assert (h.grad is None) == trained


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("paper, packed", torch.bfloat16),
        ("window, indexer rope", torch.float32),
        ("block", torch.float64),
        ("block", torch.bfloat16),
        ("relu, inverse", torch.float32),
        ("direct, one key-value head", torch.float64),
    ],
)
def test_the_future_changes_nothing_before_it(name: str, dtype: torch.dtype) -> None:
    options, length = LAYERS[name][0], 33
    weights = {key: w.detach().to(dtype) for key, w in random_weights(options, HIDDEN, seed=3).items()}
    h = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    before = gsa_layer(h, weights, options)
    for first_changed in (1, 6, 16, 31):
        changed = h.clone()
        changed[:, first_changed:] = 100 * torch.randn(1, length - first_changed, HIDDEN).to(dtype)
        after = gsa_layer(changed, weights, options)
        leaders = -(-first_changed // options.selection_block)
        for key in ("out", "selected"):
            assert torch.equal(before[key][:, :first_changed], after[key][:, :first_changed]), key
        for key in ("budget", "variance"):
            assert torch.equal(before[key][:, :leaders], after[key][:, :leaders]), key


def test_one_document_does_not_see_another() -> None:
    """A packed sequence gives what its documents give alone (RoPE is relative, so only to rounding)."""
    weights = random_weights(BASE, HIDDEN, seed=3)
    h = torch.randn(1, 17, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    packed = gsa_layer(h, weights, BASE, torch.tensor([PACKED_17]))
    for first, end in ((0, 5), (5, 14), (14, 17)):
        alone = gsa_layer(h[:, first:end], weights, BASE)
        torch.testing.assert_close(packed["out"][:, first:end], alone["out"], **TOLERANCE)
        assert torch.equal(packed["selected"][:, first:end, first:end], alone["selected"])
        assert packed["selected"][:, first:end].sum() == alone["selected"].sum()


def test_below_k_min_the_layer_is_dense_attention() -> None:
    options = replace(BASE, k_base=20, k_min=17, k_max=20)
    weights = random_weights(options, HIDDEN, seed=3)
    h = torch.randn(1, 17, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    sparse = gsa_layer(h, weights, options)
    dense = gsa_layer(h, weights, replace(options, attention="dense"))
    assert torch.equal(sparse["out"], dense["out"])
    assert torch.equal(sparse["kl"], dense["kl"])
