"""Creates a small study and the folders of its runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gsa_study.study_file import Study, StudyRun, load_study
from gsa_train.config import config_to_yaml

ROOT = Path(__file__).parents[2]
BASE = {
    "phases": [
        {"name": "dense", "steps": 6, "attention": "dense", "train": "base"},
        {"name": "sparse", "steps": 4},
    ],
    "train": {"seq_len_tokens": 64, "global_batch_size": 4},
    "gsa": {"k_min": 8, "k_base": 16, "k_max": 32},
}
TOKENS_A_STEP = 256
STUDY: dict[str, Any] = {
    "name": "small",
    "config": "base.yaml",
    "seeds": [1, 2],
    "arms": [{"name": "one"}, {"name": "two", "set": {"phases.0.lr": "1e-4"}}],
    "metrics": [{"key": "loss", "equal_time": True}],
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "dir": str(folder / "runs"), **changes}))
    return path


def load(folder: Path, **changes: Any) -> Study:
    return load_study(write(folder, **changes))


def log_run(run: StudyRun, records: Sequence[dict[str, Any]], summary: dict[str, Any] | None = None) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(config_to_yaml(run.config))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    start = {"unix_seconds": 1.0, "commit": "0123456789abcdef", "device": "NVIDIA H200", "step": 0}
    (run.folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    if summary is not None:
        (run.folder / "summary.json").write_text(json.dumps({"steps": run.steps, **summary}))


def record(step: int, loss: float | str, seconds: float = 1.0, **others: Any) -> dict[str, Any]:
    phase = "dense" if step <= 6 else "sparse"
    tokens = step * TOKENS_A_STEP
    return {"step": step, "phase": phase, "loss": loss, "tokens": tokens, "step_seconds": seconds, **others}
