"""Tests jobs under a real Slurm (`make test-slurm`): preemption, stop signals, lost and faulty nodes, and time limits.
A disturbed run must end with the metrics of an undisturbed run."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, wait_for

from gsa_train.metrics.record_format import read_records
from helpers.runs import CONFIG, ENVIRONMENT, REPOSITORY, SMALL, STEPS, numbers_of, train

SLOW_SECONDS = 600
"""Limit for one start of a run on a busy machine."""

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="no Slurm: make test-slurm installs it"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.environment |= ENVIRONMENT
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


class Job:
    def __init__(self, cluster: Cluster, run_dir: Path, *words: str) -> None:
        self.cluster, self.folder = cluster, run_dir / "run"
        command = [sys.executable, "launch/slurm/submit.py", "--config", CONFIG, "--allow-uncommitted"]
        command += ["--nodes=2", "--gpus-per-node=0", *words, f"run.dir={run_dir}", "run.name=run"]
        options: dict[str, Any] = {"cwd": REPOSITORY, "env": cluster.environment}
        submitted = subprocess.run(command, capture_output=True, text=True, **options)
        assert submitted.returncode == 0, submitted.stderr
        found = re.findall(r"^job (\d+): (.*)$", submitted.stdout, re.MULTILINE)
        self.jobs = [job for job, _ in found]
        self.logs = [Path(log) for _, log in found]

    @property
    def log(self) -> str:
        return self.logs[0].read_text() if self.logs[0].exists() else ""

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_records(path) if path.exists() else []

    def last_step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def state(self) -> str:
        return self.cluster.state(self.jobs[0])

    def wait_for(self, condition: Any) -> None:
        try:
            wait_for(condition, SLOW_SECONDS)
        except AssertionError:
            raise AssertionError(f"state {self.state()}\n{self.log[-5000:]}") from None

    def wait_for_start(self, number: int, steps: int) -> None:
        """Wait until the job's start `number` has trained more than `steps` steps."""
        self.wait_for(lambda: f"start {number}: starting on" in self.log)
        self.wait_for(lambda: self.last_step() > steps)


def test_a_run_survives_preemption_a_signal_and_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "--chain=2", "--time=30", "--margin-seconds=60", *SMALL)
    job.wait_for_start(0, steps=2)

    cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true")
    job.wait_for(lambda: "start 0: stopped as asked; back into the queue" in job.log)
    preempted_at = job.last_step()
    assert f"stopped by SIGTERM after step {preempted_at}" in job.log
    assert f"latest checkpoint: step_{preempted_at:08d}" in job.log

    job.wait_for_start(1, steps=preempted_at)
    cluster.command("scancel", "--batch", "--signal=USR1", job.jobs[0])  # as before a time limit
    job.wait_for(lambda: "start 1: stopped as asked; back into the queue" in job.log)
    stopped_at = job.last_step()
    assert f"stopped by SIGUSR1 after step {stopped_at}" in job.log
    assert "asked to stop: USR1" in job.log
    assert f"latest checkpoint: step_{stopped_at:08d}" in job.log

    job.wait_for_start(2, steps=stopped_at)
    lose_node(cluster, "n2")

    job.wait_for(lambda: all(cluster.state(each) == "COMPLETED" for each in job.jobs))
    assert "start 3: the run is complete" in job.log
    assert job.logs[1].read_text().endswith("the run is complete\n")
    assert not (job.folder / "stopped.json").exists()
    undisturbed = train(tmp_path / "undisturbed", *SMALL, ranks=2)
    assert [record["step"] for record in job.records() if "event" not in record] == list(range(1, STEPS + 1))
    assert numbers_of(job.records()) == numbers_of(undisturbed.records())


def lose_node(cluster: Cluster, node: str) -> None:
    """End all processes of the node at once, then bring it back."""
    daemon = cluster.daemons[node]
    for process in [*psutil.Process(daemon.pid).children(recursive=True), *steps_of(cluster, node)]:
        process.send_signal(signal.SIGKILL)
    daemon.kill()
    daemon.wait(20)
    cluster.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    cluster.start_node(node)
    cluster.command("scontrol", "update", f"NodeName={node}", "State=RESUME")


def steps_of(cluster: Cluster, node: str) -> list[psutil.Process]:
    """List the processes of a node by their environment, because slurmstepd detaches from slurmd."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        ours = {"SLURMD_NODENAME": node, "SLURM_CONF": cluster.environment["SLURM_CONF"]}
        if ours.items() <= environ.items():
            found += [process, *[each for each in process.parents() if each.name() == "slurmstepd"]]
    return found


SICK = """

if __import__("os").environ["SLURMD_NODENAME"] == "n1":
    multiply_well = multiply

    def multiply(problem: Problem) -> torch.Tensor:
        result = multiply_well(problem)
        result[0, 0] += 1
        return result
"""
"""Code after the check's own products, in the job's copy of the source."""


def test_a_node_with_a_bad_device_is_left_out_and_the_chain_waits_for_its_heir(cluster, tmp_path):
    cluster.command("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=test")
    job = Job(cluster, tmp_path, "--nodes=1", "--chain=2", "--time=30", *SMALL)
    with (job.logs[0].parent / "source/gsa_train/reliability/health/products.py").open("a") as file:
        file.write(SICK)
    cluster.command("scontrol", "update", "NodeName=n1", "State=RESUME")
    job.wait_for(lambda: "starting on n1" in job.log)
    cluster.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.wait_for(lambda: re.search(r"job \d+ goes on without n1$", job.log, re.MULTILINE))
    heir = re.findall(r"job (\d+) goes on without n1$", job.log, re.MULTILINE)[0]
    said = r"1 of 1 devices are not healthy:\n  CPU of local rank 0 on n1: \d+ wrong elements"
    assert re.search(said, job.log)
    assert job.log.count("devices are not healthy") == 1  # torchrun has restarts left
    for each in (heir, job.jobs[1]):
        assert "ExcNodeList=n1\n" in cluster.command("scontrol", "show", "job", each)
    job.wait_for(lambda: all(cluster.state(each) == "COMPLETED" for each in (heir, job.jobs[1])))
    of_heir = (job.logs[0].parent / f"job_{heir}.log").read_text()
    assert "starting on n2" in of_heir
    assert "the run is complete" in of_heir
    assert "starting on" not in job.logs[1].read_text()  # it waited, and found the run complete
    assert [each["step"] for each in job.records() if "event" not in each] == list(range(1, STEPS + 1))


def test_before_its_time_limit_a_job_stops_and_a_cancelled_one_does_not_come_back(cluster, tmp_path):
    long = ("phases.1.steps=100000", "checkpoint.every_steps=100000")
    job = Job(cluster, tmp_path, "--time=3", "--margin-seconds=100", *SMALL, *long)
    job.wait_for(lambda: "back into the queue" in job.log)
    assert "asked to stop: USR1" in job.log
    job.wait_for_start(1, steps=job.last_step())
    cluster.command("scancel", job.jobs[0])
    job.wait_for(lambda: job.state() == "CANCELLED")
    job.wait_for(lambda: not cluster.command("squeue", "-h").strip())
    assert job.state() == "CANCELLED"
    assert job.log.count("back into the queue") == 1


def test_the_job_keeps_config_commit_and_source(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "--sbatch=--hold", "--sbatch=--comment=kept", *SMALL, "train.grad_clip=0.5")
    folder = job.logs[0].parent
    assert "grad_clip: 0.5" in (folder / "config.yaml").read_text()
    assert re.match(r"[0-9a-f]{40}\n", (folder / "commit.txt").read_text())
    frozen, ours = (root / "gsa_train/train.py" for root in (folder / "source", REPOSITORY))
    assert frozen.read_text() == ours.read_text()
    assert "Comment=kept" in cluster.command("scontrol", "show", "job", job.jobs[0])
    cluster.command("scancel", job.jobs[0])
