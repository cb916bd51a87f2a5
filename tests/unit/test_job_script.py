"""Tests what the Slurm job does after srun ended, with replacements for Slurm's commands. tests/slurm uses Slurm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_submit import submit

STAND_INS = {
    "srun": 'echo started >> "$LOG"; eval "$SRUN"',
    "squeue": 'case "$*" in *%T*) echo "$STATE";; *%E*) printf "%s" "$WAITING";; *) echo N/A;; esac',
    "scontrol": 'echo "scontrol $*" >> "$LOG"; case "$*" in *hostnames*) printf "n1\\nn2\\n";; '
    '*job*) echo "   ReqNodeList=(null) ExcNodeList=$EXCLUDED";; *) echo "NodeAddr=10.0.0.1 ";; esac',
    "sleep": "exit 0",
    "sbatch": 'echo "sbatch $*" >> "$LOG"; echo "8;cluster"',
}


class Job:
    def __init__(self, folder: Path) -> None:
        words = ("--config", "configs/demo.yaml", "--nodes=1", "--gpus-per-node=0", f"run.dir={folder}")
        printed = submit(*words, "--dry-run").stdout
        self.run_dir = folder / "demo"
        (self.run_dir / "checkpoints").mkdir(parents=True)
        self.script = folder / "job.sh"
        folders = [line for line in printed.splitlines() if line.startswith("folder=")]
        self.frozen = Path(folders[0].removeprefix("folder="))
        (self.frozen / "source").mkdir(parents=True)
        self.script.write_text(printed)
        self.log = folder / "log"
        self.log.touch()
        (folder / "bin").mkdir()
        for name, body in STAND_INS.items():
            command = folder / "bin" / name
            command.write_text(f"#!/bin/bash\n{body}\n")
            command.chmod(0o755)
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"

    def start(self, srun: str, state: str = "RUNNING") -> subprocess.Popen[bytes]:
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "LOG": str(self.log)}
        variables |= {"PATH": self.path, "SRUN": srun, "STATE": state, "RUN": str(self.run_dir)}
        return subprocess.Popen(["bash", str(self.script)], env={**os.environ, **variables})

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.log.read_text()

    @property
    def complete(self) -> bool:
        return (self.frozen / "complete").exists()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


END = 'echo {} > "$GSA_SUBMISSION/exit_code"; '
SAVE = 'echo step_00000005 > "$RUN/checkpoints/latest"; '
STOP = 'touch "$RUN/stopped.json"; '
SPIKE = 'touch "$RUN/monitor_stop.json"; '


@pytest.mark.parametrize(
    ("srun", "state", "code", "requeued"),
    [
        ("exit 0", "RUNNING", 0, False),
        ("exit 1", "RUNNING", 1, False),  # it would fail again
        (SAVE + "exit 1", "RUNNING", 1, True),
        (STOP + "exit 1", "RUNNING", 1, True),
        (SAVE + STOP + "exit 1", "COMPLETING", 1, False),  # cancelled
        (SAVE + SPIKE + "exit 1", "RUNNING", 13, False),  # it would spike again
        (SAVE + END.format(2) + "exit 1", "RUNNING", 2, False),  # rejected: a person must act
        (SAVE + END.format(3) + "exit 1", "RUNNING", 3, False),  # the disk is full
        (SAVE + END.format(14) + "exit 1", "RUNNING", 1, True),  # a fault that may pass
        (STOP + END.format(75) + "exit 1", "RUNNING", 1, True),
        (SAVE + STOP + 'rm -r "$GSA_SUBMISSION"; exit 1', "RUNNING", 1, False),  # with the run folder
    ],
)
def test_a_job_comes_back_where_that_helps(job, srun, state, code, requeued):
    assert job.start(srun, state).wait(60) == code
    assert job.requeued is requeued
    assert job.complete is (code == 0)


@pytest.mark.parametrize("code", [13, 75])
def test_the_stop_that_a_submission_goes_on_from_is_not_its_own(job: Job, code: int) -> None:
    """After a stop by the monitor, monitor_stop.json remains until a later start opens the run folder. If the start
    ends before it opens the folder, the old file does not prevent a requeue. Exit code 13 (monitor stop) does
    prevent it."""
    (job.run_dir / "monitor_stop.json").touch()
    assert job.start(SAVE + END.format(code) + "exit 1").wait(60) == (13 if code == 13 else 1)
    assert job.requeued is (code != 13)
    assert (job.frozen / "stopped_by_monitor").exists() is (code == 13)


BAD = 'printf "n3\nn1\n" > "$GSA_SUBMISSION/bad_nodes"; '


@pytest.mark.parametrize(("excluded", "exclude"), [("(null)", "n1,n3"), ("n[7-9]", "n[7-9],n1,n3")])
@pytest.mark.parametrize("progress", ["", SAVE])
def test_a_bad_device_sends_another_job_without_its_node(job, progress, excluded, exclude, monkeypatch):
    """A job that finds a bad device submits a new job, even if it wrote no checkpoint. Later jobs in the chain wait for
    the new job. The new job's --exclude overrides the script's option, so the new option must repeat the nodes
    that the old job excluded."""
    monkeypatch.setenv("WAITING", "9 afterany:7(unfulfilled)\n10 afterany:77(unfulfilled)\n8 (null)\n")
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setenv("EXCLUDED", excluded)
    assert job.start(progress + BAD + END.format(15) + "exit 1").wait(60) == 15
    said = job.log.read_text()
    assert f"sbatch --parsable --exclude={exclude} {job.frozen}/job.sh" in said
    updates = [line for line in said.splitlines() if "update" in line]
    assert updates == [f"scontrol update JobId=9 Dependency=afterany:8 ExcNodeList={exclude}"]
    assert not job.requeued


@pytest.mark.parametrize("named", ["", 'printf "n3\nn11\n" > "$GSA_SUBMISSION/bad_nodes"; '])
def test_where_no_node_of_its_own_is_named_a_job_does_not_come_back(job: Job, named: str) -> None:
    """The job would come back forever, because earlier named nodes are already excluded."""
    assert job.start(SAVE + named + END.format(15) + "exit 1").wait(60) == 15
    assert not job.requeued
    assert "sbatch" not in job.log.read_text()


def test_all_jobs_of_a_chain_are_one_launch(job: Job) -> None:
    """Separate launches would each restart from --resume-from, and move aside the previous job's training."""
    for _ in range(2):
        job.start('echo "launch $GSA_SUBMISSION" >> "$LOG"; exit 1').wait(60)
    assert job.log.read_text().count(f"launch {job.frozen}\n") == 2


@pytest.mark.parametrize(("srun", "code"), [("exit 0", 0), (SPIKE + "exit 1", 13)], ids=["complete", "spike"])
def test_after_the_end_of_a_run_the_next_job_of_the_chain_starts_nothing(job, srun, code):
    """After a spike, this also holds if the user continues by another command."""
    assert job.start(srun).wait(60) == code
    (job.run_dir / "monitor_stop.json").unlink(missing_ok=True)
    assert job.start("exit 1").wait(60) == code
    assert job.log.read_text().count("started") == 1


def test_a_job_without_time_to_train_does_not_come_back_for_ever(job: Job) -> None:
    """The job ends after two time limits in a row without a new checkpoint; progress resets the count."""
    for progress, requeued in (("", 1), (SAVE, 2), ("", 3), ("", 3)):
        assert job.start(progress + STOP + "exit 1").wait(60) == 1
        assert job.log.read_text().count("scontrol requeue 7") == requeued


@pytest.mark.parametrize(("code", "complete"), [(1, False), (0, True)])
def test_sigusr1_reaches_the_ranks_and_their_code_counts(job: Job, code: int, complete: bool) -> None:
    listen = f'trap \'echo told >> "$LOG"; exit {code}\' USR1; echo listening >> "$LOG"'
    process = job.start(f"{listen}; while :; do /bin/sleep 0.1; done")
    deadline = time.monotonic() + 60
    while "listening" not in job.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == code
    assert "told" in job.log.read_text()
    assert job.complete is complete
    assert job.requeued is not complete
