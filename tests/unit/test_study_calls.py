"""Tests a study in many short calls on machines without storage: what a call starts, and what continues elsewhere."""

import shutil
import tarfile
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
from gsa_study.states import note_failure, read_state
from gsa_study.study_file import Study, StudyRun
from gsa_study.times import (
    BESIDE_MANY,
    CUT,
    OTHER_ARM,
    SAME_ARM,
    Expected,
    WallTimes,
    expected_time,
    note_time,
    read_times,
)
from gsa_train.process import exit_codes
from helpers.studies import load, log_run, record, unpack

LIMIT = 1000
"""Seconds; no job of these tests takes this long."""


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


# ---- times


def test_the_newest_time_counts_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    for seconds in (5.0, 7.0):
        note_time(tmp_path, "one-seed1 train", seconds, ended=True)
    note_time(tmp_path, "two-seed1 train", 9.0, ended=False)
    with (tmp_path / "times.jsonl").open("a") as file:
        file.write('{"job": "three')
    assert read_times(tmp_path) == WallTimes({"one-seed1 train": 7.0}, {"two-seed1 train": 9.0})
    assert read_times(tmp_path / "nowhere") == WallTimes()


def test_what_is_expected_of_a_job(study: Study) -> None:
    jobs = jobs_of(study)
    by_key = {job.key: job for job in jobs}

    def expected(key: str, **times: dict[str, float]) -> Expected | None:
        return expected_time(by_key[key], jobs, WallTimes(**times))

    def about(seconds: float, is_guess: bool = False) -> Expected:
        return Expected(pytest.approx(seconds), is_guess)

    assert expected("one-seed1 train") is None
    ended = {"one-seed1 train": 100.0, "one-seed1 evaluate end": 10.0}
    assert expected("one-seed2 evaluate end", ended=ended) == about(SAME_ARM * 10)
    assert expected("one-seed2 train", ended=ended) == about(SAME_ARM * 110), "with what follows it"
    assert expected("two-seed1 train", ended=ended) == about(OTHER_ARM * 110, is_guess=True)
    cut = {"two-seed1 train": 400.0}
    assert expected("two-seed1 train", ended=ended, cut=cut) == about(CUT * 400 + OTHER_ARM * 10)
    run = by_key["one-seed2 train"].run
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "checkpoints" / "latest").write_text("step_00000006")
    assert expected("one-seed2 train", ended=ended) == about(SAME_ARM * (100 * 0.4 + 10))


def test_of_an_arm_beside_many_less_is_expected(tmp_path: Path) -> None:
    arms = [{"name": name} for name in ("one", "two", "three", "four")]
    jobs = jobs_of(load(tmp_path, seeds=[1], arms=arms))
    last = jobs[-1]
    ended = {"one-seed1 train": 100.0}
    assert expected_time(last, jobs, WallTimes(ended)) == Expected(OTHER_ARM * 100, is_guess=True)
    ended["two-seed1 train"] = 90.0
    assert expected_time(last, jobs, WallTimes(ended)) == Expected(BESIDE_MANY * 100, is_guess=True)


# ---- calls


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


def test_a_call_starts_only_what_ends_in_time(call, study, capsys):
    for run in study.runs:
        note_time(study.folder, f"{run.name} train", 2 * LIMIT if run.arm == "one" else 1.0, ended=True)
        note_time(study.folder, f"{run.name} evaluate end", 1.0, ended=True)
    assert call("--within-seconds", str(LIMIT)) == exit_codes.STOPPED
    assert call.started == ["two-seed1", "two-seed2"]
    said = capsys.readouterr().out
    assert "4 of 8 jobs are finished, 0 failed" in said
    assert f"no time left: one-seed1, which takes about {SAME_ARM * (2 * LIMIT + 1):.0f} s; give more" in said
    assert "goes on with the 4 that are left" in said
    assert call("--within-seconds", str(4 * LIMIT)) == 0
    assert call.started[2:] == ["one-seed1", "one-seed2"]


def test_a_guess_keeps_no_training_from_being_the_first(call: Call, study: Study) -> None:
    run = study.runs[0]
    finish(run)
    note_time(study.folder, f"{run.name} train", 0.95 * LIMIT, ended=True)
    assert call("--within-seconds", str(LIMIT)) == exit_codes.STOPPED
    assert call.started == ["two-seed1", "two-seed2"], "the second is measured by the first"


def test_without_times_a_call_begins_and_stops_at_its_end(call, study, monkeypatch, capsys):
    start = processes.start_process

    def start_and_let_time_pass(*arguments: Any) -> Any:
        late = {**vars(time), "time": lambda: time.time() + 2 * LIMIT}
        monkeypatch.setattr(study_runner, "time", SimpleNamespace(**late))
        return start(*arguments)

    call.training = 'trap "exit 75" TERM; while :; do sleep 0.05; done'
    with monkeypatch.context() as patch:
        patch.setattr(processes, "start_process", start_and_let_time_pass)
        assert call("--within-seconds", str(LIMIT), "--seeds", "1") == exit_codes.STOPPED
    monkeypatch.setattr(study_runner, "time", time)
    assert call.started == ["one-seed1"]
    times = read_times(study.folder)
    assert times.ended == {}
    assert list(times.cut) == ["one-seed1 train"]
    assert "stopped by the time limit" in capsys.readouterr().out
    note_time(study.folder, "one-seed1 train", LIMIT, ended=False)
    call.training = Call.FINISH
    assert call("--within-seconds", str(LIMIT), "--arms", "one", "--seeds", "1") == exit_codes.STOPPED
    assert call.started == ["one-seed1"], "it would not end in time again"
    assert call("--within-seconds", str(2 * LIMIT)) == 0
    assert {key.split("-")[0] for key in read_times(study.folder).ended} == {"one", "two"}


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


# ---- another machine


def test_a_study_goes_on_elsewhere_without_checkpoints(call, study, tmp_path, capsys):
    done, unevaluated, under_way, broken = study.runs
    finish(done)
    finish(unevaluated, evaluated=False)
    (under_way.folder / "checkpoints").mkdir(parents=True)
    (under_way.folder / "metrics.jsonl").write_text("")
    broken.folder.mkdir()
    (broken.folder / "metrics.jsonl").write_text("")
    note_failure(study.folder, f"{broken.name} train", "exit code 1")
    note_time(study.folder, f"{done.name} train", 1.0, ended=True)
    packed = tmp_path / "out" / "study.tar.gz"
    assert call("--report", "--pack", str(packed)) == 0
    assert "study.tar.gz: 2 runs, 0.0 MiB" in capsys.readouterr().out
    lines = (study.folder / "report" / "values.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [["one", "1"], ["two", "1"]]

    shutil.rmtree(study.folder)
    with tarfile.open(packed) as file:
        left_out = ("checkpoints", under_way.name, unevaluated.name)
        assert not any(word in name for name in file.getnames() for word in left_out)
    unpack(packed, study.folder.parent)
    assert call("--report") == 0
    assert (study.folder / "report" / "values.csv").read_text().splitlines() == lines[:2]
    assert call() == exit_codes.FAILED
    assert call.started == [unevaluated.name, under_way.name]
    said = capsys.readouterr().out
    assert f"failed: {broken.name} train: exit code 1" in said
    assert read_times(study.folder).ended[f"{done.name} train"] == 1.0


def test_places_that_cannot_be_written_are_refused_before_the_work(call, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        call("--pack", str(tmp_path))
    assert f"--pack {tmp_path}: a folder; give a file" in capsys.readouterr().err


def test_the_pack_is_written_where_the_report_fails(call, study, tmp_path, monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(command, "write_study_report", fail)
    packed = tmp_path / "study.tar.gz"
    for words in ((), ("--report",)):
        assert call(*words, "--pack", str(packed)) == exit_codes.REFUSED
        assert "stopped: no space left. " in capsys.readouterr().err
        with tarfile.open(packed) as file:
            assert f"small/{study.runs[-1].name}/summary.json" in file.getnames()
        packed.unlink()


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


def test_an_evaluation_is_done_while_there_is_time_at_all(call: Call, study: Study) -> None:
    run = study.runs[0]
    finish(run, evaluated=False)
    for each in study.runs:
        note_time(study.folder, f"{each.name} train", 2 * LIMIT, ended=True)
    note_time(study.folder, f"{run.name} evaluate end", 2 * LIMIT, ended=True)
    assert call("--within-seconds", str(LIMIT)) == exit_codes.STOPPED, "no training fits"
    assert call.started == []
    assert (run.folder / "evaluations" / "end" / "results.json").exists()
