"""Tests the moving average and the merge of checkpoints in whole runs: kills, layouts, evaluation and export."""

import json
from pathlib import Path

import pytest
import torch

from gsa_train.checkpoint.tensors import CheckpointTensors
from helpers.runs import ALL_KEYS, Run, kill, run_script, start, train

pytestmark = pytest.mark.slow

OPTIONS = (*ALL_KEYS, "train.weight_average_decay=0.7", "checkpoint.every_steps=2")


def launch(folder: Path, *command: object, expected: int = 0) -> str:
    words = [*map(str, command)]
    return run_script(words, folder / "log", 1, expected=expected, launcher="python")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    source = CheckpointTensors(folder)
    return {name: source.read(name) for name in source.kinds}


def average(run: Run, out: Path, *options: object) -> dict[str, torch.Tensor]:
    launch(out.parent, "launch/average_weights.py", "--run", run.folder, "--out", out, *options)
    return weights(out)


def test_a_killed_run_has_the_same_average_and_so_have_other_layouts(tmp_path: Path) -> None:
    whole = train(tmp_path, *OPTIONS, name="whole")
    killed = start(tmp_path, *OPTIONS, name="killed")
    killed.wait_until(lambda: killed.latest == "step_00000008")
    kill(killed)
    resumed = train(tmp_path, *OPTIONS, name="killed")
    expected = average(whole, tmp_path / "average", "--steps", 10, "--moving")
    last = weights(whole.checkpoints / "step_00000010")
    assert any(not torch.equal(expected[name], tensor) for name, tensor in last.items())
    found = average(resumed, tmp_path / "resumed", "--steps", 10, "--moving")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name, layout in {
        "data": ("parallel.distributed_optimizer=true",),
        "tensor": ("parallel.tensor=2",),
        "zero": ("parallel.strategy=deepspeed", "parallel.zero_stage=3"),
    }.items():
        two = train(tmp_path, *OPTIONS, *layout, name=name, ranks=2)
        found = average(two, tmp_path / f"average of {name}", "--steps", 10, "--moving")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            # AdamW amplifies rounding where gradients are near 0, so compare with the distance to the weights.
            difference = (found[key] - tensor).norm() / (tensor - last[key]).norm().clamp(min=1e-9)
            assert difference < 3e-3, (name, key)


def test_a_merge_is_the_mean_and_evaluates_exports_and_starts_a_run(tmp_path: Path) -> None:
    run = train(tmp_path, *OPTIONS, "train.precision=bf16", "evaluate.every_steps=10")
    out, steps = tmp_path / "merge", (6, 8, 10)
    merged = average(run, out, "--steps", *steps)
    sources = [CheckpointTensors(run.checkpoints / f"step_{step:08d}") for step in steps]
    for name, tensor in merged.items():
        main = f"optimizer.state.fp32_param.{name}"
        keys = [main if main in source.all_kinds else name for source in sources]
        parts = [source.read(key).double() for source, key in zip(sources, keys, strict=True)]
        assert torch.equal(tensor, (sum(parts) / 3).float().to(tensor.dtype)), name
    launch(tmp_path, "launch/export_hf.py", "--checkpoint", out, "--out", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    few = ("--out", tmp_path, "--name", "x", "--max-tokens", 99)
    launch(tmp_path, "launch/evaluate.py", "--checkpoint", out, *few)
    model = json.loads((tmp_path / "x" / "results.json").read_text())["model"]
    assert (model["checkpoint"], model["step"], model["dtype"]) == (str(out), 10, "bfloat16")
    next_run = train(tmp_path, *OPTIONS, f"checkpoint.initial_weights={out}", name="from the merge")
    assert next_run.series("step")[-1] == 10

    refused = (
        tmp_path, "launch/average_weights.py", "--run", run.folder, "--out", tmp_path / "no", "--steps",
    )  # fmt: skip
    assert "--steps 6: give two or more steps, or --moving" in launch(*refused, 6, expected=2)
    assert "steps that have one: 2, 4, 6, 8, 10" in launch(*refused, 5, 6, expected=2)
