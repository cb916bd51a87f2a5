"""Tests the demo with experts, shortened: logs and losses; its checkpoint evaluates, exports and generates."""

import json
import math

import pytest

from gsa_eval.commands import evaluate, export_hf, generate
from helpers.runs import Run, start

SHORT = """
    model.num_layers=2 train.seq_len_tokens=64 train.micro_batch_size=2 train.global_batch_size=8
    phases.0.steps=10 phases.0.warmup_steps=2 phases.1.steps=4 phases.1.warmup_steps=1 phases.2.steps=10
    phases.2.warmup_steps=2 evaluate.max_blocks=8 checkpoint.every_steps=12 logging.every_steps=4
    logging.wandb=disabled
"""
EXPERTS, LAYERS = 8, 2

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run it on two ranks, each with half of the experts."""
    folder = tmp_path_factory.mktemp("demo_moe")
    return start(folder, *SHORT.split(), ranks=2, config="configs/demo_moe.yaml").wait()


def test_the_loss_falls_in_all_phases(demo: Run) -> None:
    loss = demo.series("loss")
    assert all(math.isfinite(value) for value in loss)
    assert loss[-1] < loss[0] - 0.5
    assert set(demo.series("phase")) == {"dense", "warm-up", "sparse"}


def test_every_logged_step_tells_of_its_experts(demo: Run) -> None:
    for record in demo.steps():
        loads = record["expert_loads"]
        assert [len(of_layer) for of_layer in loads] == [EXPERTS] * LAYERS
        assert all(sum(of_layer) == pytest.approx(EXPERTS, abs=1e-3) for of_layer in loads)
        assert record["expert_load_max"] == pytest.approx(max(map(max, loads)), abs=1e-4)
        assert 0 <= record["expert_load_min"] < 1 < record["expert_load_max"]
        assert 0 < record["router_entropy"] <= math.log(EXPERTS) + 1e-6
        assert record["router_balance"] > 0.99
    (validation,) = [each for each in demo.records() if each.get("event") == "validation"]
    assert validation["validation_router_entropy"] > 0
    assert "validation_expert_loads" not in validation


def test_its_checkpoint_evaluates_exports_and_generates(demo, tmp_path, monkeypatch, capsys):
    def run(command: object, *words: object) -> str:
        monkeypatch.setattr("sys.argv", ["command", *map(str, words)])
        assert command.main() == 0  # type: ignore[attr-defined]
        return capsys.readouterr().out

    run(export_hf, "--run", demo.folder, "--out", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (EXPERTS, 2)
    texts = ["--prompt", "The", "--max-new-tokens", 8]
    of_run = run(generate, "--run", demo.folder, *texts)
    assert of_run == run(generate, "--hf", tmp_path / "hf", *texts)
    assert len(of_run) > 3
    run(evaluate, "--run", demo.folder, "--name", "own", "--max-tokens", 512)
    (result,) = (demo.folder / "evaluations" / "own").glob("*.json")
    assert "perplexity" in result.read_text()
