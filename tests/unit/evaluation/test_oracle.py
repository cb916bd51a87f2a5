"""Compares a perfect indexer's selections with loops, and runs a model that attends to such selections."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gsa_eval.commands import oracle as command
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.oracle import Budget, Form, OracleAttention, retrieve, select
from helpers.evaluated import SAMPLE, TOKENIZER, evaluated_config, evaluated_model, save_run

LENGTH, FIRST_ROW = 45, 12


@pytest.mark.parametrize("name", ["q1k1", "q1k4", "q3k1", "q4k8", "q1k1hkv", "q2k4hkv"])
def test_what_is_selected(name: str) -> None:
    form, budget = Form.parse(name), Budget(selected=8, window=3)
    assert str(form) == name
    rows = torch.arange(FIRST_ROW, LENGTH)
    places = torch.arange(LENGTH)
    logits = torch.randn(2, 3, len(rows), LENGTH, generator=torch.Generator().manual_seed(0))
    probs = logits.masked_fill(places > rows[:, None], float("-inf")).softmax(-1)
    found = select(probs, rows, form, budget)
    assert found.shape == (2 if form.per_kv_head else 1, len(rows), LENGTH)
    for head in range(len(found)):
        heads = probs[head] if form.per_kv_head else probs.flatten(0, 1)
        for number, row in enumerate(rows.tolist()):
            leader = heads[:, number - number % form.queries].mean(0)
            best = {start: max(leader[start : start + form.keys]) for start in range(0, LENGTH, form.keys)}
            starts = sorted(best, key=lambda start: -best[start])[: budget.selected // form.keys]
            expected = {start + step for start in starts for step in range(form.keys)}
            expected |= {row - 2, row - 1, row}
            seen = set(found[head, number].nonzero()[:, 0].tolist())
            assert seen == {each for each in expected if each <= row}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_all_keys_are_dense_attention_and_fewer_are_not(model: LlamaForCausalLM) -> None:
    tokens = torch.randint(0, 4096, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [(tokens[:695], tokens[695:]), (tokens[:601], tokens[601:603])]
    dense = retrieve(model, prompts, None)
    assert dense.kept_mass is None
    assert dense.exact == 0.0
    for form in ("q1k1", "q4k16", "q1k16hkv"):
        whole = retrieve(model, prompts, OracleAttention(Form.parse(form), Budget(704)))
        assert whole.log_probability == pytest.approx(dense.log_probability, abs=1e-5)
        assert whole.kept_mass == pytest.approx(1, abs=1e-5)
        few = retrieve(model, prompts, OracleAttention(Form.parse(form), Budget(16, window=1)))
        assert few.kept_mass is not None
        assert few.kept_mass < 0.9
        assert abs(few.log_probability - dense.log_probability) > 1e-3
    assert model.config._attn_implementation == "sdpa"


def test_the_command(model, tmp_path, monkeypatch, capsys):
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").write_bytes(Path(TOKENIZER).read_bytes())
    out = tmp_path / "found.json"
    words = f"--hf {tmp_path}/model --haystack {SAMPLE}/validation --lengths 400 --samples 2"
    words += f" --tasks niah_single_2 --out {out}"

    def code(forms: str, *more: object) -> int:
        monkeypatch.setattr("sys.argv", ["oracle.py", *words.split(), *map(str, more), "--forms", forms])
        return command.main()

    assert code("q1k5,q32k1") == 0, capsys.readouterr().err
    rows = json.loads(out.read_text())["rows"]
    assert [row["form"] for row in rows] == ["own", "q1k5", "q32k1"]
    assert all(row["log_probability"] < 0 for row in rows)
    assert code("") == 2
    assert f"--out {out}: exists already; give a new file" in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == rows
    out.unlink()
    assert code("") == 0, capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == rows[:1]
    out.unlink()
    config = evaluated_config()
    run = save_run(evaluated_model(config), config, tmp_path / "run")
    export_hf(run / "checkpoints" / "step_00000003", tmp_path / "gsa")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, tensors in (
        ("missing", {each: weights[each] for each in weights if each != name}),
        ("unexpected", {**weights, "model.more": torch.ones(1)}),
        ("mismatched", {**weights, name: torch.ones(1, 64)}),
        ("damaged", weights),
    ):
        folder = shutil.copytree(tmp_path / "model", tmp_path / wrong)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    os.truncate(tmp_path / "damaged" / "model.safetensors", 100_000)
    for wrong, text in (("size", f'{{"vocab_size": {10**18}}}'), ("list", "[]")):
        folder = shutil.copytree(tmp_path / "model", tmp_path / wrong)
        (folder / ("config.json" if wrong == "size" else "generation_config.json")).write_text(text)
    for forms, more, message in (
        ("q1", (), "form 'q1': give"),
        ("q1k3", (), "25 keys are not a multiple of 3"),
        ("", ("--out", tmp_path / "none" / "x.json"), "x.json: its folder does not exist; give"),
        ("", ("--hf", tmp_path / "missing"), f"missing in the weights: {name}; copy"),
        ("", ("--hf", tmp_path / "unexpected"), "unexpected in the weights: model.more; copy"),
        ("", ("--hf", tmp_path / "mismatched"), f"mismatched in the weights: ('{name}'"),
        ("", ("--hf", tmp_path / "damaged"), "model.safetensors is damaged: "),
        (
            "",
            ("--hf", tmp_path / "size"),
            f"config.json: vocab_size = {10**18}: more than 262144, the numbers in",
        ),
        ("", ("--hf", tmp_path / "list"), "generation_config.json is damaged: it holds no fields; copy"),
        ("", ("--tasks", "nope"), "RULER has no task nope; give some of"),
        ("", ("--device", "abacus"), "--device abacus: not on this machine"),
        (
            "q1k1",
            ("--hf", tmp_path / "gsa"),
            "--forms q1k1: a GSA model has its own selections; give --forms ''",
        ),
    ):
        assert code(forms, *more) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()  # nothing partial
