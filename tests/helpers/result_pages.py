"""Creates a folder of two small studies and finished runs of them, for tests of the result pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gsa_study.study_file import load_study
from helpers.studies import log_run


def study_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two studies, one with a question, in a folder where `launch/results.py` now starts."""
    (tmp_path / "studies").mkdir()
    base = {"phases": [{"name": "sparse", "steps": 10}]}
    (tmp_path / "studies" / "base.yaml").write_text(yaml.safe_dump(base))
    study: dict[str, Any] = {
        "name": "small", "title": "Two models", "question": "Which is better?", "dir": str(tmp_path / "runs"),
        "config": "base.yaml", "arms": [{"name": "one"}, {"name": "two"}], "seeds": [1, 2],
        "metrics": [
            {"key": "loss", "at_tokens": [50, 90], "paper": {"two": "2.5 | less"}},
            {"key": "val_loss", "source": "summary"},
        ],
    }  # fmt: skip
    (tmp_path / "studies" / "small.yaml").write_text(yaml.safe_dump(study))
    silent = {name: value for name, value in study.items() if name != "question"}
    (tmp_path / "studies" / "silent.yaml").write_text(yaml.safe_dump(silent))
    monkeypatch.setattr("sys.argv", ["results.py", "--studies", "studies", "--out", "out"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish(
    folder: Path, arm: str, seed: int, loss: float, study: str = "small", pace: float = 1.0, text: str = ""
) -> None:
    """Write a finished run; `pace` sets the seconds of each step, `text` the fingerprint of the training text."""
    runs = load_study(folder / "studies" / f"{study}.yaml", need_data=False).runs
    run = next(each for each in runs if (each.arm, each.seed) == (arm, seed))
    records = [
        {"step": step, "phase": "sparse", "tokens": 10 * step, "loss": loss - step, "step_seconds": pace}
        for step in (5, 9, 10)
    ]
    log_run(run, records, {"val_loss": loss, **({"data_fingerprint": text} if text else {})})


def lines_of(path: Path, start: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(start)]
