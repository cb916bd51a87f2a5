"""Open the sinks of logged records on rank 0: metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gsa_train.config import LoggingConfig
from gsa_train.files import own_file, write_atomically
from gsa_train.metrics.metrics_file import MetricsFile
from gsa_train.metrics.panels import tag_of
from gsa_train.metrics.record_format import (
    Record,
    go_back,
    to_json,
    to_scalars,
)
from gsa_train.metrics.tensorboard_sink import TensorBoardSink
from gsa_train.metrics.wandb_sink import WandbSink

logger = logging.getLogger(__name__)


def open_sinks(
    logging_config: LoggingConfig,
    run_dir: Path,
    phases: Sequence[str],
    resume_step: int | None,
    wandb: WandbSink | None,
    keeps_later: bool = False,
    validates_again: bool = False,
) -> Sinks:
    """Open the sinks of a run, whose files an earlier start may have written.

    Args:
        phases: names, in their order.
        resume_step: step of the loaded checkpoint. Records after it are dropped, because those steps run again.
            None: the run starts at step 0, and the files of an earlier start move to `previous/<time>/`. If a
            folder is a link or a mounted disk, only its content moves, to `previous/<time>/` inside the folder.
        keeps_later: dropped records move to `metrics_rewound.jsonl`.
        validates_again: also drop the validation at that step, because it runs again.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_path = run_dir / "metrics.jsonl"
    if resume_step is None:
        _move_aside(run_dir)
    else:
        exists = metrics_path.exists()
        newest = go_back(metrics_path, resume_step, keeps_later, validates_again) if exists else 0
        # A save begins only after the record of its step is written.
        if newest < resume_step - resume_step % logging_config.every_steps:
            logger.warning(
                "%s has no record after step %d, and the checkpoint is at step %d: the file was cut or removed, or its "
                "disk was full; the run continues without them, and TensorBoard or W&B may have them",
                metrics_path,
                newest,
                resume_step,
            )
    tensorboard = (
        TensorBoardSink(run_dir / "tensorboard", resume_step) if logging_config.tensorboard else None
    )
    return Sinks(run_dir, tensorboard, wandb, phases)


class Sinks:
    """End it with `finish` (the run is complete) or `close` (it is not)."""

    def __init__(
        self,
        run_dir: Path,
        tensorboard: TensorBoardSink | None,
        wandb: WandbSink | None,
        phases: Sequence[str] = (),
    ):
        self.run_dir = run_dir
        self.wandb_run_id: str | None = wandb.id if wandb else None
        """Id of the W&B run. Every checkpoint has it, so that a restart continues the same W&B run."""
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._phases = list(phases)

    def log(self, record: Record) -> None:
        """Log to every sink and flush, so that a kill right after this call loses nothing. If files cannot be written,
        records of metrics.jsonl wait, and records of TensorBoard are lost."""
        news = self._metrics.write(record)
        for each in [record] if news is None else [record, news]:
            scalars = to_scalars(each)
            if each["phase"] in self._phases and "event" not in each:
                scalars[tag_of("phase_index")] = self._phases.index(each["phase"])
            if self._tensorboard:
                self._tensorboard.log(each, scalars, disk_works=self._metrics.works)
            if self._wandb:
                self._wandb.log(each, scalars)

    def folder_was_gone(self) -> bool:
        """Whether the run folder was removed or moved since the sinks were opened."""
        return self._metrics.folder_was_gone

    def tell_of_hang(self, step: int, report: str) -> None:
        """Report a hang only to W&B, whose run ends as failed. The main thread may hang in a file."""
        record = {"event": "hang", "step": step, "reason": report}
        if self._wandb:
            self._wandb.log(record, to_scalars(record))
            self._wandb.close(exit_code=1)

    def finish(self, summary: Record) -> None:
        """Write `summary.json` and close.

        Raises:
            OSError: the summary cannot be written; W&B has it.
        """
        try:
            write_atomically(self.run_dir / "summary.json", to_json(summary, indent=2) + "\n")
        finally:
            if self._wandb:
                self._wandb.finish(summary)
            self.close()

    def close(self, exit_code: int = 0) -> None:
        """Close without a summary. W&B marks the run as failed when `exit_code` is not 0. A second call does
        nothing."""
        self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb:
            self._wandb.close(exit_code)
            self._wandb = None


FILES = (
    "metrics.jsonl",
    "samples.jsonl",  # of earlier versions
    "metrics_rewound.jsonl",
    "monitor_stop.json",
    "summary.json",
    "starts.jsonl",
    "goodput.jsonl",
    "alive.json",
    "report.html",  # of earlier versions
)
FOLDERS = (
    "tensorboard",
    "plots",  # of earlier versions
    "profile",
    "checkpoints",
    "faults",
    "evaluations",
    "analysis",  # of earlier versions
)
"""Output folders of a run. The last two describe the run's checkpoints."""
APPENDED = ("metrics.jsonl", "starts.jsonl", "goodput.jsonl")


def check_links(run_dir: Path, resumes: bool) -> None:
    """Check links before anything in the folder changes.

    Args:
        resumes: whether the start appends to the existing files instead of moving them away.

    Raises:
        OSError: a link in place of an output folder has no target (its disk may not be mounted), or a file to append to
            is a link.
    """
    for path in (run_dir / name for name in APPENDED if resumes and os.path.lexists(run_dir / name)):
        os.close(own_file(str(path), os.O_RDONLY))
    for path in (run_dir / name for name in FOLDERS):
        if path.is_symlink() and not path.is_dir():
            remedy = "mount its disk or make that folder, or remove the link"
            raise OSError(
                errno.ENOENT, f"it is a link to {os.readlink(path)}, where no folder is; {remedy}", str(path)
            )


def _move_aside(run_dir: Path) -> None:
    outputs = [run_dir / name for name in (*FILES, *FOLDERS)]
    found = [path for path in outputs if os.path.lexists(path)] + sorted(run_dir.glob("summary_*.json"))
    stay = [path for path in found if path.is_dir() and (path.is_symlink() or path.is_mount())]
    time = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    previous = run_dir / "previous" / time
    for path in found:
        if path not in stay:
            previous.mkdir(parents=True, exist_ok=True)
            shutil.move(path, previous / path.name)  # a copy if `previous` is a link to another disk
        elif content := [each for each in path.iterdir() if each.name not in ("previous", "lost+found")]:
            kept = path / "previous" / time
            kept.mkdir(parents=True)
            for each in content:
                each.rename(kept / each.name)
            previous.mkdir(parents=True, exist_ok=True)
            (previous / path.name).symlink_to(kept.resolve())
            logger.warning(
                "%s is a %s, and stays one for the new run; the previous run's files are now in %s",
                path,
                f"link to {path.resolve()}" if path.is_symlink() else "mounted disk",
                kept.resolve(),
            )
