"""Tests that exported transformers folders have equal logits, are complete or absent, and import bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

import gsa_hf
from gsa_eval.commands import export_hf as command
from gsa_eval.convert.export_hf import export_hf, find_source, new_folder
from gsa_eval.convert.hf_config import GSA_FIELDS, MODEL_FIELDS, to_hf_config
from gsa_eval.convert.import_hf import import_hf
from gsa_train.config import GSAConfig, ModelConfig
from helpers.converted import (
    MODELS,
    TOKENIZER,
    config_of,
    hf_logits,
    model_with_weights_of,
    save,
    some_tokens,
    training_logits,
)
from helpers.evaluated import evaluated_model


def files_of(folder: Path) -> dict[str, bytes]:
    """Read all files except the model card, which names the source of the weights."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_training_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    model = evaluated_model(config)
    checkpoint = save(model, config, tmp_path / "checkpoints")
    done = export_hf(checkpoint, tmp_path / "out", max_shard_bytes=150_000)
    assert len(list(done.folder.glob("model-*-of-*.safetensors"))) > 1

    tokens = some_tokens()
    expected = training_logits(model, config.phases[0], tokens)
    torch.testing.assert_close(hf_logits(done.folder, tokens), expected, rtol=1e-5, atol=1e-5)

    import_hf(done.folder, tmp_path / "back")
    if config.moe.experts:
        card = (done.folder / "README.md").read_text()
        assert f"| experts | {config.moe.experts} of width {config.moe.expert_ffn_hidden_size} in " in card
        assert "context 1, expert 1, expert tensor 1 |" in card
        back = model_with_weights_of(tmp_path / "back", config)
        assert torch.equal(training_logits(back, config.phases[0], tokens), expected)
    again = export_hf(tmp_path / "back", tmp_path / "again", max_shard_bytes=150_000)
    assert files_of(again.folder) == files_of(done.folder)


@pytest.mark.parametrize("name", ["gated-only", "GSA"])
def test_in_bf16_the_error_matches_training(name: str, tmp_path: Path) -> None:
    """Every query selects all its causal keys, because rounding would decide between near scores."""
    config = config_of(name, precision="bf16")
    model = evaluated_model(config)
    for attention in model.attentions:
        if attention.variance is not None:
            attention.variance.ema.fill_(1e6)
    checkpoint = save(model, config, tmp_path / "checkpoints")
    tokens = some_tokens()
    theirs = hf_logits(export_hf(checkpoint, tmp_path / "bf16").folder, tokens)
    exact = hf_logits(export_hf(checkpoint, tmp_path / "fp32", dtype="fp32").folder, tokens)
    ours = training_logits(model, config.phases[0], tokens)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    error = (ours - exact).abs().max()
    assert error > 0
    assert (theirs - exact).abs().max() <= 2 * error


@pytest.fixture(scope="module")
def gsa(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gsa")
    config = config_of("GSA")
    checkpoint = save(evaluated_model(config), config, folder / "run" / "checkpoints")
    return checkpoint, export_hf(checkpoint, folder / "out").folder


def test_the_folder_is_all_that_transformers_asks_for(gsa: tuple[Path, Path]) -> None:
    _, out = gsa
    content = json.loads((out / "config.json").read_text())
    assert content["auto_map"]["AutoModelForCausalLM"] == "modeling_gsa.GSAForCausalLM"
    assert all((out / f"{place.split('.')[0]}.py").is_file() for place in content["auto_map"].values())
    assert content["eos_token_id"] == GenerationConfig.from_pretrained(out).eos_token_id == 2
    assert (out / "tokenizer.model").read_bytes() == Path(TOKENIZER).read_bytes()
    card = (out / "README.md").read_text()
    assert "| tokens seen | 64 (64) |" in card
    assert "library_name: transformers" in card


def test_a_folder_in_use_is_refused_and_a_kill_leaves_none(gsa, tmp_path, monkeypatch):
    checkpoint, out = gsa
    with pytest.raises(ValueError, match=r"--out .*: exists and is not empty; give another folder"):
        export_hf(checkpoint, out)

    killed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("gsa_eval.convert.export_hf.write_shards", killed)
    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, tmp_path / "new")
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_checkpoint_and_another_tokenizer_are_refused(tmp_path: Path) -> None:
    config = config_of("standard")
    checkpoint = save(evaluated_model(config), config, tmp_path / "checkpoints")
    copy = checkpoint / "tokenizer.model"
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + b"?")
    with pytest.raises(ValueError, match=r"tokenizer .*: not the file that .* was trained with"):
        export_hf(checkpoint, tmp_path / "out")
    copy.write_bytes(content)
    shard = checkpoint / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged: __0_0\.distcp has .* Give another checkpoint"):
        export_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_field_of_the_model_has_been_thought_of() -> None:
    """A new field that `gsa_hf` does not know must be refused in to_hf_config, or added here."""
    rotary = {"rope_base", "rope_scaling", "rotary_percent"}  # in rope_parameters
    trains = {"gate_bias_init", "indexer_loss_row_fraction", "variance_ema_decay"}
    runs = {"attention", "attention_impl", "attention_kernel", "dense_attention"}
    for section, fields, others in (
        (ModelConfig, MODEL_FIELDS, rotary),
        (GSAConfig, GSA_FIELDS, trains | runs),
    ):
        assert {field.name for field in dataclasses.fields(section)} == {*fields} | others
    for theirs in (*MODEL_FIELDS.values(), *GSA_FIELDS.values()):
        assert hasattr(gsa_hf.GSAConfig(), theirs)


def test_a_value_that_transformers_has_not_is_refused_in_one_line() -> None:
    config = config_of("GSA")
    config = dataclasses.replace(config, gsa=dataclasses.replace(config.gsa, indexer_activation="softplus"))
    message = r"^the model of transformers .* 'indexer_activation' .* got softplus$"
    with pytest.raises(ValueError, match=message):
        to_hf_config(config)


def test_the_checkpoint_that_is_meant(gsa: tuple[Path, Path]) -> None:
    checkpoint, _ = gsa
    run = checkpoint.parents[1]
    assert find_source(run, None, None) == find_source(run, 1, None) == (checkpoint, run)
    assert find_source(None, None, checkpoint) == (checkpoint, None)
    for place, message in (
        ((run, 7, None), r"--step 7: no complete checkpoint there; steps that have one: 1"),
        ((None, None, checkpoint.parents[2]), r"--checkpoint .*: no complete checkpoint there"),
        ((None, None, run / "nowhere"), r"--checkpoint .*nowhere: no such folder; give a step_\* folder"),
        ((run / "nowhere", None, None), r"--run .*nowhere: no such folder; give a run's folder"),
    ):
        with pytest.raises(ValueError, match=message):
            find_source(*place)


def test_the_command(gsa, tmp_path, monkeypatch, capsys):
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["export_hf.py", *words])
        return command.main()

    checkpoint, out = gsa
    place = ("--checkpoint", str(checkpoint), "--out")
    assert run(*place, str(tmp_path / "new"), "--max-shard-size", "1MB") == 0
    assert "tensors" in capsys.readouterr().out
    assert run(*place, str(out)) == 2
    assert "not empty" in capsys.readouterr().err
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr("gsa_eval.convert.safetensors_folder.save_file", Mock(side_effect=full))
    assert run(*place, str(tmp_path / "full")) == 2
    said = r"model.safetensors cannot be written: .*No space left.*; make room"
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "full").exists()
    shutil.copytree(checkpoint, tmp_path / "short")
    os.truncate(tmp_path / "short" / "common.pt", 1000)
    assert run("--checkpoint", str(tmp_path / "short"), "--out", str(tmp_path / "full")) == 2
    assert re.search("short: common.pt is damaged: .*Give another checkpoint", capsys.readouterr().err)
    for wrong in (["--max-shard-size", "much"], ["--step", "1"], ["--dtype", "fp8"]):
        with pytest.raises(SystemExit) as end:
            run(*place, str(tmp_path / "other"), *wrong)
        assert end.value.code == 2


def test_a_folder_belongs_to_one_command(tmp_path: Path) -> None:
    """Leftovers of killed commands are removed, but not the files of a command that runs."""
    out, prefix = tmp_path / "out", f".tmp_out.{socket.gethostname()}."
    running, killed = tmp_path / f"{prefix}{os.getppid()}", tmp_path / f"{prefix}99999999"
    running.mkdir()
    killed.mkdir()
    folder = new_folder(out)
    mine = folder.__enter__()
    assert set(tmp_path.iterdir()) == {mine, running}
    (running / "theirs").touch()
    running.rename(out)
    with pytest.raises(ValueError, match=f"--out {out}: exists and is not empty"):
        folder.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
    said = "No space left on device; make room there, or give another place"
    with pytest.raises(OSError, match=said), new_folder(tmp_path / "full"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"theirs/a: .*Not a directory"), new_folder(out / "theirs/a"):
        pass
