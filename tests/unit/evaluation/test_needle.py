"""Tests needles in a haystack: a model constructed to find them does so with a selection of few keys. The same model
without one part does not find them."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_eval.commands.evaluate import parse
from gsa_eval.evaluate import run_evaluation
from gsa_eval.generation import continue_prompts
from gsa_eval.plots import DEPTHS
from gsa_eval.ruler import Material, samples
from gsa_eval.ruler_words import NOISE
from gsa_hf import GSAForCausalLM
from helpers.copying_model import EOS, ESSAY, Defect, write_copying_model

ONE_OF_ONE = ("niah_single_1", "niah_single_2")
ONE_OF_MANY = ("niah_multikey_1", "niah_multikey_2")
TASKS = (*ONE_OF_ONE, *ONE_OF_MANY)
DENSE = ["gsa.attention=dense"]
ONE_KEY = ["gsa.k_base=1", "gsa.k_min=1", "gsa.k_max=1"]
CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Defect, Path]:
    folder = tmp_path_factory.mktemp("copying")
    (folder / "essay").mkdir()
    (folder / "essay" / "essay.jsonl").write_text(json.dumps({"text": ESSAY}))
    defects = ("", *get_args(Defect)[1:])
    return {each: write_copying_model(folder / (each or "whole").replace(" ", "_"), each) for each in defects}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[Defect, Path]) -> Tokenizer:
    return Tokenizer(str(folders[""] / "tokenizer.json"), EOS)


@pytest.fixture(scope="module")
def model(folders: dict[Defect, Path]) -> GSAForCausalLM:
    loaded: GSAForCausalLM = GSAForCausalLM.from_pretrained(folders[""])
    return loaded


def ruler_of(folder: Path, out: Path, lengths: str, samples: int, *more: str) -> dict[str, Any]:
    words = ["--hf", str(folder), "--out", str(out), "--name", "needle", "--ruler", lengths]
    words += ["--ruler-tasks", ",".join(TASKS), "--ruler-samples", str(samples)]
    words += ["--haystack", str(folder.parent / "essay"), "--batch-size", "3", *more]
    written, _ = run_evaluation(parse(words), words)
    found: dict[str, Any] = json.loads((written / "results.json").read_text())["ruler"]
    return found


@pytest.mark.parametrize(
    ("more", "warns"), [((), True), (("model.rope_base=1e6",), False), (("--ruler", "256"), False)]
)
def test_positions_that_training_had_not(folders, tmp_path, caplog, more, warns):
    words = ["--hf", str(folders[""]), "--out", str(tmp_path), "--name", "far", "--ruler", "LENGTH", *more]
    trained = json.loads((folders[""] / "config.json").read_text())["max_position_embeddings"]
    words[words.index("LENGTH")] = str(trained + 1)
    words += ["--ruler-tasks", "niah_single_1", "--ruler-samples", "1"]
    with caplog.at_level("WARNING"):
        run_evaluation(parse(words), words)
    said = f"{trained + 1} tokens: more than the {trained} of a sequence in training"
    assert (said in caplog.text) == warns


def test_every_needle_is_found_by_few_keys(folders: dict[Defect, Path], tmp_path: Path) -> None:
    found = ruler_of(folders[""], tmp_path, "512,1024", 5, "--seed", "1")
    assert found["scores"] == {length: dict.fromkeys(TASKS, 100.0) for length in ("512", "1024")}
    assert found["effective_length"] == 1024
    depths = {min(int(each["depth"] * DEPTHS), DEPTHS - 1) for each in found["needles"]}
    assert depths == set(range(DEPTHS))


@pytest.mark.parametrize(
    ("defect", "settings", "score"),
    [
        ("", ONE_KEY, 100.0),
        ("no match", [], 0.0),
        ("inverted indexer", [], 0.0),
        ("inverted indexer", DENSE, 100.0),
    ],
)
def test_what_a_needle_is_found_by(defect, settings, score, folders, tmp_path):
    found = ruler_of(folders[defect], tmp_path, "512", 2, *settings)
    assert found["scores"] == {"512": dict.fromkeys(TASKS, score)}
    assert {each["score"] for each in found["needles"]} == {score}


@pytest.mark.parametrize(("sentences", "depths"), [(60, range(0, 101, 10)), (300, (0, 100))])
def test_depths_from_the_first_word_to_the_last(sentences, depths, model, tokenizer):
    """The depths include 0 and 100%, which RULER's random depths do not reach."""
    (sample,) = samples("niah_single_1", 512, 1, 0, tokenizer, Material())
    begin, _, end = sample.prompt.split("\n\n")
    needle = next(each for each in sample.prompt.split(". ") if sample.answers[0] in each) + "."
    noise = [NOISE[place % len(NOISE)] for place in range(sentences)]
    prompts = []
    for depth in depths:
        place = sentences * depth // 100
        text = " ".join([*noise[:place], needle, *noise[place:]])
        prompts.append(tokenizer.encode(f"{begin}\n\n{text}\n\n{end}").tolist())
    answers = continue_prompts(model, tokenizer, prompts, 8, batch_size=3)
    assert answers == [f" {sample.answers[0]}"] * len(prompts)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("defect", "score"), [("", 100.0), ("inverted indexer", 0.0)])
def test_32k_tokens_on_the_kernels(defect, score, folders, tmp_path):
    found = ruler_of(folders[defect], tmp_path, "8192,32768", 3, "--attention", "gsa", "--dtype", "bf16")
    assert found["scores"] == {length: dict.fromkeys(TASKS, score) for length in ("8192", "32768")}
