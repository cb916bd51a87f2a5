"""Open the run folder: resolved config, metrics files, console and goodput log. Only the main rank writes."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import socket
from pathlib import Path

import torch

from gsa_data.whole_files import parse_json
from gsa_train.checkpoint.files import go_back_to, recover_folder
from gsa_train.config import Config, config_to_yaml, saved_sections
from gsa_train.distributed.objects import gathered, on_main
from gsa_train.distributed.parallel import Parallel
from gsa_train.files import write_atomically
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.ledger import lost_line, read_lines
from gsa_train.metrics.goodput.words import lost_in_words
from gsa_train.metrics.progress import Progress
from gsa_train.metrics.sinks import Sinks, check_links, open_sinks
from gsa_train.metrics.wandb_sink import WandbRefused, WandbSink, open_wandb
from gsa_train.reliability.hang_watchdog import newest_hang
from gsa_train.reliability.last_words import ended_in_silence
from gsa_train.reliability.stop_signals import children_keep_running
from gsa_train.run.kernel_cache import VARIABLE, kernel_cache_in_words
from gsa_train.run.run_log import RunLog
from gsa_train.run.start_header import start_header
from gsa_train.run_folder.job_start import note_job_start
from gsa_train.run_folder.lock import RunFolderError
from gsa_train.run_folder.paths import run_dir
from gsa_train.run_folder.resume import Start, set_damaged_aside
from gsa_train.run_folder.spike_stop import FILE as MONITOR_STOP
from gsa_train.run_folder.starts import new_run_id, note_start, read_starts

logger = logging.getLogger(__name__)

STOPPED = "stopped.json"
"""File for job scripts: when and why the run was stopped. Absent while the run trains and when it is complete."""


def open_run_folder(
    config: Config, start: Start, parallel: Parallel, goodput: GoodputLog
) -> tuple[RunLog, str, str | None]:
    """Open the files that the run writes, and print the header of this start. Collective. An error of the main rank is
    raised on all ranks.

    Args:
        goodput: the log that this function opens in the folder.

    Returns:
        - The log.
        - The run's id, as in its checkpoints and starts.jsonl.
        - On the main rank, a report of the hang that ended the previous start, if any.

    Raises:
        WandbRefused: the W&B run cannot be opened; existing files of the folder are unchanged.
        RunFolderError: a file cannot be written or read, as on a full disk.
    """
    folder = run_dir(config)
    sinks = console = hang = None
    place: tuple[str, ...] = ()
    me = f"rank {parallel.rank} on {socket.gethostname()}"
    # ranks that ended the previous start without a message
    silent = [each for each in gathered(me if ended_in_silence() else None) if each is not None]

    def open_all() -> tuple[str, str | None]:
        nonlocal sinks, console, hang, place
        wandb = _open_wandb(config, start)
        place = wandb.place() if wandb else ()
        run_id = (start.same_run and start.state and start.state.run_id) or new_run_id()
        try:
            # Read first: `_open_files` moves goodput.jsonl away if no checkpoint of this run is loaded.
            before = read_lines(folder) if start.same_run or start.same_job else []
            lost = lost_line(folder, before)
            sinks, console, hang = _open_files(config, start, parallel, wandb, place, run_id)
            is_complete = start.step == sum(phase.steps for phase in config.phases)
            goodput.open(folder, start.step, before, lost, is_complete)
            for line in lost:
                console.message(lost_in_words(line, silent))
            if before:
                console.message(goodput.in_words())
        except OSError as error:
            raise RunFolderError(
                f"the run folder {folder} cannot be opened: {error}; make room on its disk, or mend what is said, and "
                "start the same command again: nothing of the run is lost"
            ) from error
        return run_id, sinks.wandb_run_id

    run_id, wandb_run_id = on_main(open_all, WandbRefused, RunFolderError)
    log = RunLog(sinks, console, wandb_run_id, place, writes_late=parallel.device.type == "cuda")
    return log, run_id, hang


def _open_wandb(config: Config, start: Start) -> WandbSink | None:
    """Continue the W&B run that the checkpoint or this folder records. If the recorded name differs from `run.name`,
    the folder was copied or renamed, and a new W&B run is opened."""
    folder = run_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    run_id = copied_from = None
    if start.same_run and start.state is not None:
        run_id, of = start.state.wandb_run_id, start.state.run
        if run_id is not None and of not in ("", config.run.name):
            logger.info(
                "the folder is a copy of the folder of run %s: W&B gets a new run, which names that one", of
            )
            run_id, copied_from = None, run_id
    with children_keep_running():  # W&B's service is a child, too
        resolved, has_begun = dataclasses.asdict(config), start.same_run and start.step > 0
        return open_wandb(config.logging, folder, config.run.name, resolved, run_id, has_begun, copied_from)


def _open_files(
    config: Config,
    start: Start,
    parallel: Parallel,
    wandb: WandbSink | None,
    wandb_place: tuple[str, ...],
    run_id: str,
) -> tuple[Sinks, Progress, str | None]:
    """Prepare and open the folder's files for this start, on the main rank. Returns sinks, console, and a short report
    of the hang that ended the previous start (None if there was no hang)."""
    folder, total_steps = run_dir(config), sum(phase.steps for phase in config.phases)
    continues = start.same_run and start.state is not None
    check_links(folder, continues)
    recover_folder(folder / "checkpoints")
    if start.checkpoint is not None:
        set_damaged_aside(start.checkpoint, start.damaged)
    is_complete = start.step == total_steps
    # A restart before the next save would otherwise resume from a newer checkpoint.
    went_back = continues and start.checkpoint is not None and go_back_to(start.checkpoint)
    starts = read_starts(folder)
    hang = newest_hang(folder / "faults", starts[-1]["unix_seconds"]) if starts else None
    sinks = open_sinks(
        config.logging,
        folder,
        [phase.name for phase in config.phases],
        resume_step=start.step if continues else None,
        wandb=wandb,
        keeps_later=went_back,
        validates_again=is_complete or (start.state is not None and start.state.validation_due),
    )
    if not is_complete:
        _keep_summary(folder)
    write_atomically(folder / "config.yaml", config_to_yaml(config))
    on_gpu = parallel.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else platform.machine()
    note_start(folder, start.step, parallel.describe(), device, run_id)
    (folder / "checkpoints").mkdir(exist_ok=True)
    note_job_start(folder)
    (folder / STOPPED).unlink(missing_ok=True)
    (folder / MONITOR_STOP).unlink(missing_ok=True)
    console = Progress(total_steps, start.step)
    kernels = [kernel_cache_in_words(config.run, os.environ)] if VARIABLE in os.environ and on_gpu else []
    done = (start.step, start.state.tokens) if start.state is not None else (0, 0)
    console.message(start_header(config, parallel.describe(), folder, wandb_place, kernels, done))
    if start.checkpoint is not None:
        console.message(f"resuming from {start.checkpoint} at step {start.step}")
    if start.state is not None:
        for line in config_changes(start.state.config_yaml, config):
            console.message(f"  changed since then: {line}")
    if went_back:
        console.message(
            "newer checkpoints are in checkpoints/set_aside, their metrics in metrics_rewound.jsonl"
        )
    profile = config.profile
    if profile.start_step > 0 and profile.start_step + profile.steps <= start.step + 1:
        console.message(
            "profile: its steps lie before this start, so nothing is traced; set profile.start_step"
        )
    if is_complete:
        console.message("this run is complete: no step is left, only the end is written again")
    return sinks, console, hang


def _keep_summary(folder: Path) -> None:
    """Rename a summary.json from before the user extended the phases, because the continued run would look complete."""
    path = folder / "summary.json"
    if not path.is_file():
        return
    try:
        name = f"summary_{parse_json(path.read_text(encoding='utf-8'))['steps']:08d}.json"
    except (ValueError, KeyError, TypeError) as error:
        name = "summary.json.damaged"
        logger.warning("%s is damaged (%r); kept as %s", path, error, name)
    path.rename(folder / name)


def config_changes(saved_yaml: str, config: Config) -> list[str]:
    """Returns `field: before -> now` for each field that differs from the checkpoint's config. Fields that are newer
    than the checkpoint are left out, because the checkpoint lacks them."""
    before, now = (saved_sections(text) for text in (saved_yaml, config_to_yaml(config)))
    lines = []
    names = [", ".join(phase["name"] for phase in tree["phases"]) for tree in (before, now)]
    if names[0] != names[1]:
        lines.append(f"phases: {names[0]} -> {names[1]}")
    for tree in (before, now):
        phases = tree.pop("phases")
        tree |= {f"phases.{index}": phase for index, phase in enumerate(phases)}
    for section, fields in now.items():
        known = before.get(section, {})
        changed = [field for field, value in fields.items() if field in known and known[field] != value]
        lines += [f"{section}.{field}: {known[field]} -> {fields[field]}" for field in changed]
    return lines
