"""Tests what a shortened demo run prints, learns and leaves in its folder."""

import json
import math
import time

import pytest

from gsa_train.config import load_config
from helpers.runs import Run, start, whole_run

CONFIG = "configs/demo.yaml"
STEPS, TOKENS = 40, 40 * 4 * 128
SHORT = """
    train.seq_len_tokens=128 train.micro_batch_size=2 train.global_batch_size=4 phases.0.steps=10
    phases.0.warmup_steps=2 phases.1.steps=10 phases.2.steps=20 phases.2.warmup_steps=5 evaluate.every_steps=20
    evaluate.max_blocks=16 checkpoint.every_steps=10 checkpoint.keep_last=2 logging.every_steps=5
    logging.wandb=disabled
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demo on two ranks of torchrun. At any time `latest` names a complete checkpoint."""
    run = start(tmp_path_factory.mktemp("demo"), *SHORT.split(), ranks=2, agent=True, config=CONFIG)
    while run.process.poll() is None:
        if latest := run.latest:
            assert (run.checkpoints / latest / "metadata.json").exists() or run.latest != latest
        time.sleep(0.02)
    return run.wait()


def test_no_library_warns(demo):
    """Warnings of libraries about normal settings would hide ours. The other run's ranks import the libraries."""
    for output in (demo.output, whole_run("context").output):
        for said in ("Apex", "not a leaf Tensor", "is deprecated", "state dict differs", "full_param_layout"):
            assert said not in output


def test_the_loss_falls(demo):
    loss = demo.series("loss")
    assert all(math.isfinite(value) for value in loss)
    assert loss[-1] < loss[0] - 0.5


def test_metrics_hold_the_first_the_last_and_every_fifth_step_of_each_phase(demo):
    assert demo.series("step") == [1, 5, 10, 11, 15, 20, 21, 25, 30, 35, 40]
    assert demo.series("phase") == ["dense"] * 3 + ["warm-up"] * 3 + ["sparse"] * 5
    wanted = {"step", "phase", "loss", "indexer_kl", "recall", "grad_norm", "lr", "tokens"}
    wanted |= {"tokens_per_second", "mfu", "data_wait"}
    for record in demo.steps():
        assert wanted <= record.keys()
        assert record["tokens"] == record["step"] * 4 * 128
        if record["phase"] == "dense":
            assert record["recall"] is None
        else:
            assert 0 < record["random_recall"] <= 1
            assert 0 < record["recall"] <= 1
        assert 1 < record["causal_keys"] <= (128 + 1) / 2
        assert record["tokens_per_second"] > 0
        assert record["mfu"] is None  # no peak rate is known for a CPU
        assert 0 <= record["data_wait"] <= 1


def test_validation_is_logged_at_its_steps_and_once_at_the_end(demo):
    validations = [record for record in demo.records() if record.get("event") == "validation"]
    assert [record["step"] for record in validations] == [20, 40]
    assert validations[1]["validation_loss"] < validations[0]["validation_loss"]


def test_the_summary_has_every_key(demo):
    summary = json.loads((demo.folder / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (STEPS, TOKENS)
    assert summary["val_perplexity"] == pytest.approx(math.exp(summary["val_loss"]))
    assert 1 < summary["bigram_perplexity"] < summary["unigram_perplexity"] < 4096
    assert summary["val_perplexity"] < 4096
    assert 0 < summary["random_recall"] < 1
    assert summary["data_epochs"] == 0
    assert set(summary["data_tokens_by_source"]) == {"PythonStdlib", "RustBooks"}
    assert sum(summary["data_tokens_by_source"].values()) >= TOKENS
    assert 0 < summary["recall"] < 1


def test_the_resolved_config_repeats_the_run(demo):
    config = load_config(demo.folder / "config.yaml")
    assert config == load_config(CONFIG, [*SHORT.split(), f"run.dir={demo.folder.parent}", "run.name=run"])
    for checkpoint in demo.checkpoints.glob("step_*"):
        assert load_config(checkpoint / "config.yaml") == config
