"""Tests calls of a study: what a call starts, when it stops, and what it needs."""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gsa_study import jobs as study_jobs
from gsa_study import processes
from gsa_study import runner as study_runner
from gsa_study.commands import study as command
from gsa_study.jobs import jobs_of
from gsa_study.plan import StudyError, chosen
from gsa_study.states import read_state
from gsa_study.study_file import Study, StudyRun
from gsa_train.process import exit_codes
from helpers.studies import load, log_run, record


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = load(tmp_path, evaluations=[{"name": "end"}], metrics=[{"key": "loss"}])
    study.folder.mkdir(parents=True)
    return study


def finish(run: StudyRun, evaluated: bool = True) -> None:
    log_run(run, [record(10, 1.5)], {})
    (run.folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    (run.folder / "checkpoints" / "latest").write_text("step_00000010")
    if evaluated:
        (run.folder / "evaluations" / "end").mkdir(parents=True)
        (run.folder / "evaluations" / "end" / "results.json").write_text("{}")


class Call:
    """Runs `launch/study.py` with shell scripts as jobs, which only write results."""

    def __init__(self, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
        self.study, self.monkeypatch = study, monkeypatch
        self.training = self.FINISH
        monkeypatch.setattr(study_jobs, "train_command", self._train)
        monkeypatch.setattr(study_jobs, "_program", lambda name: ("/bin/sh", "-c", self._evaluation(), name))

    FINISH = (
        'mkdir -p "{folder}/checkpoints"; echo step_00000010 > "{folder}/checkpoints/latest"; '
        'echo \'{{"steps": 10}}\' > "{folder}/summary.json"'
    )

    def _train(self, run: StudyRun) -> tuple[str, ...]:
        script = f'echo {run.name} >> "{self.study.folder}/started"; {self.training}'
        return ("/bin/sh", "-c", script.format(folder=run.folder))

    def _evaluation(self) -> str:
        return 'mkdir -p "$2/evaluations/end"; echo "{}" > "$2/evaluations/end/results.json"'

    def __call__(self, *words: str) -> int:
        argv = ["study.py", "--study", str(self.study.path), "--gpus", "none", *words]
        self.monkeypatch.setattr("sys.argv", argv)
        return command.main()

    @property
    def started(self) -> list[str]:
        path = self.study.folder / "started"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def call(study: Study, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(study, monkeypatch)


def test_a_call_stops_at_its_end(call, study, monkeypatch, capsys):
    start = processes.start_process

    def start_and_let_time_pass(*arguments: Any) -> Any:
        late = {**vars(time), "time": lambda: time.time() + 3600}
        monkeypatch.setattr(study_runner, "time", SimpleNamespace(**late))
        return start(*arguments)

    call.training = 'trap "exit 75" TERM; while :; do sleep 0.05; done'
    with monkeypatch.context() as patch:
        patch.setattr(processes, "start_process", start_and_let_time_pass)
        assert call("--stop-after-minutes", "30") == exit_codes.STOPPED
    monkeypatch.setattr(study_runner, "time", time)
    assert call.started == ["one-seed1"]
    assert "stopped by the time limit" in capsys.readouterr().out
    call.training = Call.FINISH
    assert call() == 0
    assert call.started == ["one-seed1", *(run.name for run in study.runs)]


def test_a_call_does_the_arms_and_seeds_that_are_named(call: Call, study: Study) -> None:
    assert call("--arms", "two", "--seeds", "2") == 0
    assert call.started == ["two-seed2"]
    assert call("--seeds", "2") == 0
    assert call.started == ["two-seed2", "one-seed2"]
    states = [read_state(job) for job in jobs_of(study)]
    with pytest.raises(StudyError, match=r"--arms tow: the study has no such arm; did you mean two\?"):
        chosen(states, ["tow"], None)
    with pytest.raises(StudyError, match=r"--seeds 3: the study has 1, 2"):
        chosen(states, None, [3])


def test_a_changed_arm_is_noticed_beside_those_that_are_named(call, study, capsys):
    finish(study.runs[0])
    config = study.runs[0].folder / "config.yaml"
    config.write_text(config.read_text().replace("grad_clip: 1.0", "grad_clip: 2.0"))
    for words in (("--arms", "two"), ("--report", "--arms", "two")):
        assert call(*words) == exit_codes.REFUSED, "the report has all arms"
        assert "one-seed1: train.grad_clip: 2.0 -> 1.0" in capsys.readouterr().err
    assert call.started == []


def test_a_package_that_is_needed_at_the_end_is_asked_for_at_the_start(call, monkeypatch, capsys):
    monkeypatch.setattr(command, "is_installed", lambda name: name != "transformers")
    assert call() == exit_codes.REFUSED
    assert call.started == []
    said = capsys.readouterr().err
    assert "the package transformers is not installed" in said
    assert "pip install" in said
    assert call("--report") == 0, "only what it needs itself"
    assert call("--dry-run") == 0


def test_an_evaluation_needs_its_runs_checkpoint(call, study, capsys):
    run = study.runs[0]
    _, evaluation, *_ = jobs_of(study)
    assert (evaluation.run, evaluation.kind) == (run, "evaluate")
    assert not read_state(evaluation).lacks_checkpoint, "its training is due"
    finish(run, evaluated=False)
    assert not read_state(evaluation).lacks_checkpoint
    shutil.rmtree(run.folder / "checkpoints")
    assert read_state(evaluation).lacks_checkpoint
    assert call("--arms", run.arm, "--seeds", str(run.seed)) == exit_codes.FAILED
    assert call.started == []
    assert f"cannot be done: {run.name} evaluate end" in capsys.readouterr().out
