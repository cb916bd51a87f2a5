"""Tests the export of indexer projections of a checkpoint on text, which benchmarks read."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest
import torch

from gsa_train.checkpoint.load import load_weights
from gsa_train.commands import export_indexer as export
from gsa_train.commands.export_indexer import capture_indexers
from gsa_train.config import config_to_yaml
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from helpers.checkpoints import write_checkpoint
from helpers.evaluated import LENGTH, evaluated_config, evaluated_model, save_run
from helpers.single_rank import (
    EOS,
    SPARSE,
    random_batches,
    random_blocks,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)


def test_projections_match_the_checkpoint(tmp_path: Path) -> None:
    config = tiny_config([SPARSE])
    trained = tiny_model(config)
    optimizer = build_optimizer(trained, SPARSE, config)
    take_step(trained, optimizer, random_batches(config), config, lr=1e-2)
    folder = write_checkpoint(tmp_path, 1, trained, optimizer, config)
    close_optimizer(trained, optimizer)
    loaded = tiny_model(config)
    load_weights(folder, loaded, single_rank())
    blocks = random_blocks(config)[:1].numpy()
    one = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=1))
    found = capture_indexers(loaded, blocks, [0, 1], EOS, one, single_rank())
    assert sorted(found) == [0, 1]
    heads, dim = config.gsa.indexer_heads, config.gsa.indexer_dim
    queries = found[1]["queries"]
    assert queries.shape == (1, config.train.seq_len_tokens, heads, dim)
    ema, bias = found[1]["variance_ema"], found[1]["score_bias"]
    assert torch.equal(ema, loaded.attentions[1].variance.ema)
    assert torch.equal(bias, loaded.attentions[1].indexer.score_bias)
    assert all(not attention.indexer._forward_hooks for attention in loaded.attentions)


def test_a_layer_without_indexer_is_refused() -> None:
    config = tiny_config([SPARSE], gsa={"selection_reuse": 2})
    model = tiny_model(config)
    with pytest.raises(ValueError, match="layer 1 has no indexer; choose among 0"):
        capture_indexers(model, random_blocks(config)[:1].numpy(), [1], EOS, config, single_rank())


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = evaluated_config()
    run, out = save_run(evaluated_model(config), config, tmp_path), tmp_path / "out.pt"
    monkeypatch.setattr(export, "init_parallel", lambda *_: single_rank())
    monkeypatch.setattr(export, "shutdown_parallel", lambda: None)
    larger = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=3))
    with pytest.raises(ValueError, match=r"holds another model: decoder\.layers\.2.* is missing there"):
        export.export_indexer(larger, run, LENGTH, [0], out)

    export.export_indexer(config, run, LENGTH, [0], out)
    assert torch.load(out)["seq_len_tokens"] == LENGTH


def test_wrong_use_of_the_command(tmp_path, monkeypatch, capsys):
    """Errors come before the checkpoint is read, if the arguments suffice."""
    script = Path(__file__).parents[2] / "launch" / "export_indexer.py"
    monkeypatch.chdir(script.parents[1])  # the bundled text's folders are relative
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000009")
    (tmp_path / "config.yaml").write_text(config_to_yaml(tiny_config([SPARSE])))
    out = str(tmp_path / "out.pt")
    for length, file, said in (
        ("0", out, "--seq-len-tokens 0: give 1 or more"),
        ("8", str(tmp_path), f"--out {tmp_path}: give a file in a folder that exists"),
        ("8", str(tmp_path / "no" / "out.pt"), "give a file in a folder that exists"),
        ("8", out, "latest names step_00000009, which is missing or incomplete"),
    ):
        words = ["export_indexer.py", str(tmp_path), "--seq-len-tokens", length, "--out", file]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(script), run_name="__main__")
        assert said in capsys.readouterr().err
