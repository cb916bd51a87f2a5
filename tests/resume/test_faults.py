"""Ranks that hang, crawl or die, and nodes that vanish: the run names them, starts itself again from the last
checkpoint, and ends with the numbers of a run that nothing disturbed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.launchers import free_port, launch, ranks_of
from helpers.runs import LONGEST_WAIT_SECONDS, SMALL, STEPS, Run, finished, kill, numbers_of, processes_of

RANKS = 2

pytestmark = pytest.mark.slow


def assert_as_undisturbed(run: Run) -> None:
    assert run.series("step") == list(range(1, STEPS + 1))
    told = ("checkpoint_failed", "restart_after_hang")
    assert numbers_of(run.records(), without=told) == numbers_of(finished(ranks=RANKS).records())


def test_a_slow_and_a_frozen_rank_are_named_and_the_run_goes_on(tmp_path: Path) -> None:
    torchrun = ("--standalone", f"--nproc_per_node={RANKS}", "--max-restarts=1")
    alerting = ("parallel.timeout_minutes=0.75", "data.read_timeout_seconds=4", "logging.wandb=offline")
    run = launch(tmp_path, *SMALL, *alerting, torchrun=torchrun)
    run.wait_until(lambda: len(run.steps()) >= 1)
    victim = ranks_of(run)[1]
    slow_down(victim, until=lambda: "rank 1 works " in run.output or len(run.steps()) >= 15)
    assert re.search(r"step \d+: rank 1 works [\d.]+ times as long as the median rank", run.output)

    run.wait_until(lambda: len(run.steps()) >= 6)
    victim.send_signal(signal.SIGSTOP)
    run.wait_until(lambda: "stacks of all ranks" in run.output)
    assert re.search(rf"rank 1 on \S+ \(process {victim.pid}\): \w+ after step \d+, .*<--", run.output)

    run.wait()  # torchrun has started the ranks again
    (faults,) = (run.folder / "faults").iterdir()
    assert "frozen or gone" in (faults / "report.txt").read_text().lower()
    assert "run_phase" in (faults / "rank_00000.txt").read_text()
    assert "resuming from" in run.output
    assert processes_of(run) == []
    assert_as_undisturbed(run)

    (told,) = (record for record in run.records() if record.get("event") == "restart_after_hang")
    (resumed_at,) = (int(step) for step in re.findall(r"resuming from .* at step (\d+)", run.output))
    assert told["step"] == resumed_at
    place = rf"rank 1 on {re.escape(os.uname().nodename)} \(process {victim.pid}\): \w+ after step \d+"
    assert re.search(rf"no progress for 45 s\. .*; {place}", told["reason"])
    hung, restarted = sorted((run.folder / "wandb").glob("offline-run-*/*.wandb"))  # of one W&B run
    assert hung.name == restarted.name
    for file, title in ((hung, "The run hangs"), (restarted, "Restarted after a hang")):
        sent = file.read_bytes()
        assert title.encode() in sent
        assert re.search(place.encode(), sent)
    assert b"Restarted" not in hung.read_bytes()


def slow_down(process: psutil.Process, until: Callable[[], object]) -> None:
    """It runs for a ninth of the time."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while not until() and time.monotonic() < deadline:
        process.suspend()
        time.sleep(0.4)
        process.resume()
        time.sleep(0.05)


def test_a_dead_rank_and_a_lost_node_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    torchrun = (
        "--nnodes=2",
        "--nproc_per_node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
    )

    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def node(is_host: int, mark: str = "") -> Run:
        conf = f"--rdzv-conf=is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=3"
        return launch(
            tmp_path, *SMALL, torchrun=(*torchrun, endpoint, conf), mark=mark, environment=own_store
        )

    first = node(is_host=1)
    second = node(is_host=0, mark=first.mark)
    first.wait_until(lambda: len(first.steps()) >= 6)
    of_second = next(each for each in ranks_of(first).values() if each.ppid() == second.process.pid)
    of_second.kill()  # the agents live, and start both ranks again

    logged = len(first.steps())
    first.wait_until(lambda: resumed(first, second) == 1 and len(first.steps()) >= max(11, logged))
    latest = first.latest
    agent = psutil.Process(second.process.pid)
    for process in [agent, *agent.children(recursive=True)]:
        process.kill()
    second.process.wait(100)
    third = node(is_host=0, mark=first.mark)  # a node comes in its place
    try:
        first.wait()
        third.wait()
    finally:
        kill(first)
    assert resumed(first, second, third) == 2
    assert f"resuming from {first.checkpoints / latest}" in first.output + third.output
    assert_as_undisturbed(first)


def resumed(*agents: Run) -> int:
    return sum(agent.output.count("resuming from") for agent in agents)
