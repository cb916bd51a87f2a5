"""Tests the runner of a study with small shell scripts as jobs: starts, stops, restarts and memory."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gsa_study import jobs as study_jobs
from gsa_study import processes
from gsa_study import runner as study_runner
from gsa_study.commands import study as command
from gsa_study.failure_causes import reason_in
from gsa_study.jobs import Job
from gsa_study.plan import StudyError
from gsa_study.processes import check_devices, child_environment, find_gpus
from gsa_study.runner import StudyRunner, lock_study
from gsa_study.states import read_failures
from gsa_study.study_file import Study, StudyRun
from gsa_train.process import exit_codes
from helpers.studies import load

FINISH = 'mkdir -p "{folder}" && echo \'{{"steps": 10}}\' > "{folder}/summary.json"'
EVALUATE = 'mkdir -p "{folder}/evaluations/end" && echo "{{}}" > "{folder}/evaluations/end/results.json"'
UNTIL_STOPPED = 'trap "exit 75" TERM; while :; do sleep 0.05; done'


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = load(tmp_path, seeds=[1], arms=[{"name": name} for name in ("one", "two", "three")])
    study.folder.mkdir(parents=True)
    return study


def scripted(run: StudyRun, script: str, kind: Any = "train") -> Job:
    words = ("/bin/sh", "-c", script.format(folder=run.folder))
    return Job(run, kind, "end" if kind == "evaluate" else "", words, 1)


# Output after an uncaught error of a run: mixed lines of both ranks, torch's warning, and torchrun's own error.
ERROR = "ValueError: document_starts is given with indexer_pool 4; pass None"
CRASHED = f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "launch/pretrain.py", line 9, in <module>
[rank1]: Traceback (most recent call last):
[rank0]:     main()
[rank1]:     ~~~~^^
[rank0]: {ERROR}
[rank0]: with a second line
[rank1]: {ERROR}
[rank0]:[W1126 08:45:50.123456789 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called
"""
LAUNCHER = """\
W1126 08:45:51.100000 123 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 7 closing signal SIGTERM
E1126 08:45:51.200000 123 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "torch/distributed/run.py", line 896, in main
    run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============
launch/pretrain.py FAILED
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============
"""
CHAINED = (
    "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n\nDuring handling of the above ...\n\n"
)
PYTHONS = "/x/resource_tracker.py:254: UserWarning: There appear to be 3 leaked objects\n  warnings.warn(\n"


@pytest.mark.parametrize(
    ("printed", "crashed", "reason"),
    [
        (CRASHED, True, ERROR),
        (CRASHED + LAUNCHER, True, ERROR),
        (CHAINED + CRASHED.replace("[rank0]: ", ""), True, ERROR),
        (CHAINED, True, "KeyError: 1"),
        (CHAINED + "Traceback (most recent call last):\n  cut off", True, "KeyError: 1"),
        (CHAINED + "a full disk\n", False, "a full disk"),
        ("out of  memory\n----\n" + CRASHED.splitlines()[-1] + "\n" + PYTHONS, True, "out of memory"),
        (PYTHONS, True, ""),
    ],
)
def test_the_reason_is_the_error_and_no_later_warning(printed: str, crashed: bool, reason: str) -> None:
    assert reason_in(printed, crashed) == reason


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo all is well; echo out of memory >&2; exit 1", "exit code 1: out of memory"),
        ("exit 1", "exit code 1"),
        ("cat <<'END'\n" + CRASHED + "END\nexit 1", f"exit code 1: {ERROR}"),
        (  # the main rank's exit code, which torchrun hides
            'echo 3 > "$GSA_SUBMISSION/exit_code"; echo disk is full; exit 1',
            "checkpoints cannot be written, exit code 3: disk is full",
        ),
    ],
)
def test_a_failed_arm_is_remembered_by_what_this_start_printed_and_the_others_go_on(study, script, reason):
    one, two, _ = study.runs
    StudyRunner(study.folder, [scripted(one, "echo an earlier start; exit 1")], None).run()
    due = [scripted(one, script), scripted(one, EVALUATE, "evaluate")]
    due += [scripted(two, FINISH), scripted(two, EVALUATE, "evaluate")]
    StudyRunner(study.folder, due, None).run()
    assert read_failures(study.folder) == {"one-seed1 train": reason}
    assert [job.result.exists() for job in due] == [False, False, True, True]


def test_jobs_run_side_by_side_each_on_its_own_gpu(study: Study) -> None:
    meet = (  # each waits for the other, so that one after another they would never end
        'mkdir -p "{folder}"; echo "$CUDA_VISIBLE_DEVICES" > "{folder}/gpu"; '
        'while ! [ -e "{folder}/../OTHER-seed1/gpu" ]; do sleep 0.02; done; ' + FINISH
    )
    one, two, three = study.runs
    due = [scripted(one, meet.replace("OTHER", "two")), scripted(two, meet.replace("OTHER", "one"))]
    last = scripted(three, 'mkdir -p "{folder}"; echo "$CUDA_VISIBLE_DEVICES" > "{folder}/gpu"; ' + FINISH)
    StudyRunner(study.folder, [*due, last], ["4", "6"]).run()
    first, second, third = ((run.folder / "gpu").read_text().strip() for run in study.runs)
    assert {first, second} == {"4", "6"}
    assert third in ("4", "6")


def test_a_job_that_fails_after_a_new_checkpoint_starts_again(study: Study) -> None:
    twice = (
        'if [ -e "{folder}/checkpoints/latest" ]; then ' + FINISH + '; else mkdir -p "{folder}/checkpoints"; '
        'echo step_2 > "{folder}/checkpoints/latest"; exit 1; fi'
    )
    job = scripted(study.runs[0], twice)
    StudyRunner(study.folder, [job], None).run()
    assert job.result.exists()
    assert read_failures(study.folder) == {}


def test_ctrl_c_stops_what_is_under_way_and_starts_nothing_more(study: Study) -> None:
    one, two, _ = study.runs
    due = [scripted(one, UNTIL_STOPPED.replace("while", "kill -INT $PPID; while")), scripted(two, FINISH)]
    runner = StudyRunner(study.folder, due, None)
    runner.run()
    assert (runner.stop_reason, runner.killed) == ("Ctrl-C", False)
    assert runner.interrupted == [(due[0], "stopped")]
    assert read_failures(study.folder) == {}
    assert not due[1].result.exists()


@pytest.mark.parametrize("beside_the_jobs", ["plan_study", "report"])
def test_ctrl_c_before_and_after_the_jobs_ends_in_a_line(study, beside_the_jobs, monkeypatch, capsys):
    def press(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    monkeypatch.setattr(command, beside_the_jobs, press)
    file = str(study.folder.parents[1] / "study.yaml")
    monkeypatch.setattr("sys.argv", ["study.py", "--study", file, "--report"])
    try:
        assert command.main() == exit_codes.STOPPED
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "stopped by Ctrl-C" in capsys.readouterr().out


def test_a_second_ctrl_c_ends_them_at_once(study: Study) -> None:
    # If pytest is killed, the script ends, because another process may have its parent's number by then.
    has_parent = 'read -r _ _ _ parent _ < /proc/$$/stat && [ "$parent" = "$PPID" ]'
    script = f'trap "" TERM; while {has_parent}; do kill -INT $PPID; sleep 0.1; done'
    stubborn = scripted(study.runs[0], script)
    runner = StudyRunner(study.folder, [stubborn], None)
    runner.run()
    assert runner.killed
    assert runner.interrupted == [(stubborn, "stopped")]


def test_a_job_waits_for_the_process_that_still_writes_its_folder(study, monkeypatch):
    job = scripted(study.runs[0], FINISH)
    job.run.folder.mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    words = [sys.executable, "-c", hold, str(job.run.folder / "lock")]
    said: list[str] = []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()

        def say(text: str) -> None:
            said.append(text)
            if "waits for the process" in text:
                holder.kill()
                holder.wait()

        monkeypatch.setattr(study_runner, "say", say)
        StudyRunner(study.folder, [job], None).run()
    assert job.result.exists()
    assert ["waits for the process" in line for line in said] == [True, False, False]


def test_a_job_is_told_to_stop_when_the_study_is_killed(tmp_path: Path) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    script = f'trap "touch {told}; exit 75" TERM; touch {ready}; while :; do sleep 0.05; done'
    code = (
        "import os, sys, time; from pathlib import Path; from gsa_study.processes import start_process\n"
        "start_process(['/bin/sh', '-c', sys.argv[1]], os.environ, Path(sys.argv[2])); time.sleep(3600)"
    )
    words = [sys.executable, "-c", code, script, str(tmp_path / "log")]
    with subprocess.Popen(words) as parent:
        wait_for(ready)
        parent.kill()
    wait_for(told)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_study_is_run_by_one_process_at_a_time(study: Study) -> None:
    lock = (
        "import sys; from gsa_study.runner import *; from pathlib import Path; lock_study(Path(sys.argv[1]))"
    )
    with lock_study(study.folder):
        words = [sys.executable, "-c", lock, str(study.folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "another process runs the study" in done.stderr
    lock_study(study.folder).close()


def test_the_gpus_are_those_that_a_child_would_see(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count_gpus", lambda: 0)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == [], "none is there, so without --gpus CPUs train"
    monkeypatch.setattr(processes, "count_gpus", lambda: 8)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "3,5", "HOME": "/h"}, ["5"], Path("/notes"))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["HOME"]) == ("5", "/h")
    wide = dataclasses.replace(scripted(study.runs[0], FINISH), devices=4)
    check_devices([wide], None)
    with pytest.raises(StudyError, match="one-seed1 needs 4 GPUs"):
        check_devices([wide], ["0", "1"])
    with pytest.raises(StudyError, match="one-seed1 needs 4 different GPUs"):
        check_devices([wide], ["0", "1", "0", "1"])
    check_devices([dataclasses.replace(wide, devices=1)], ["0", "0"])
    for there, names in ((2, "0,2"), (0, "0"), (0, "GPU-0a"), (None, "-1"), (2, "x"), (2, "one")):
        monkeypatch.setattr(processes, "count_gpus", lambda there=there: there)
        with pytest.raises(StudyError, match=f"--gpus {names}: .* is not a GPU of this machine"):
            check_devices([], names.split(","))
    for there, names in ((2, "1,0"), (None, "7"), (2, "GPU-0a,MIG-0b")):
        monkeypatch.setattr(processes, "count_gpus", lambda there=there: there)
        check_devices([], names.split(","))
    check_devices([], None)
    assert command.gpus_at_hand("none") is None
    assert command.gpus_at_hand("1,0") == ["1", "0"]
    assert command.gpus_at_hand("1,1") == ["1", "1"]
    with pytest.raises(StudyError, match="--gpus 1,: name the GPUs"):
        command.gpus_at_hand("1,")


def test_without_nvidia_smi_the_files_of_a_driver_tell_if_there_is_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(processes, "DEVICE_FILES", tmp_path)
    assert processes.count_gpus() == 0
    (tmp_path / "nvidia0").touch()
    assert processes.count_gpus() is None


def test_the_command_tells_failures_again_and_tries_them_again_when_asked(study, monkeypatch, capsys):
    def train(run: StudyRun) -> tuple[str, ...]:
        script = f'echo {run.arm} >> "{study.folder}/started"; '
        return scripted(run, script + ("echo no luck; exit 1" if run.arm == "two" else FINISH)).command

    monkeypatch.setattr(study_jobs, "train_command", train)
    words = ["study.py", "--study", str(study.path), "--gpus", "none"]
    started = study.folder / "started"
    for more, expected in (
        ([], "one two three"),
        ([], "one two three"),
        (["--retry-failed"], "one two three two"),
    ):
        monkeypatch.setattr("sys.argv", [*words, *more])
        assert command.main() == exit_codes.FAILED
        said = capsys.readouterr().out
        assert "2 of 3 jobs are finished, 1 failed" in said
        assert "failed: two-seed1 train: exit code 1: no luck" in said
        assert started.read_text().split() == expected.split()
    monkeypatch.setattr("sys.argv", [*words, "--retry-failed"])
    monkeypatch.setattr(study_jobs, "train_command", lambda run: scripted(run, FINISH).command)
    assert command.main() == 0
    monkeypatch.setattr("sys.argv", words)
    assert command.main() == 0
    assert "3 of 3 jobs are finished, 0 due" in capsys.readouterr().out
