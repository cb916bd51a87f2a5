"""Tests that a killed run which the same command restarts continues as if nothing had happened."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers.forked import ForkedAgent
from helpers.launchers import is_running, ranks_of
from helpers.runs import STEPS, Run, finished, kill, left_of, numbers_of, processes_of, start

COMMAND = ("data.num_workers=1", "logging.wandb=offline")
RANKS = 2

pytestmark = pytest.mark.slow


@dataclass
class Kill:
    run: Run
    processes: list[int]
    latest: str
    last_logged: int
    unfinished: list[str]
    """Files in the folder of the unfinished checkpoint."""
    complete: list[str]
    survivors: list[psutil.Process]
    """Processes that outlived the kill."""


def kill_and_look(run: Run, at_once: list[psutil.Process] | None = None) -> Kill:
    """Send SIGKILL to all processes of the run, or only to the given ones."""
    survivors: list[psutil.Process] = []
    if at_once:
        for process in at_once:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with an earlier process
                process.kill()
        run.process.wait(100)  # torchrun ends the remaining ranks
        survivors = left_of(run)
    processes = [process.pid for process in at_once or []] + kill(run)
    return Kill(
        run,
        processes,
        run.latest,
        run.series("step")[-1],
        sorted(f"{path.parent.name}/{path.name}" for path in run.checkpoints.glob(".tmp_step_*/*")),
        sorted(path.name for path in run.checkpoints.glob("step_*")),
        survivors,
    )


def start_until(
    run_dir: Path, step: int, saved: int | None = None, agent: bool = False, **faults: object
) -> Run:
    """Start the run with COMMAND. Return when step `step` is logged and the checkpoint of step `saved` is complete.
    Rank 1 blocks before the next step, so the run goes no further."""
    held = {"held": [[step + 1, 1]], **faults}
    run = start(run_dir, *COMMAND, ranks=RANKS, agent=agent, faults=held)
    run.wait_until(lambda: step in run.steps_printed())
    if saved is not None:
        run.wait_until(lambda: run.latest == f"step_{saved:08d}")
    return run


def killed_in_a_write(run: Run, only_rank: int | None = None) -> Kill:
    """Kill when rank 1 has written its files of the next checkpoint, but has not reported them."""
    run.wait_until(lambda: [*run.checkpoints.glob(".tmp_step_*/__1_*.distcp")])
    processes = processes_of(run)
    if only_rank is not None:
        session = ranks_of(run)[only_rank].pid
        processes = [each for each in processes if os.getsid(each.pid) == session]
        assert len(processes) >= 2  # including its reader
    return kill_and_look(run, at_once=processes)


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> list[Kill]:
    """Launch a run six times. The first five launches are killed, and the sixth completes the run. The run saves every
    5 steps, and the warm-up ends at step 10. The second and fourth launches use torchrun. In the fourth launch only one
    rank is killed, and torchrun ends the other rank."""
    run_dir = tmp_path_factory.mktemp("killed")
    in_warm_up = kill_and_look(start_until(run_dir, 7, saved=5))
    during_write = killed_in_a_write(start_until(run_dir, 11, agent=True, held_write=[10, 1]))
    after_boundary = kill_and_look(start_until(run_dir, 12, saved=10))
    one_rank = killed_in_a_write(start_until(run_dir, 16, agent=True, held_write=[15, 1]), only_rank=1)
    in_sparse_phase = kill_and_look(start_until(run_dir, 17, saved=15))
    start(run_dir, *COMMAND, ranks=RANKS).wait()
    return [in_warm_up, during_write, after_boundary, one_rank, in_sparse_phase]


@pytest.fixture(scope="module")
def survivor(kills: list[Kill]) -> Run:
    logs = sorted(kills[0].run.folder.parent.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return Run(kills[0].run.folder, None, logs[-1], "")


def test_every_kill_hit_all_processes_at_the_intended_moment(kills):
    assert [found.latest for found in kills] == [f"step_{step:08d}" for step in (5, 5, 10, 10, 15)]
    for found in kills:
        agents = int(isinstance(found.run.process, ForkedAgent))
        everything = agents + 2 * RANKS  # ranks, readers
        assert len(found.processes) >= (2 if found is kills[3] else everything)
        assert not any(is_running(pid) for pid in found.processes)
    assert kills[1].survivors == kills[3].survivors == []  # torchrun ended the other ranks


def test_what_came_after_the_checkpoint_was_run_again(kills, survivor):
    for found, following in zip(kills, [*(found.run for found in kills[1:]), survivor], strict=True):
        saved = int(found.latest.removeprefix("step_"))
        assert found.last_logged > saved
        assert following.steps_printed()[0] == saved + 1
        assert found.last_logged in range(saved + 1, max(following.steps_printed()) + 1)


def test_a_kill_during_a_write_leaves_the_checkpoint_before(kills):
    for during_write, unfinished in ((kills[1], 10), (kills[3], 15)):
        names = [name for name in during_write.unfinished if name.startswith(f".tmp_step_{unfinished:08d}/")]
        assert names
        assert not any(name.endswith("/manifest.json") for name in names)  # the last file of a checkpoint
        assert during_write.complete == [f"step_{step:08d}" for step in range(5, unfinished, 5)]


def test_the_logged_numbers_match_an_undisturbed_run_to_the_last_bit(survivor):
    assert survivor.series("step") == list(range(1, STEPS + 1))
    cut_off = ("checkpoint_failed",)  # by the killed rank
    assert numbers_of(survivor.records(), without=cut_off) == numbers_of(finished(ranks=RANKS).records())


def test_nothing_unfinished_stays_in_the_folder_and_all_starts_belong_to_one_wandb_run(survivor):
    names = {path.name for path in survivor.checkpoints.iterdir()}
    assert names == {"latest", *(f"step_{step:08d}" for step in (5, 10, 15, 20))}
    assert survivor.latest == "step_00000020"
    runs = [path.name for path in (survivor.folder / "wandb").glob("offline-run-*")]
    assert len(runs) == 6
    assert len({name.split("-")[-1] for name in runs}) == 1
