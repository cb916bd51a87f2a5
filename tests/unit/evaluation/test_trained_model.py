"""Tests scoring by the training's own model where `gsa_hf` lacks a feature, and compares both where it does not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsa_data.corpus import open_corpus
from gsa_data.faults import Reading
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import read_validation_set
from gsa_eval import evaluated_model as loading
from gsa_eval import trained_model
from gsa_eval.answers import answer_prompts
from gsa_eval.commands import evaluate as command
from gsa_eval.evaluated_model import EvaluatedModel, Source, load_evaluated_model
from gsa_eval.generation import continue_prompts
from gsa_eval.perplexity import score_text, token_losses
from gsa_eval.settings import with_settings
from gsa_eval.text import Piece, TextOptions, read_text
from gsa_hf.generation import Generator
from gsa_train.validation.perplexity import evaluate
from helpers.evaluated import LENGTH, TOKENIZER, evaluated_config, evaluated_model, save_run
from helpers.single_rank import single_rank

READ = 3
POOL: dict[str, dict[str, Any]] = {
    "gsa": {"key_group_size": 2, "key_gate": True, "output_gate": False, "output_transform": "silu"},
    "model": {"sandwich_norm": True},
}
ACROSS: dict[str, dict[str, Any]] = {"data": {"attend_across_documents": True}}
ALL: dict[str, dict[str, dict[str, Any]]] = {"pool": POOL, "across": ACROSS, "plain": {}}


@pytest.fixture(autouse=True)
def one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "init_parallel", lambda *_: single_rank())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, Path]]:
    made = {}
    for name, sections in ALL.items():
        config = evaluated_config(evaluate={"max_blocks": READ}, **sections)
        model = evaluated_model(config)
        made[name] = (model, config, save_run(model, config, tmp_path_factory.mktemp("runs") / name))
    return made


def loss_of(evaluated: EvaluatedModel) -> float:
    assert evaluated.config is not None
    options = TextOptions(LENGTH, None, READ * LENGTH, evaluated.attend_across_documents)
    text = read_text(evaluated.config.data.validation_dir, evaluated.tokenizer, options)
    found: float = score_text(evaluated.model, text, batch_size=2)["loss"]
    return found


@pytest.mark.parametrize("name", ["pool", "across"])
def test_the_run_says_the_same(name, runs, monkeypatch):
    model, config, folder = runs[name]
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"])
    tokenizer, across = Tokenizer(TOKENIZER), config.data.attend_across_documents
    arguments = (open_corpus(config.data.validation_dir), tokenizer, LENGTH, READ, Reading())
    validation = read_validation_set("validation", *arguments, across, split_by_source=False)
    expected = evaluate(model, [validation], tokenizer.eos_id, config, single_rank())
    found = loss_of(load_evaluated_model(Source(run=folder)))
    assert found == pytest.approx(expected["validation_loss"], rel=1e-6)


def test_where_both_models_can_they_agree(runs, monkeypatch):
    folder = runs["plain"][2]
    settings = {
        "as trained": [],
        "dense": ["gsa.attention=dense"],
        "fewer keys": ["gsa.k_base=3", "gsa.local_window=2", "gsa.adaptive_k=off"],
        "yarn": ["model.rope_scaling.rope_type=yarn", "model.rope_scaling.factor=2", "model.rope_base=5000"],
    }

    def losses() -> dict[str, float]:
        models = {name: load_evaluated_model(Source(run=folder), words) for name, words in settings.items()}
        return {name: loss_of(model) for name, model in models.items()}

    of_hf = losses()
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"])
    found = losses()
    assert found == {name: pytest.approx(loss, rel=1e-5) for name, loss in of_hf.items()}
    assert len({round(loss, 5) for loss in found.values()}) == len(settings)


def test_labels_and_continuations_match_transformers(runs, monkeypatch):
    folder, tokens = runs["plain"][2], np.arange(5, 25, dtype=np.int32)
    places = np.arange(len(tokens) - 1)
    pieces = [Piece(tokens, places >= 12, places), Piece(tokens[:9], places[:8] >= 3, places[:8])]
    one = load_evaluated_model(Source(run=folder))
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"])
    other = load_evaluated_model(Source(run=folder))
    losses = [token_losses(each.model, pieces, 2) for each in (other, one)]
    for ours, theirs in zip(*losses, strict=True):
        assert ours.number == theirs.number
        np.testing.assert_allclose(ours.nats, theirs.nats, rtol=1e-4, atol=1e-5)
        assert (ours.greedy == theirs.greedy).all()
    prompts = [[5, 9, 31], [7]]
    texts = [continue_prompts(each.model, each.tokenizer, prompts, 6, batch_size=2) for each in (one, other)]
    assert texts[0] == texts[1]
    # RULER's answers, in batches of two with padding, in the order of the prompts.
    generator = Generator(one.model, vocab_size=one.tokenizer.vocab_size, context_tokens=16)
    assert answer_prompts(generator, one.tokenizer, [[7], *prompts], 6, 2) == [texts[0][1], *texts[0]]
    for each in (one, other):  # at the beginning, and where a special token is named
        stops = [texts[0][1][:2], "</s>"]
        assert continue_prompts(each.model, each.tokenizer, prompts[1:], 6, stops) == [""]
    with pytest.raises(ValueError, match="only continue greedily"):
        continue_prompts(other.model, other.tokenizer, prompts, 2, do_sample=True)


@pytest.mark.parametrize("of_training", [False, True])
def test_no_token_is_written_that_the_tokenizer_does_not_have(of_training, tmp_path, monkeypatch):
    """The vocabulary is padded to a round number."""
    config = evaluated_config(model={"vocab_size": 4224})
    model = evaluated_model(config)
    with torch.no_grad():
        model.gpt.output_layer.weight[4096:] *= 100
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"] * of_training)
    evaluated = load_evaluated_model(Source(run=save_run(model, config, tmp_path / "run")))
    assert evaluated.tokenizer.vocab_size == 4096
    (text,) = continue_prompts(evaluated.model, evaluated.tokenizer, [[5, 9, 31]], 6)
    assert text


def test_the_command_scores_it_and_says_what_runs(runs, monkeypatch, capsys):
    folder = runs["pool"][2]
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"])

    def evaluated(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["evaluate.py", "--run", str(folder), *words])
        return command.main()

    assert evaluated("--name", "own", "--max-tokens", str(LENGTH)) == 0
    results = json.loads((folder / "evaluations" / "own" / "results.json").read_text())
    assert results["model"]["config"]["gsa"]["key_gate"] is True
    assert evaluated("--name", "fewer", "--max-tokens", str(LENGTH), "gsa.k_base=4") == 0
    fewer = json.loads((folder / "evaluations" / "fewer" / "results.json").read_text())["model"]["config"]
    assert fewer["gsa"] == {**results["model"]["config"]["gsa"], "k_base": 4}
    assert results["model"]["attention"] == "sdpa"
    counts = [parameter.numel() for parameter in runs["pool"][0].gpt.parameters()]
    assert results["model"]["parameters"] == sum(counts)
    for words, said in (
        (("gsa.k_base=99",), "gsa.k_base"),
        (("gsa.adaptive_k=up",), "gsa.adaptive_k=up: give inverse or direct or off"),
        (("--device", "meta"), "--device meta"),
    ):
        assert evaluated("--name", "wrong", *words) == 2
        assert said in capsys.readouterr().err


def test_a_model_with_one_matrix_for_embedding_and_output(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "not_in_hf", lambda _: ["something"])
    config = evaluated_config(model={"tie_embeddings": True}, gsa={"key_group_size": 2})
    model = evaluated_model(config)
    evaluated = load_evaluated_model(Source(run=save_run(model, config, tmp_path / "run")))
    tokens = torch.arange(2, 12)[None]
    logits = evaluated.model.lm_head(evaluated.model.hidden_states(tokens, None)[0])  # type: ignore[operator]
    model.gpt.eval()
    expected = model.gpt(tokens, torch.arange(10)[None], None)
    torch.testing.assert_close(logits, expected[0])


def test_settings_change_a_config_as_they_change_the_other() -> None:
    config = evaluated_config()
    words = ["model.rope_scaling.rope_type=yarn", "model.rope_scaling.factor=2", "gsa.k_base=4"]
    changed = with_settings(config, words)
    assert changed.model.rope_scaling.original_max_position_embeddings == LENGTH
    assert (changed.gsa.k_base, changed.gsa.k_min) == (4, config.gsa.k_min)
    with pytest.raises(ValueError, match=r"gsa\.k_bsae=4: an evaluation cannot set it"):
        with_settings(config, ["gsa.k_bsae=4"])
