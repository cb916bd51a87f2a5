"""The command line of a pretraining run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Arguments:
    config_path: str
    overrides: tuple[str, ...]
    """`key=value`, in the order given."""
    resume_from: str | None
    """Folder of the checkpoint to start from."""
    no_resume: bool
    """Start at step 0 even if the run folder has checkpoints."""
    resume_after_stop: bool
    """Go on although the monitor stopped the run at a spike."""
    accept_new_data: bool
    """Where the checkpoint is of other text, start that of the config instead of refusing it."""
    dry_run: bool
    world_size: int
    """Ranks: what `--world-size` plans for in a dry run, else what torchrun or Slurm announced, else 1."""


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Arguments of `pretrain.py`; wrong use prints why and exits with code 2.

    The overrides themselves are judged by `load_config`, together with the file.

    Args:
        argv: the words after the script's name; those of this process if None.
    """
    parser = argparse.ArgumentParser(
        prog="pretrain.py",
        description="Pretrain a language model with Gated Sparse Attention.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run, see configs/")
    resume = parser.add_mutually_exclusive_group()
    resume.add_argument("--resume-from", metavar="DIR", help="start from this checkpoint folder")
    resume.add_argument("--no-resume", action="store_true", help="ignore the checkpoints of the run folder")
    parser.add_argument(
        "--resume-after-stop",
        action="store_true",
        help="go on although the monitor stopped the run at a spike (monitor_stop.json in its folder)",
    )
    parser.add_argument(
        "--accept-new-data",
        action="store_true",
        help="if the checkpoint is of other data or another order, go on at its step from the start of the config's",
    )
    parser.add_argument("--dry-run", action="store_true", help="print layout, sizes and costs, and stop")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks to plan for, with --dry-run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.grad_clip=0.5")
    arguments = parser.parse_intermixed_args(argv)

    if arguments.world_size is not None and not arguments.dry_run:
        parser.error("--world-size needs --dry-run; a real run takes its size from torchrun")
    if arguments.accept_new_data and arguments.no_resume:
        parser.error("--accept-new-data: not allowed with argument --no-resume, which starts all anew")
    if arguments.resume_from is not None and not Path(arguments.resume_from).is_dir():
        parser.error(f"--resume-from {arguments.resume_from}: no such folder; give a checkpoint folder")
    world_size = arguments.world_size
    if world_size is None:
        announced = os.environ.get("WORLD_SIZE", "1")
        if not announced.isdecimal():
            parser.error(f"WORLD_SIZE={announced} in the environment: not an integer; start with torchrun")
        world_size = int(announced)
        if world_size > 1 and not arguments.dry_run and "RANK" not in os.environ:
            parser.error(
                f"WORLD_SIZE={world_size} in the environment, but no RANK: start with torchrun, or unset it"
            )
    if world_size < 1:
        parser.error(f"world size {world_size}: below 1; give 1 or more")
    return Arguments(
        config_path=arguments.config,
        overrides=tuple(arguments.overrides),
        resume_from=arguments.resume_from,
        no_resume=arguments.no_resume,
        resume_after_stop=arguments.resume_after_stop,
        accept_new_data=arguments.accept_new_data,
        dry_run=arguments.dry_run,
        world_size=world_size,
    )
