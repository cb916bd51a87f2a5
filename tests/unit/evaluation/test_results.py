"""Tests results of evaluations: as files and as a W&B run."""

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gsa_eval.results import write_results
from gsa_eval.wandb_run import log_to_wandb, scores_of
from gsa_train.config import Config
from gsa_train.metrics.record_format import numbers_back
from helpers.run_logs import refuse_constant
from helpers.single_rank import tiny_config

TEXT = {
    "loss": 2.0,
    "perplexity": 7.389,
    "bits_per_byte": 0.9,
    "tokens": 640,
    "loss_by_position": [{"from": 1, "to": 16, "loss": 3.0}, {"from": 17, "to": 32, "loss": 1.5}],
}
RULER = {
    "scores": {"1000": {"niah_single_1": 100.0}, "2000": {"niah_single_1": 33.3}},
    "mean": {"1000": 100.0, "2000": 33.3},
    "effective_length": 1000,
    "tasks": ["niah_single_1"],
    "samples": 3,
}
RESULTS: dict[str, Any] = {
    "name": "all",
    "model": {"checkpoint": "/runs/x/step_3", "step": 3, "tokens_trained": 192, "settings": ["gsa.k_base=5"]},
    "command": "gsa-evaluate --run <x>",
    "data": {"wiki": TEXT},
    "ruler": RULER,
    "requests": {"piqa_rc": {"accuracy": 0.5, "length_normalised_accuracy": 0.75, "bits_per_byte": 1.25}},
    "tasks": {"results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.01}}},
}


def test_an_error_in_a_write_leaves_nothing_at_all(tmp_path, monkeypatch):
    """A kill in any write is in test_beside_a_run.py."""
    monkeypatch.setattr("pathlib.Path.write_text", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_results(tmp_path / "all", RESULTS)
    assert list(tmp_path.iterdir()) == []


def test_scores_in_short() -> None:
    assert scores_of(RESULTS) == {
        "perplexity/wiki": 7.389,
        "bits_per_byte/wiki": 0.9,
        "accuracy/piqa_rc": 0.5,
        "length_normalised_accuracy/piqa_rc": 0.75,
        "bits_per_byte/piqa_rc": 1.25,
        "acc/arc": 0.25,
        "ruler/1000": 100.0,
        "ruler/2000": 33.3,
    }


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    places = [{"from": 1, "to": 16, "loss": nan}, {"from": 17, "to": 32, "loss": inf}]
    text = {**TEXT, "loss": nan, "perplexity": inf, "bits_per_byte": nan, "loss_by_position": places}
    requests = {"piqa_rc": {"accuracy": 0.5, "bits_per_byte": -inf}}
    results = {**RESULTS, "data": {"wiki": text}, "requests": requests}
    write_results(tmp_path / "strict", results)
    text_of_file = (tmp_path / "strict" / "results.json").read_text()
    content = json.loads(text_of_file, parse_constant=refuse_constant)
    assert content["data"]["wiki"]["loss_by_position"][1] == {"from": 17, "to": 32, "loss": "Infinity"}
    assert content["requests"]["piqa_rc"]["bits_per_byte"] == "-Infinity"
    scores = scores_of(numbers_back(content))
    assert (scores["perplexity/wiki"], scores["bits_per_byte/piqa_rc"]) == (inf, -inf)


def wandb_config(**logging: str) -> Config:
    return tiny_config(run={"name": "gsa"}, logging={"wandb_project": "p", **logging})


def test_an_evaluation_is_a_wandb_run_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    write_results(folder, {**RESULTS, "tables": []})
    run_id = log_to_wandb(RESULTS, folder, wandb_config(wandb="offline", wandb_group="study"), "trained1")
    (kept,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert f"run-{run_id}.wandb" == kept.name
    words = ["evaluation", "study", "gsa all", "training_run", "trained1"]
    words += ["eval/perplexity/wiki", "eval/ruler/1000"]
    deadline = time.monotonic() + 60  # W&B's process writes the file some time after it reports success
    while missing := [word for word in words if word.encode() not in kept.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)


def test_wandb_may_be_off(tmp_path: Path) -> None:
    assert log_to_wandb(RESULTS, tmp_path, wandb_config(wandb="disabled"), None) is None
    assert log_to_wandb(RESULTS, tmp_path, wandb_config(wandb="offline"), None, choice="disabled") is None
    assert list(tmp_path.iterdir()) == []
