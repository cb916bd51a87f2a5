"""Compares evaluation by the training's own model on a CUDA device with the model of transformers."""

import pytest

pytest.importorskip("transformers")

from gsa_eval import evaluated_model as loading
from gsa_eval import trained_model
from gsa_eval.evaluated_model import Execution, Source, load_evaluated_model
from gsa_eval.perplexity import score_text
from gsa_eval.text import TextOptions, read_text
from helpers.evaluated import LENGTH, evaluated_config, evaluated_model, save_run
from helpers.single_rank import single_rank


@pytest.mark.parametrize("attention", ["gsa", "sdpa"])
def test_both_models_give_the_same_loss(attention, tmp_path, monkeypatch):
    """bf16, with gates that the fused operations lack, by the kernels and in plain torch."""
    monkeypatch.setattr(trained_model, "init_parallel", lambda *_: single_rank())
    config = evaluated_config(
        model={"hidden_size": 64, "head_dim": 32, "sandwich_norm": True},
        gsa={"indexer_dim": 16, "key_gate": True, "gate_activation": "ns_sigmoid"},
    )
    folder = save_run(evaluated_model(config), config, tmp_path / "run")
    losses = []
    for reasons in ([], ["something"]):
        monkeypatch.setattr(loading, "not_in_hf", lambda _, found=reasons: found)
        evaluated = load_evaluated_model(Source(run=folder), execution=Execution(attention=attention))
        options = TextOptions(LENGTH, None, 4 * LENGTH, evaluated.attend_across_documents)
        text = read_text(config.data.validation_dir, evaluated.tokenizer, options)
        losses.append(score_text(evaluated.model, text, batch_size=2)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
