"""Tests files with results of evaluations."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gsa_eval.results import write_results
from gsa_train.metrics.record_format import numbers_back
from helpers.run_logs import refuse_constant

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
    back = numbers_back(content)
    assert back["data"]["wiki"]["perplexity"] == inf
    assert back["requests"]["piqa_rc"]["bits_per_byte"] == -inf
