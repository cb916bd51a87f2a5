"""A run that is killed and started again by the same command goes on as if nothing had happened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers.runs import SMALL, STEPS, Run, finished, kill, processes_of, start

COMMAND = (*SMALL, "data.num_workers=1", "logging.wandb=offline")
RANKS = 2
TIMING = ("tokens_per_second", "step_seconds", "data_wait", "slowest_rank", "slowest_rank_ratio")
TIMING += ("tflops_per_second", "tflops_per_second_dense_equivalent")

pytestmark = pytest.mark.slow


@dataclass
class Kill:
    """What a kill found and left behind."""

    run: Run
    processes: list[int]
    latest: str
    last_logged: int
    unfinished: list[str]
    """Files in the folder of the checkpoint being written."""
    complete: list[str]


def kill_and_look(run: Run, at_once: list[psutil.Process] | None = None) -> Kill:
    processes = kill(run, at_once or [])
    return Kill(
        run,
        processes,
        run.latest,
        run.series("step")[-1],
        sorted(f"{path.parent.name}/{path.name}" for path in run.checkpoints.glob(".tmp_step_*/*")),
        sorted(path.name for path in run.checkpoints.glob("step_*")),
    )


def restart(run_dir: Path, until_step: int) -> Run:
    """Start by the same command, and come back when the step is logged."""
    run = start(run_dir, *COMMAND, ranks=RANKS)
    run.wait_until(lambda: until_step in steps_printed(run))
    return run


def steps_printed(run: Run) -> list[int]:
    """The steps that this start of the run took."""
    return [int(step) for step in re.findall(r"^step +(\d+)/.* gnorm ", run.output, re.MULTILINE)]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> list[Kill]:
    """A run that ends at its fifth start. Checkpoints are written at steps 5, 10 (where the warm-up ends), 15."""
    run_dir = tmp_path_factory.mktemp("killed")
    in_warm_up = kill_and_look(restart(run_dir, until_step=7))

    writing = restart(run_dir, until_step=9)
    processes = processes_of(writing)
    writing.wait_until(lambda: [*writing.checkpoints.glob(".tmp_step_*/*.distcp")])
    during_write = kill_and_look(writing, at_once=processes)

    after_boundary = kill_and_look(restart(run_dir, until_step=12))
    in_sparse_phase = kill_and_look(restart(run_dir, until_step=17))
    start(run_dir, *COMMAND, ranks=RANKS).wait()
    return [in_warm_up, during_write, after_boundary, in_sparse_phase]


@pytest.fixture(scope="module")
def survivor(kills: list[Kill]) -> Run:
    """The last start."""
    logs = sorted(kills[0].run.folder.parent.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return Run(kills[0].run.folder, kills[0].run.process, logs[-1], "")


def test_every_kill_hit_all_processes_at_the_intended_moment(kills):
    assert [found.latest for found in kills] == ["step_00000005"] * 2 + ["step_00000010", "step_00000015"]
    for found in kills:
        assert len(found.processes) >= 1 + 2 * RANKS  # launcher, ranks, readers
        assert not any(psutil.pid_exists(pid) and is_running(pid) for pid in found.processes)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_came_after_the_checkpoint_was_run_again(kills, survivor):
    for found, following in zip(kills, [*(found.run for found in kills[1:]), survivor], strict=True):
        saved = int(found.latest.removeprefix("step_"))
        assert found.last_logged > saved
        assert steps_printed(following)[0] == saved + 1
        assert found.last_logged in range(saved + 1, max(steps_printed(following)) + 1)


def test_a_kill_during_a_write_leaves_the_checkpoint_before(kills):
    during_write = kills[1]
    assert any(name.startswith(".tmp_step_00000010/") for name in during_write.unfinished)
    assert not any(name.endswith("/config.yaml") for name in during_write.unfinished)  # the last file
    assert during_write.complete == ["step_00000005"]


def test_the_logged_numbers_are_those_of_an_undisturbed_run_to_the_last_bit(survivor):
    def numbers(run: Run) -> list[dict[str, object]]:
        return [
            {key: value for key, value in record.items() if key not in TIMING} for record in run.records()
        ]

    undisturbed = finished(ranks=RANKS)
    assert survivor.series("step") == list(range(1, STEPS + 1))
    for key in ("loss", "indexer_kl", "grad_norm", "lr"):
        assert survivor.series(key) == undisturbed.series(key)
    assert numbers(survivor) == numbers(undisturbed)


def test_nothing_unfinished_stays_in_the_folder(survivor):
    names = {path.name for path in survivor.checkpoints.iterdir()}
    assert names == {"latest", *(f"step_{step:08d}" for step in (5, 10, 15, 20))}
    assert survivor.latest == "step_00000020"


def test_all_starts_belong_to_one_wandb_run(survivor):
    runs = [path.name for path in (survivor.folder / "wandb").glob("offline-run-*")]
    assert len(runs) == 5
    assert len({name.split("-")[-1] for name in runs}) == 1
