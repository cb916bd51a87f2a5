"""Tests which checkpoint a start uses if some are damaged, missing, or named by hand."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gsa_train.arguments import Arguments
from gsa_train.checkpoint.files import find_checkpoint
from gsa_train.config import Config
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.metrics.record_format import read_records
from gsa_train.optimizer.mcore import build_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.run.folder import open_run_folder
from gsa_train.run_folder.job_start import SUBMISSION, note_job_start
from gsa_train.run_folder.resume import ResumeError, Start, choose_start
from helpers.checkpoints import write_checkpoint
from helpers.damage import cut
from helpers.saving import names_in
from helpers.single_rank import SPARSE, single_rank, tiny_config, tiny_model

STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write checkpoints at steps 2, 4 and 6, to copy."""
    folder = tmp_path_factory.mktemp("written")
    config = tiny_config([SPARSE])
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for step in STEPS:
        write_checkpoint(folder, step, model, optimizer, config)
    return folder


@pytest.fixture
def config(written: Path, tmp_path: Path) -> Config:
    shutil.copytree(written, tmp_path / "run" / "checkpoints")
    logging = {"wandb": "disabled", "tensorboard": False}
    return tiny_config([SPARSE], run={"dir": str(tmp_path), "name": "run"}, logging=logging)


def start_of(config: Config, **arguments: Any) -> Start:
    defaults = Arguments("", (), None, False, False, False, False, 1)
    return choose_start(
        config, dataclasses.replace(defaults, **arguments), phase_ranges(config.phases), single_rank()
    )


def go_on(config: Config, **arguments: Any) -> Start:
    start = start_of(config, **arguments)
    open_run_folder(config, start, single_rank(), GoodputLog(RunClock()))[0].close(0)
    return start


def checkpoints_of(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name / "checkpoints"


@pytest.mark.parametrize("moved", ["nothing", "checkpoints", "checkpoints/step_00000006"])
def test_checkpoints_that_a_link_leads_to_are_the_runs_own(moved, config, tmp_path):
    """Linked checkpoints must not be rejected, or move this run's outputs to previous/."""
    run, far = tmp_path / "run", tmp_path / "large_disk" / "deep" / "moved"
    if moved != "nothing":
        far.parent.mkdir(parents=True)
        (run / moved).rename(far)
        (run / moved).symlink_to(far)
    assert go_on(config).same_run
    assert (start_of(config).step, start_of(config).damaged) == (6, ())
    # If a link names an older checkpoint, newer ones are set aside. A restart before the next save would use them.
    (tmp_path / "link").symlink_to(run / "checkpoints" / "step_00000004")
    assert go_on(config, resume_from=str(tmp_path / "link")).same_run
    assert start_of(config).step == 4


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff\xfe\x00", b"step_0000", b"../../x/checkpoints/step_00000002", b"/tmp/step_00000002"],
)
def test_a_latest_that_names_nothing_beside_it_counts_as_absent(content, config, caplog):
    checkpoints = checkpoints_of(config)
    (checkpoints / "latest").unlink()
    if content is not None:
        (checkpoints / "latest").write_bytes(content)
    assert start_of(config).step == 6
    told = caplog.text.count("latest names no checkpoint in its folder: using the newest one there")
    assert told == (content is not None)
    assert find_checkpoint(checkpoints) == checkpoints / "step_00000006"
    assert go_on(config, resume_from=str(checkpoints / "step_00000004")).step == 4
    assert start_of(config).step == 4  # a restart continues there, not at step 6


def test_a_checkpoint_that_is_gone_is_passed_over_once(config: Config) -> None:
    shutil.rmtree(checkpoints_of(config) / "step_00000006")
    start = start_of(config)
    assert start.step == 4
    assert start.damaged == (("step_00000006", "it is missing or incomplete"),)
    assert go_on(config) == start
    assert (checkpoints_of(config) / "latest").read_text() == "step_00000004"
    assert start_of(config).damaged == ()


def test_where_all_are_damaged_nothing_starts_at_step_0_unasked(config: Config) -> None:
    for step in STEPS:
        cut(checkpoints_of(config) / f"step_{step:08d}" / "__0_0.distcp")
    before = names_in(checkpoints_of(config))
    said = r"(?s)no intact checkpoint .*\n  step_00000006: .*--no-resume"
    with pytest.raises(ResumeError, match=said) as error:
        start_of(config)
    assert str(error.value).count("__0_0.distcp has") == len(STEPS)
    assert names_in(checkpoints_of(config)) == before
    assert start_of(config, no_resume=True) == Start()


def test_a_rank_that_does_not_see_the_checkpoint_is_named(config, monkeypatch):
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path.name != "step_00000006" and is_dir(path))
    message = r"step_00000006 is damaged: rank 0 on \S+ does not see it"
    with pytest.raises(ResumeError, match=message):
        start_of(config, resume_from=str(checkpoints_of(config) / "step_00000006"))


@pytest.mark.parametrize("by", ["--resume-from", "latest"])
def test_an_older_checkpoint_that_was_asked_for_is_where_the_run_stands(by, config, caplog):
    """After a kill before the next save, the restart continues there, too, and no step's record is lost."""
    run_dir = checkpoints_of(config).parent
    lines = [json.dumps({"step": step, "phase": "sparse", "loss": 1.0}) for step in range(1, 7)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    older = checkpoints_of(config) / "step_00000004"

    (older.parent / "latest").write_text(older.name if by == "latest" else "step_00000006")
    go_on(config, **({} if by == "latest" else {"resume_from": str(older)}))

    assert ("latest names step_00000004, but step_00000006 is newer" in caplog.text) == (by == "latest")
    assert (start_of(config).checkpoint, start_of(config).step) == (older, 4)
    assert names_in(checkpoints_of(config)) == {"latest", "step_00000002", "step_00000004", "set_aside"}
    assert [each["step"] for each in read_records(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [each["step"] for each in read_records(run_dir / "metrics_rewound.jsonl")] == [5, 6]
    aside = checkpoints_of(config) / "set_aside" / "step_00000006"
    with pytest.raises(ResumeError, match=r"set_aside/step_00000006: lies in .*Copy it"):
        start_of(config, resume_from=str(aside))


@pytest.mark.parametrize("launcher", ["torchrun", "the next job of a chain"])
def test_a_restart_before_the_first_save_starts_where_the_launch_did(config, written, monkeypatch, launcher):
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ab")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    else:
        monkeypatch.setenv(SUBMISSION, "ab")
        monkeypatch.setenv("SLURM_JOB_ID", "8")
    other = str(written / "step_00000002")
    own = checkpoints_of(config)
    note_job_start(own.parent)
    assert start_of(config, resume_from=other).step == 6  # its own
    shutil.rmtree(own)
    assert start_of(config, resume_from=other).step == 2
