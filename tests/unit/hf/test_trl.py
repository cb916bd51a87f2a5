"""Tests that TRL's trainers and the examples of reinforcement learning and preferences run on an exported model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from helpers.hf import tiny_model
from helpers.hf_trl import save
from helpers.runs import run_script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tiny_model("window-rope-reuse", attention="sdpa", eos_token_id=1), tmp_path / "model")
    return tmp_path


@pytest.mark.nightly
def test_the_trainers_of_trl(folder: Path) -> None:
    """Everything learns, with LoRA too, except frozen indexers. A separate process runs it, as for Trainer."""
    run_script(["tests/helpers/hf_trl.py", str(folder / "model")], folder / "log", ranks=1, launcher="python")


def test_the_reward_of_the_example_rises(folder: Path) -> None:
    options = ("--sft-steps", "60", "--steps", "20", "--lr", "0.01")
    said = example("grpo.py", folder, *options)
    result = json.loads(said.splitlines()[-1])
    assert result["reward_last"] > result["reward_first"] + 0.1
    assert 0 < max(result["log_prob_changes"]["replayed"]) < 1e-4


def test_the_margin_of_the_example_rises(folder: Path) -> None:
    said = example("dpo.py", folder, "--steps", "30", "--lr", "0.003")
    margins = [float(each) for each in re.findall(r"mean margin (\S+)", said)]
    assert margins[-1] > max(margins[0], 0)


def example(name: str, folder: Path, *options: str) -> str:
    command = [f"examples/{name}", str(folder / "model"), "--out", str(folder / "out"), *options]
    said = run_script(command, folder / "log", ranks=1, launcher="python")
    assert (folder / "out/model.safetensors").is_file()
    return said
