"""Tests damage to any file of a run folder and its checkpoints. A start must notice the damage, and repair the file or
refuse to run. `pytest -s tests/unit/test_damage_walk.py` prints each file, the damage, and the result of the start."""

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gsa_train.arguments import Arguments
from gsa_train.checkpoint.files import MANIFEST, step_of
from gsa_train.config import Config
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.optimizer.mcore import build_optimizer
from gsa_train.phases import phase_ranges
from gsa_train.reliability.monitor.monitor import MonitorState, MonitorStop
from gsa_train.run.folder import open_run_folder
from gsa_train.run_folder import starts
from gsa_train.run_folder.lock import RunFolderError, RunLock
from gsa_train.run_folder.resume import ResumeError, Start, choose_start
from gsa_train.run_folder.spike_stop import SpikeAhead, note_stop
from helpers.checkpoints import write_checkpoint
from helpers.damage import Table, damages_of, files_below
from helpers.single_rank import SPARSE, single_rank, tiny_config, tiny_model

STEPS = (2, 4)
UNREAD = ("tensorboard/", "wandb/", "profile/", "previous/", "slurm/", "faults/")
UNREAD += ("console.log",)
"""Files that no start reads, or only quotes."""
OUTPUTS = ("metrics.jsonl", "metrics_rewound.jsonl", "starts.jsonl", "goodput.jsonl")
OUTPUTS += ("alive.json", "summary.json", "stopped.json", "lock")
"""Files that a start reads only in part. A start does not notice a changed digit in a record, which changes no step.
From starts.jsonl, a start takes the run's id, which has a checksum."""


def config_of(runs: Path) -> Config:
    logging = {"wandb": "disabled", "tensorboard": False, "every_steps": 1}
    return tiny_config([SPARSE], run={"dir": str(runs), "name": "run"}, logging=logging)


def write_run(runs: Path) -> Path:
    config, folder = config_of(runs), runs / "run"
    log, run_id, _ = open_run_folder(config, Start(), single_rank(), GoodputLog(RunClock()))
    log.close(0)
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for step in STEPS:
        monitor = dataclasses.asdict(MonitorState())
        fields = {"run_id": run_id, "monitor": monitor}
        write_checkpoint(folder / "checkpoints", step, model, optimizer, config, **fields)
    lines = [json.dumps({"step": step, "phase": "sparse", "loss": 4.5 + step / 7}) for step in range(1, 5)]
    for name in ("metrics.jsonl", "metrics_rewound.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps({"steps": 4, "tokens": 256}))
    (folder / "stopped.json").write_text(json.dumps({"step": 4, "reason": "SIGTERM", "unix_seconds": 1.5}))
    (folder / "lock").write_text("process 7 on host\n")
    for name in UNREAD:
        path = folder / name / "file" if name.endswith("/") else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{runs.name} of {name}".encode() * 9)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_run(tmp_path_factory.mktemp("own")), write_run(tmp_path_factory.mktemp("other"))


def start_in(folder: Path) -> Start:
    """Start with everything that is read before the model is made."""
    config = config_of(folder.parent)
    lock = RunLock(folder)
    lock.take()
    try:
        arguments = Arguments("", (), None, False, False, False, False, 1)
        start = choose_start(config, arguments, phase_ranges(config.phases), single_rank())
        goodput = contextlib.closing(GoodputLog(RunClock()))
        with contextlib.redirect_stdout(io.StringIO()), goodput as opened:
            log, _, _ = open_run_folder(config, start, single_rank(), opened)
            log.close(0)
    finally:
        lock.close()
    return start


def outcome_of(folder: Path, intact: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return `refused: ...`, `repaired: ...` or `as before`."""
    caplog.clear()
    try:
        start = start_in(folder)
    except (ResumeError, SpikeAhead, RunFolderError) as error:
        return f"refused: {error}"
    same = intact / "checkpoints" / start.checkpoint.name
    for name in files_below(same):
        assert (start.checkpoint / name).read_bytes() == (same / name).read_bytes(), "damaged, and taken"
    config = (intact / "config.yaml").read_text().replace(str(intact.parent), str(folder.parent))
    assert (folder / "config.yaml").read_text() == config
    # Threads of W&B from an earlier test may log meanwhile.
    ours = [record for record in caplog.records if record.name.startswith("gsa_")]
    warnings = [record.getMessage() for record in ours if record.levelname in ("WARNING", "ERROR")]
    assert all("\n" not in each for each in warnings)
    if warnings:
        return f"repaired, from step {start.step}: {warnings[0]}"
    assert start.step == STEPS[-1]
    return "as before"


@pytest.fixture(autouse=True)
def a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the commit of the source, because asking git two hundred times is slow."""
    monkeypatch.setattr(starts, "source_commit", lambda source: "0" * 40)


@pytest.mark.nightly
def test_every_file_of_a_run_folder(runs, tmp_path, caplog):
    own, other = runs
    table, silent = Table(), []
    folder = tmp_path / "run"
    shutil.copytree(own, folder)
    assert outcome_of(folder, own, caplog) == "as before"
    for name in files_below(own):
        in_checkpoint = step_of(Path(name).parent.name)
        if in_checkpoint == STEPS[0]:
            continue  # the older one, as a fallback
        others = {"other run": other / name}
        if in_checkpoint is not None:
            others["other step"] = own / name.replace("step_00000004", "step_00000002")
            others["other rank"] = own / name.replace("__0_0", "__0_1")
        for damage, change in damages_of(own / name, others).items():
            shutil.rmtree(folder)
            shutil.copytree(own, folder)
            change(folder / name)
            outcome = outcome_of(folder, own, caplog)
            if outcome == "as before":
                may = name.startswith(UNREAD) or name in OUTPUTS or name == "config.yaml"
                may |= (name, damage) in HARMLESS
                silent += [] if may else [f"{name}, {damage}"]
            else:
                is_named = Path(name).name in outcome
                is_named |= name == LATEST and "is missing or incomplete" in outcome
                # A manifest of another checkpoint names every file.
                is_named |= Path(name).name == MANIFEST and "step_00000004 is damaged: " in outcome
                silent += [] if is_named else [f"{name}, {damage} is not named: {outcome}"]
                assert not name.startswith(UNREAD), "listed as not read"
            table.add(name, damage, outcome.replace(str(tmp_path), ""))
    print(f"\n{table}")
    assert silent == []


LATEST = "checkpoints/latest"
HARMLESS = [
    (LATEST, "deleted"),  # the newest counts, as after a kill before the first `latest`
    (LATEST, "bit in tail"),
    ("launch.txt", "deleted"),  # the start counts as the first of its job
    ("launch.txt", "exchanged: other run"),  # a job and a time
    ("metrics.jsonl", "bit in middle"),
]


def test_a_checkpoint_of_another_run_is_not_taken(runs, tmp_path, caplog):
    own, other = runs
    folder = tmp_path / "run"
    shutil.copytree(own, folder)
    shutil.rmtree(folder / "checkpoints/step_00000004")
    shutil.copytree(other / "checkpoints/step_00000004", folder / "checkpoints/step_00000004")
    said = "repaired, from step 2: checkpoint step_00000004 is damaged: it belongs to another run, run ("
    assert outcome_of(folder, own, caplog).startswith(said)


@pytest.mark.parametrize("damage", ["bit in head", "bit in middle", "bit in tail", "cut", "emptied"])
def test_a_damaged_note_of_the_monitors_stop_still_refuses(runs, tmp_path, damage, caplog):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    note_stop(folder, MonitorStop("a spike", 5, 6), saved_step=4)
    damages: dict[str, Callable[[Path], None]] = damages_of(folder / "monitor_stop.json", {})
    damages[damage](folder / "monitor_stop.json")
    outcome = outcome_of(folder, runs[0], caplog)
    assert outcome.startswith("refused: the monitor stopped this run, and ")
    assert "monitor_stop.json, which says where, is damaged" in outcome
