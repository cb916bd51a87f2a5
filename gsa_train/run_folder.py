"""The run folder on the main rank: resolved config, sinks, progress."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gsa_train.config import Config, config_to_yaml
from gsa_train.monitor_stop import FILE as MONITOR_STOP
from gsa_train.parallel import Parallel
from gsa_train.progress import Progress
from gsa_train.resume import LAUNCH, Start, launch_id, run_dir
from gsa_train.sinks import Sinks, open_sinks, write_atomically
from gsa_train.starts import note_start, read_starts
from gsa_train.stop_signals import children_keep_running
from gsa_train.watch import newest_hang

STOPPED = "stopped.json"
"""Says that, when and why the run was stopped; gone while it runs and when it is complete. For job scripts."""


@dataclass(frozen=True)
class RunFolder:
    checkpoints: Path
    sinks: Sinks | None
    """On the main rank."""
    progress: Progress | None
    """On the main rank."""
    wandb_run_id: str | None
    """On every rank."""
    hang: str | None
    """On the main rank: which hang ended the start before this one (gsa_train.watch)."""


def open_run_folder(config: Config, start: Start, parallel: Parallel, total_steps: int) -> RunFolder:
    """Open what the run writes; print config and layout. Collective."""
    folder = run_dir(config)
    sinks = progress = hang = None
    shared: list[str | None] = [None]
    if parallel.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        continues = start.same_run and start.state is not None
        starts = read_starts(folder)
        hang = newest_hang(folder / "faults", starts[-1]["unix_seconds"]) if starts else None
        with children_keep_running():  # W&B's service among them
            sinks = open_sinks(
                config.logging,
                folder,
                config.run.name,
                dataclasses.asdict(config),
                resume_step=start.step if continues else None,
                wandb_run_id=start.state.wandb_run_id if continues and start.state else None,
            )
        write_atomically(folder / "config.yaml", config_to_yaml(config))
        on_gpu = parallel.device.type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else platform.machine()
        note_start(folder, start.step, parallel.describe(), device)
        (folder / "checkpoints").mkdir(exist_ok=True)
        write_atomically(folder / LAUNCH, launch_id() + "\n")
        (folder / STOPPED).unlink(missing_ok=True)
        (folder / MONITOR_STOP).unlink(missing_ok=True)
        progress = Progress(total_steps, start.step)
        progress.message(config_to_yaml(config))
        progress.message(f"run folder {folder}; {parallel.describe()}")
        if start.checkpoint is not None:
            progress.message(f"resuming from {start.checkpoint} at step {start.step}")
        if start.step == total_steps:
            progress.message("this run is complete: no step is left, only the end is written again")
        shared[0] = sinks.wandb_run_id
    dist.broadcast_object_list(shared, src=0)
    return RunFolder(folder / "checkpoints", sinks, progress, shared[0], hang)
