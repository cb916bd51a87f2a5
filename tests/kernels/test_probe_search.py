"""The probe of a search by blocks: its bounds hold, and what it cannot miss it finds."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import probe_search

LENGTH = 256


def exported(activation: str) -> dict:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = {
        "queries": normal(1, LENGTH, 2, 16),
        "keys": normal(1, LENGTH, 16),
        "weight_logits": normal(1, LENGTH, 2),
    }
    biases = (normal(2), normal(2)) if activation == "sigmoid" else (None, None)
    layer |= dict(zip(("score_bias", "weight_bias"), biases, strict=True)) | {
        "variance_ema": torch.tensor(0.1)
    }
    gsa = {"indexer_activation": activation, "selection_block": 1, "indexer_pool": 1}
    return {"gsa": gsa, "seq_len_tokens": LENGTH, "layers": {4: layer}}


@pytest.mark.parametrize("activation", ["sigmoid", "relu", "plain", "qsa"])
def test_no_key_exceeds_the_bound_of_its_block(activation: str) -> None:
    layer, keys = probe_search.read(exported(activation), 4, "cpu")
    bounds = layer.bounds(keys.unflatten(0, (-1, 8)))
    scores = layer.of_keys(keys).unflatten(1, (-1, 8))
    assert (scores <= bounds[..., None] + 1e-5).all()
    assert torch.allclose(layer.bounds(keys[:, None]), scores.flatten(1), atol=1e-4)  # of blocks of one key


def test_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(exported("sigmoid"), tmp_path / "layers.pt")
    options = ["--block", "8", "--budgets", "16", "--widths", "2", "16", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["probe_search.py", str(tmp_path / "layers.pt"), *options])
    assert probe_search.main() == 0
    (row,) = json.loads((tmp_path / "probe_search.json").read_text())["rows"]
    assert row["layer"] == 4
    assert 0 < row["holding"] <= row["kept"] <= 1
    assert 0 < row["found_2"] < row["found_16"] == 1
    layer, keys = probe_search.read(exported("sigmoid"), 4, "cpu")
    single = probe_search.search(layer, keys, 1, 16, [1])
    assert single.kept == pytest.approx(
        single.holding, abs=0.01
    )  # up to the rounding of the threshold's own key
    assert single.found == {1: pytest.approx(1)}
