"""Exports the checkpoint of a tensor x pipeline run to transformers in one process."""

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
from helpers.runs import whole_run
from helpers.single_rank import single_rank

pytestmark = pytest.mark.slow


def test_logits_match_the_training_model(tmp_path):
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
