"""Tests analyses of attention: numbers match the model and its training; pictures show what they claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsa_eval.analyze import _write_numbers, given_text
from gsa_eval.attention_pictures import draw_maps
from gsa_eval.attention_record import GATE_BINS, Gate, HeadMaps, record_attention
from gsa_eval.commands import analyze as command
from gsa_eval.convert.export_hf import export_hf
from gsa_hf.gates_gsa import gate_heads
from helpers.evaluated import evaluated_config, evaluated_model, files_of_run, save_run
from helpers.hf import MODELS, distinct_tokens, tiny_model
from helpers.run_logs import refuse_constant

LENGTH = 80
LAYER = 1
TEXT = "The tower stood by the sea, and " + "the gate of the tower was shut. " * 9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Create a GSA model of training, its config and its run's folder."""
    config = evaluated_config(train={"seq_len_tokens": LENGTH})
    model = evaluated_model(config)
    return model, config, save_run(model, config, tmp_path_factory.mktemp("runs") / "run")


def analyzed(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr("sys.argv", ["analyze.py", *map(str, words)])
    return command.main()


# --- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_numbers_match_the_layer(name: str) -> None:
    """Weights times values, gated and projected, must equal the layer's output, which the model computes itself."""
    model = tiny_model(name)
    attention: Any = model.model.layers[LAYER].self_attn
    tokens = distinct_tokens(1, LENGTH)
    passed: dict[str, torch.Tensor] = {}
    attention.register_forward_pre_hook(lambda _, inputs: passed.update(h=inputs[0]))
    attention.register_forward_hook(lambda _, __, output: passed.update(output=output[0]))
    heads = model.config.num_attention_heads
    records = [record_attention(model, tokens[0].tolist(), LAYER, head) for head in range(heads)]
    maps = [record.maps for record in records if record.maps is not None]
    hidden, expected = passed["h"][0], passed["output"][0]
    config = model.config
    with torch.no_grad():
        values, logits = attention.v_proj(hidden).view(LENGTH, 2, 8), None
        if attention.value_gate_proj is not None:
            logits = attention.value_gate_proj(hidden)
            values = gate_heads(values, logits, config)
            check_gate(records[0].value_gates, logits, config)
        columns = [maps[head].weights @ values[:, head // 2] for head in range(heads)]
        logits = None
        if attention.output_gate_proj is not None:
            logits = attention.output_gate_proj(hidden)
            check_gate(records[0].output_gates, logits, config)
        out = attention.leave(torch.stack(columns, 1)[None], logits, hidden[None])
        torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-6)

    causal = torch.ones(LENGTH, LENGTH).tril() > 0
    for head, found in enumerate(maps):
        attended = causal if found.selected is None else found.selected
        assert not (attended & ~causal).any()
        assert not found.weights[~attended].any()
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(LENGTH), rtol=1e-5, atol=0)
        torch.testing.assert_close(found.full.sum(-1), torch.ones(LENGTH), rtol=1e-5, atol=0)
        shares = (found.full * attended).sum(-1, keepdim=True)
        torch.testing.assert_close(found.full * attended / shares, found.weights, rtol=1e-4, atol=1e-6)
        sink = found.weights[63:, 0].mean().item()
        assert records[head].sink[LAYER][head] == pytest.approx(sink, rel=1e-5)
    found = maps[0]
    if not attention.is_sparse:
        assert (found.scores, found.selected, found.indexer_layer) == (None, None, None)
        assert records[0].keys[LAYER] is None
        return
    assert found.selected is not None
    assert found.scores is not None
    assert records[0].keys[LAYER] == found.selected.sum(-1).tolist()
    assert found.indexer_layer == (0 if "reuse" in name else 1)
    leaves_out = (found.selected.sum(-1) < causal.sum(-1)).nonzero()[:, 0]
    shares = [(found.full[t] * found.selected[t]).sum().item() for t in leaves_out.tolist()]
    assert found.recall == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    if model.config.local_window == 0:  # selection then depends only on the score
        for t in leaves_out.tolist():
            left = found.scores[t, : t + 1][~found.selected[t, : t + 1]]
            assert found.scores[t][found.selected[t]].min() >= left.max()


def check_gate(found: list[Gate], logits: torch.Tensor, config: Any) -> None:
    """Compare with the layer's gate; without bounds nothing is found."""
    if config.gate_activation == "silu":
        assert found == []
        return
    assert config.gate_activation == "sigmoid"
    opened = logits.sigmoid()
    if config.gate_granularity == "elementwise":
        opened = opened.view(LENGTH, -1, config.head_dim)
        means = opened.mean((0, 2)).tolist()
    else:
        means = opened.mean(0).tolist()
    assert found[LAYER].means == pytest.approx(means, rel=1e-5)
    bins = (opened.flatten() * GATE_BINS).long().clamp(max=GATE_BINS - 1)
    assert found[LAYER].histogram == bins.bincount(minlength=GATE_BINS).tolist()


# --- the command -----------------------------------------------------------------------------------------


def test_the_command_writes_pictures(run, monkeypatch, tmp_path, capsys):
    run_dir = run[2]
    before = files_of_run(run_dir)
    assert analyzed(monkeypatch, "--run", run_dir, "--name", "own", "--head", 3, "--max-tokens", 60) == 0
    assert "own/attention.png" in capsys.readouterr().out
    exported = export_hf(run_dir / "checkpoints" / "step_00000003", tmp_path / "hf").folder
    place = ("--hf", exported, "--out", run_dir / "analysis", "--name", "dense", "--text", TEXT)
    assert analyzed(monkeypatch, *place, "gsa.attention=dense") == 0
    assert files_of_run(run_dir) == before
    for name, pictures in (
        ("own", ["attention", "gates", "keys", "sink"]),
        ("dense", ["attention", "gates", "sink"]),
    ):
        folder = run_dir / "analysis" / name
        assert sorted(path.stem for path in folder.glob("*.png")) == pictures
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    numbers = json.loads((run_dir / "analysis" / "own" / "results.json").read_text())
    assert (numbers["layer"], numbers["head"], numbers["text"]["tokens"]) == (0, 3, 60)
    assert (numbers["least_keys"], numbers["text"]["origin"]) == (30, "a validation document")
    assert numbers["command"].startswith("gsa-analyze --run")
    assert set(np.load(run_dir / "analysis" / "dense" / "maps.npz")) == {"weights", "full"}

    assert analyzed(monkeypatch, "--run", run_dir, "--name", "own") == 2
    assert "exists; give another name, or remove the folder" in capsys.readouterr().err


def test_wrong_use(run, tmp_path, monkeypatch, capsys):
    exported = export_hf(run[2] / "checkpoints" / "step_00000003", tmp_path / "hf").folder
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("")
    for words, message in (
        (("--layer", 2), "--layer 2: the model has 2; give one from 0 to 1"),
        (("--head", 4), "--head 4: the model has 4; give one from 0 to 3"),
        (("--file", tmp_path / "empty.txt"), "empty.txt: 0 tokens"),
        (("--file", tmp_path / "bytes.txt"), "not UTF-8 text"),
        (("--file", tmp_path / "nowhere.txt"), "nowhere.txt: cannot be read (No such file"),
        (("--max-tokens", 5000), "--max-tokens 5000: give 2 to 4,096"),
        (("--max-tokens", 1), "--max-tokens 1: give 2 to 4,096"),
        (("--text", "caf\udce9"), "--text: character 4 is not UTF-8"),
        (("--out", tmp_path / "empty.txt"), "is not a writable folder"),
    ):
        assert analyzed(monkeypatch, "--run", run[2], "--name", "wrong", *words) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error
    (tmp_path / "marked.txt").write_text("as Windows writes", encoding="utf-8-sig")
    file = command.parse(["--run", "x", "--name", "y", "--file", str(tmp_path / "marked.txt")])
    assert given_text(file) == ("as Windows writes", "marked.txt")
    out = ("--name", "wrong", "--out", tmp_path / "out")
    assert analyzed(monkeypatch, "--hf", exported, *out) == 2
    assert "give --text or --file" in capsys.readouterr().err
    assert not (run[2] / "analysis" / "wrong").exists()
    with pytest.raises(SystemExit):
        command.parse(["--run", "x", "--name", "y", "--text", "a", "--file", "b"])
    with pytest.raises(SystemExit):
        command.parse(["--hf", "x", "--name", "y", "--step", "3"])


# --- pictures --------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_strict_json(tmp_path: Path) -> None:
    maps = HeadMaps(torch.zeros(2, 2), torch.zeros(2, 2))
    nan = float("nan")
    _write_numbers(tmp_path, {"recall": -nan, "gates": [Gate([nan, 0.5], [1])]}, maps)
    content = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse_constant)
    assert content == {"recall": "NaN", "gates": [{"means": ["NaN", 0.5], "histogram": [1]}]}


def test_labels_show_tokens_that_are_marks() -> None:
    few = torch.ones(3, 3).tril() / torch.tensor([[1.0], [2.0], [3.0]])
    figure = draw_maps(HeadMaps(few, few), ["$x$", " a", "\n"], "Attention")
    (ax,) = (ax for ax in figure.axes if ax.get_title())
    assert [label.get_text() for label in ax.get_xticklabels()] == [r"\$x\$", "\u2423a", "\u21b5"]
