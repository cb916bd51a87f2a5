"""Define the run data that tables and figures need. The data come from the run's local folder, or from its record in
docs/results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gsa_study.run_metrics import LossPoint, RunMetrics
from gsa_study.study_file import StudyRun


@dataclass(frozen=True)
class RunRecord:
    run: StudyRun
    finished: bool
    state: str
    """State in words; empty if it is only known that the run is not finished."""
    folder: Path
    """Present or former run folder."""
    tokens: int | None = None
    """Trained tokens; None: nothing is logged."""
    seconds: float | None = None
    """Training time."""
    devices: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    """Commits of the run's starts, each once. `+` marks uncommitted changes. Empty: the run never began."""
    text: str = ""
    """Fingerprint of the training text; empty: not known."""
    losses: Sequence[LossPoint] = ()


def record_of_run(values: RunMetrics, failures: Mapping[str, str]) -> RunRecord:
    """Read a run with or without a local folder.

    Args:
        failures: job -> why it failed.
    """
    starts, text = values.starts, values.summary.get("data_fingerprint")
    return RunRecord(
        run=values.run,
        finished=values.complete,
        state=_state(values, failures),
        folder=values.run.folder,
        tokens=int(values.tokens[-1][1]) if values.tokens else None,
        seconds=values.seconds[-1][1] if values.seconds else None,
        devices=tuple(dict.fromkeys(str(start.get("device") or "unknown") for start in starts)),
        commits=tuple(dict.fromkeys(str(start.get("commit") or "unknown") for start in starts)),
        text=text if isinstance(text, str) else "",
        losses=values.losses(),
    )


def _state(values: RunMetrics, failures: Mapping[str, str]) -> str:
    if values.complete:
        return "finished"
    if (reason := failures.get(f"{values.run.name} train")) is not None:
        return f"failed: {reason}"
    if not values.records:
        return "not begun"
    return f"after step {values.records[-1]['step']} of {values.run.steps}"
