"""Tests what benches read and plant: exports of indexers, and selections of whole models."""

import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

from gsa_kernels.key_lists.format import mask_from_key_lists

pytestmark = pytest.mark.nightly


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cases small enough for the interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = cases.Shape("1.7B", 2, 1, 32)
    sizes = {"USUAL": ["1.7B"], "INDEXER_HEADS": 2, "INDEXER_SIZE": 16, "K_BASE": 24, "K_MIN": 8, "K_MAX": 32}
    for name, value in (
        sizes | {"DEVICE": device, "DTYPE": torch.float32, "SHAPES": {"1.7B": shape}}
    ).items():
        monkeypatch.setattr(cases, name, value)


@pytest.fixture
def exports(tiny: None, tmp_path: Path) -> dict[str, Path]:
    """Write files as launch/export_indexer.py does for runs with different selections."""
    inputs = cases.indexer_inputs(1, 72)
    tensors = {"queries": inputs.q_idx, "keys": inputs.k_idx, "weight_logits": inputs.weight_logits}
    tensors |= {**inputs.biases, "variance_ema": torch.tensor(0.01, device=cases.DEVICE)}
    layers = {3: {name: tensor.detach() for name, tensor in tensors.items()}}
    own = {"local_window": 0, "k_base": 24, "k_min": 8, "k_max": 32}
    own |= {"indexer_activation": "sigmoid", "adaptive_k": "inverse", "indexer_pool": 1}
    files = {}
    for name, gsa in {
        "own": own,
        "window": {**own, "selection_block": 1, "local_window": 40, "indexer_activation": "plain"},
        "shared": {**own, "selection_block": 32},
    }.items():
        files[name] = tmp_path / f"{name}.pt"
        torch.save({"gsa": gsa, "seq_len_tokens": 72, "layers": layers}, files[name])
    return files


def call(monkeypatch: pytest.MonkeyPatch, bench: Any, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", [f"{bench.__name__}.py", *map(str, words)])
    code: int = bench.main()
    return code


def test_an_export_is_read(exports: dict[str, Path]) -> None:
    import trained_indexers

    length, indexers = trained_indexers.read_indexers(exports["window"])
    assert (length, list(indexers)) == (72, [3])
    assert indexers[3].activation == "sigmoid"

    of_each = trained_indexers.read_indexers(exports["own"])[1][3]
    selection = of_each.select()
    assert torch.equal(mask_from_key_lists(selection.key_lists).sum(-1), selection.budget)
    with pytest.raises(ValueError, match="two files are of one length"):
        trained_indexers.read_all([exports["own"], exports["window"]])
    with pytest.raises(ValueError, match=r"shared\.pt: selection_block is 32; use release studies-0\.1"):
        trained_indexers.read_all([exports["shared"]])


def test_a_planted_selection_is_what_the_layers_use() -> None:
    """Planted projections determine the selections. The model's own indexer still learns, from a loss over the planted
    selections."""
    from helpers.single_rank import SPARSE, random_batches, single_rank, tiny_config
    from whole_steps.planted_indexer import alike, plant
    from whole_steps.step_bench import OurTrainee

    config = tiny_config(
        [SPARSE],
        model={"init_std": 0.02},
        data={"attend_across_documents": True},
        train={"precision": "fp32"},
    )
    found = []

    def prepare(model: Any) -> None:
        found.extend(alike(each.indexer, 16, 0.5, seed) for seed, each in enumerate(model.attentions))
        plant(model, found, batch=2)
        for planted, attention in zip(found, model.attentions, strict=True):
            bias = attention.indexer.score_bias
            assert torch.equal(bias, planted.score_bias)
            given = attention.indexer(torch.randn(16, 2, 16).to(bias))
            assert torch.equal(given.keys[1], planted.projections.keys[0])

    trainee = OurTrainee(config, SPARSE, single_rank(), prepare)
    before = [each.indexer.key_weight.detach().clone() for each in trainee.model.attentions]
    trainee.step(random_batches(config, attend_across=True))
    for old, attention in zip(before, trainee.model.attentions, strict=True):
        assert not torch.equal(old, attention.indexer.key_weight)
    trainee.close()
    assert len(found) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_bench_without_its_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_decode

    with pytest.raises(SystemExit, match="No CUDA device here"):
        call(monkeypatch, bench_decode)
