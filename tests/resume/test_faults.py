"""Tests ranks that hang, are slow or die, and nodes that are lost. The run must name the rank or node, restart from the
last checkpoint, and end with the numbers of an undisturbed run."""

import contextlib
import os
import re
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.reliability.hang_limit import LEAST_SECONDS
from helpers.launchers import launch, ranks_of
from helpers.runs import STEPS, Run, finished, kill, left_of, numbers_of

RANKS = 2

pytestmark = pytest.mark.slow


def assert_as_undisturbed(run: Run) -> None:
    assert run.series("step") == list(range(1, STEPS + 1))
    told = ("checkpoint_failed", "restart_after_hang")
    assert numbers_of(run.records(), without=told) == numbers_of(finished(ranks=RANKS).records())


@pytest.mark.nightly
def test_a_slow_and_a_frozen_rank_are_named_and_the_run_goes_on(tmp_path: Path) -> None:
    torchrun = ("--standalone", f"--nproc_per_node={RANKS}", "--max-restarts=1")
    alerting = ("parallel.timeout_minutes=0.75", "data.read_timeout_seconds=4", "logging.wandb=offline")
    # Three slow steps in a row are reported. The machine may delay the other rank in some of the six steps. The save of
    # step 5 is complete at step 8.
    faults = {"slow": [2, 7, 1], "frozen": [8, 1], "saves_end": True}
    run = launch(tmp_path, *alerting, torchrun=torchrun, faults=faults)
    run.wait_until(lambda: len(run.steps()) >= 1)
    victim = ranks_of(run)[1]
    run.wait_until(lambda: "stacks of all ranks" in run.output)
    ratios = run.series("slowest_rank_ratio")
    assert re.search(r"step [3-7]: rank 1 works [\d.]+ times as long as the median rank", run.output), ratios
    assert re.search(rf"rank 1 on \S+ \(process {victim.pid}\): \w+ after step \d+, .*<--", run.output)

    run.wait()  # torchrun has restarted the ranks
    (faults,) = (run.folder / "faults").iterdir()
    assert "frozen or gone" in (faults / "report.txt").read_text().lower()
    assert "run_phase" in (faults / "rank_00000.txt").read_text()
    assert "resuming from" in run.output
    assert left_of(run) == []
    assert_as_undisturbed(run)

    (told,) = (record for record in run.records() if record.get("event") == "restart_after_hang")
    (resumed_at,) = (int(step) for step in re.findall(r"resuming from .* at step (\d+)", run.output))
    assert told["step"] == resumed_at
    place = rf"rank 1 on {re.escape(os.uname().nodename)} \(process {victim.pid}\): \w+ after step \d+"
    assert re.search(rf"no progress for 4[0-5] s\. .*; {place}", told["reason"])
    hung, restarted = sorted((run.folder / "wandb").glob("offline-run-*/*.wandb"))  # of one W&B run
    assert hung.name == restarted.name
    account = read_account(run.folder)
    frozen, after = account.starts
    assert (frozen.ended, frozen.last_step, after.ended) == ("lost", 7, "complete")
    # This is the limit of a step minus the time until the main rank waits, which is long on a busy machine.
    assert frozen.detection_seconds > LEAST_SECONDS / 2
    for file, title in ((hung, "The run hangs"), (restarted, "Restarted after a hang")):
        sent = file.read_bytes()
        assert title.encode() in sent
        assert re.search(place.encode(), sent)
    assert b"Restarted" not in hung.read_bytes()


def test_a_dead_rank_and_a_lost_node_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    # This process hosts the store, so that its port is not taken. A real run's agents have it on the first node.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = (
        "--nnodes=2",
        "--nproc_per_node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-id=test",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=20",
    )
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    faults = {"held": [[7, 1], [12, 1]], "saves_end": True}  # the run waits until the test acts

    def node(mark: str = "") -> Run:
        return launch(tmp_path, torchrun=torchrun, mark=mark, environment=own_store, faults=faults)

    first = node()
    second = node(first.mark)
    first.wait_until(lambda: stands_before(7, first))
    (of_second,) = ranks_of(second).values()
    of_second.kill()  # the agents live, and restart both ranks

    first.wait_until(lambda: resumed(first, second) == 1 and stands_before(12, first))
    assert first.latest == "step_00000010"
    agent = psutil.Process(second.process.pid)
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with an earlier process
            process.kill()
    second.process.wait(100)
    third = node(first.mark)  # a node replaces it
    try:
        first.wait()
        third.wait()
    finally:
        kill(first)
    assert resumed(first, second, third) == 2
    (killed,) = re.findall(r"did not end by itself: .* as if killed: (.*)", first.output + third.output)
    assert killed == f"rank 1 on {os.uname().nodename}"  # the other rank has reported that it lost its peer
    assert f"resuming from {first.checkpoints / 'step_00000010'}" in first.output + third.output
    assert_as_undisturbed(first)


def stands_before(step: int, run: Run) -> bool:
    """Return whether all earlier steps are logged, and the rank waits before this step."""
    return (run.folder.parent / "marks" / f"held_{step}").exists() and len(run.steps()) >= step - 1


def resumed(*agents: Run) -> int:
    return sum(agent.output.count("resuming from") for agent in agents)
