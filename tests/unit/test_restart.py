"""A restart by torchrun or Slurm is told from a new launch of the same command."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa_train.resume import LAUNCH, _is_restart, launch_id
from helpers.single_rank import single_rank


@pytest.mark.parametrize(
    ("opened_by", "environment", "expected"),
    [
        ("7", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ("7", {"SLURM_JOB_ID": "7"}, False),  # the first start, or another step of the job
        (
            "6",
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            False,
        ),  # requeued before it opened the folder
        (None, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ("ab", {"TORCHELASTIC_RUN_ID": "ab", "TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ("ab", {"TORCHELASTIC_RUN_ID": "ab", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ("", {}, False),
    ],
)
def test_only_what_the_same_launch_began_is_restarted(
    opened_by: str | None,
    environment: dict[str, str],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = single_rank()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if opened_by is not None:
        (tmp_path / LAUNCH).write_text(f"{opened_by}\n")
    assert _is_restart(tmp_path, parallel) is expected
    assert launch_id() == environment.get("SLURM_JOB_ID", environment.get("TORCHELASTIC_RUN_ID", ""))
