"""Tests runs that begin with the weights of a run in another layout, and its export."""

import dataclasses
import json

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_eval.convert.export_hf import export_hf, find_source
from gsa_train.checkpoint.load import load_weights
from gsa_train.config import ParallelConfig, load_config
from gsa_train.model.mcore.build import build_model
from helpers.converted import hf_logits, training_logits
from helpers.runs import kill, start, whole_run
from helpers.single_rank import single_rank

pytestmark = pytest.mark.slow


def test_a_new_run_begins_with_the_weights_of_another_one(tmp_path):
    """Layout, length and rotary base differ. A restart resumes from the new run's own checkpoint."""
    split = whole_run("tensor x pipeline")
    new = (
        "train.seq_len_tokens=256", "model.rope_base=20000", "checkpoint.every_steps=2", "parallel.tensor=2",
    )  # fmt: skip
    options = (*new, f"checkpoint.initial_weights={split.folder}")
    run = start(tmp_path, *options, ranks=2, faults={"held": [[4, 1]]})
    run.wait_until(lambda: (run.checkpoints / "latest").exists())
    kill(run)
    first, expected = run.steps()[0], split.steps()
    assert (first["step"], first["tokens"]) == (1, 4 * 256)
    assert first["loss"] < (expected[0]["loss"] + expected[-1]["loss"]) / 2
    again = start(tmp_path, *options, ranks=2)
    again.wait_until(again.steps_printed)
    kill(again)
    assert again.steps_printed()[0] > 2
    assert "weights of" in run.output
    assert "weights of" not in again.output


def test_an_export_of_split_ranks_has_the_logits_of_the_training_model(tmp_path):
    run = whole_run("tensor x pipeline")
    checkpoint, run_dir = find_source(run.folder, None, None)
    out = export_hf(checkpoint, tmp_path / "out", run_dir).folder
    config = dataclasses.replace(load_config(run.folder / "config.yaml"), parallel=ParallelConfig())
    model = build_model(config, single_rank())
    load_weights(checkpoint, model, single_rank())
    tokenizer = Tokenizer(str(out / "tokenizer.model"))
    text = "def f(x):\n    return x + 1\n" * 8
    tokens = torch.tensor(tokenizer.encode(text)[: config.train.seq_len_tokens]).long()[None]
    expected = training_logits(model, config.phases[-1], tokens)
    torch.testing.assert_close(hf_logits(out, tokens), expected, rtol=1e-5, atol=1e-5)

    card = (out / "README.md").read_text()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert f"| {summary['steps']} | {summary['val_loss']:.4f} |" in card
    assert f"{summary['tokens']:,}" in card
