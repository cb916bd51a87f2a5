"""Tests that a restart by torchrun or Slurm is distinguished from a new start of the same command."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gsa_train.run_folder import job_start
from gsa_train.run_folder.job_start import SUBMISSION, is_restart, job_id, note_job_start
from helpers.single_rank import single_rank

SECOND_BY_SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
NAMED = {"TORCHELASTIC_RUN_ID": "ab", "TORCHELASTIC_RESTART_COUNT": "2"}
NAMELESS = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (SUBMISSION, *SECOND_BY_SLURM, *NAMED):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("opened_by", "variables", "expected"),
    [
        ("7", SECOND_BY_SLURM, True),
        ("7", {"SLURM_JOB_ID": "7"}, False),  # the first start, or another step of the job
        ("6", SECOND_BY_SLURM, False),  # requeued before it opened the folder
        (None, SECOND_BY_SLURM, False),
        ("ab", NAMED, True),
        ("ab", NAMED | {"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ("8", {SUBMISSION: "8", "SLURM_JOB_ID": "7"}, True),  # the next job of a chain
        ("", {}, False),
    ],
)
def test_only_what_the_same_job_began_is_restarted(opened_by, variables, expected, tmp_path, environment):
    single_rank()
    if opened_by is not None:
        environment.setenv("TORCHELASTIC_RUN_ID", opened_by)
        note_job_start(tmp_path)
        environment.delenv("TORCHELASTIC_RUN_ID")
    for name, value in variables.items():
        environment.setenv(name, value)
    assert is_restart(tmp_path) is expected
    names = (SUBMISSION, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    assert job_id() == next((variables[name] for name in names if name in variables), "")


@pytest.mark.parametrize("started", [(90.0, 120.0), (120.0, 90.0), (110.0, 120.0)])
def test_jobs_of_one_name_are_told_by_their_launchers(started, tmp_path, environment):
    """Without --rdzv-id, all multi-node torchrun jobs have the same id, so start times must distinguish the jobs. In
    this test, a job opens the run folder at second 100. The next start is a restart of this job only if torchrun began
    before second 100 on at least one node."""
    single_rank()
    for name, value in NAMELESS.items():
        environment.setenv(name, value)
    environment.setattr(job_start, "time", SimpleNamespace(time=lambda: 100.0))
    note_job_start(tmp_path)
    environment.setattr(job_start, "job_start_time", lambda: started[0])

    def gather(found: list, own: tuple, group: None) -> None:
        found[:] = [own, (*own[:4], started[1])]

    environment.setattr(dist, "all_gather_object", gather)
    assert is_restart(tmp_path) is (min(started) < 100)
