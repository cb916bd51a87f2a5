"""Parses the command line of `pretrain.py` and reports refused starts."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gsa_train.arguments import DEVICE, Arguments
from gsa_train.config import Config
from gsa_train.config.load import fields_named
from gsa_train.model.flops import DEVICES
from gsa_train.process.exit_codes import REFUSED
from gsa_train.reliability.last_words import say_last
from gsa_train.reliability.stop_signals import StopRequest

HEAD_START_SECONDS = 10.0
"""Time for which other ranks wait, so that only rank 0 reports an error that all ranks have."""


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse the arguments of `pretrain.py`. Incorrect usage prints the cause and exits with code 2.

    `load_config` checks the overrides together with the file.

    Args:
        argv: the words after the script's name; None: `sys.argv[1:]`.
    """
    name = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog="python -m gsa_train" if name == "__main__.py" else name,
        description="Pretrain a language model with Gated Sparse Attention.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        required=True,
        dest="config_path",
        metavar="FILE",
        help="YAML file of the run, or the name of one in configs/",
    )
    resume = parser.add_mutually_exclusive_group()
    resume.add_argument("--resume-from", metavar="DIR", help="start from this checkpoint folder")
    resume.add_argument("--no-resume", action="store_true", help="ignore the checkpoints of the run folder")
    parser.add_argument(
        "--resume-after-stop",
        action="store_true",
        help="continue although the monitor stopped the run at a spike (monitor_stop.json in its folder)",
    )
    parser.add_argument(
        "--accept-new-data",
        action="store_true",
        help="if the checkpoint has other data or another order, continue at its step from the start of the config's",
    )
    parser.add_argument("--dry-run", action="store_true", help="print layout, sizes and costs, and stop")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks to plan for, with --dry-run")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"GPU to plan for, with --dry-run (default {DEVICE}): {', '.join(DEVICES)}",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        metavar="SHARE",
        help="share of the GPU's peak rate to plan with, with --dry-run, such as 0.4 (default: as measured)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.grad_clip=0.5")
    refuse_dashed_fields(parser, argv)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(unknown_words(parser, unknown))

    if arguments.world_size is not None and not arguments.dry_run:
        parser.error("--world-size needs --dry-run; a real run takes its size from torchrun")
    for option, value in (("--device", arguments.device), ("--mfu", arguments.mfu)):
        if value is not None and not arguments.dry_run:
            parser.error(f"{option} needs --dry-run; a real run measures its time")
    if arguments.device is not None and arguments.device not in DEVICES:
        parser.error(
            f"--device {arguments.device}: its peak rate is not known; give one of {', '.join(DEVICES)}"
        )
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        parser.error(f"--mfu {arguments.mfu}: not a share of the peak rate; give more than 0 and at most 1")
    if arguments.accept_new_data and arguments.no_resume:
        parser.error("--accept-new-data: not allowed with argument --no-resume, which starts from scratch")
    if arguments.resume_from is not None and not Path(arguments.resume_from).is_dir():
        parser.error(f"--resume-from {arguments.resume_from}: no such folder; give a checkpoint folder")
    world_size = arguments.world_size
    if world_size is None:
        try:
            world_size = announced_world_size(needs_rank=not arguments.dry_run)
        except ValueError as error:
            parser.error(str(error))
    if world_size < 1:
        parser.error(f"world size {world_size}: below 1; give 1 or more")
    changed = {"overrides": tuple(arguments.overrides), "world_size": world_size}
    return Arguments(**{**vars(arguments), **changed, "device": arguments.device or DEVICE})


def refuse_dashed_fields(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Refuse `--model.num_layers=2` and print the right form; argparse reports other unknown words."""
    words = list(sys.argv[1:] if argv is None else argv)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        dashed = re.fullmatch(r"--([a-z_]+\.[^=]+)(?:=(.*))?", word)
        if dashed:
            value = following if dashed[2] is None else dashed[2]
            parser.error(f"{word}: fields of the config have no dashes; write {dashed[1]}={value or 'VALUE'}")


def unknown_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Returns the error for unknown words, with the option or form that the user may have meant by each word."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    reasons = []
    for word in words:
        name, _, value = word.partition("=")
        fields = fields_named(name.lstrip("-").replace("-", "_"), Config)
        meant = [option for option in options if len(name) > 2 and option.startswith(name)]
        meant = meant or [each for each in difflib.get_close_matches(name, options, n=1) if each != "--help"]
        if fields:
            forms = " or ".join(f"{field}={value or 'VALUE'}" for field in fields)
            reasons.append(f"{word}: no such option; fields of the config have no dashes; write {forms}")
        else:
            lists = (
                "--help lists them; fields of the config are section.field=VALUE (docs/reference/config.md)"
            )
            remedy = f"did you mean {' or '.join(meant)}?" if meant else lists
            reasons.append(f"{word}: no such option; {remedy}")
    return "; ".join(reasons)


def announced_world_size(needs_rank: bool = True) -> int:
    """Returns the number of ranks in torchrun's environment; 1 for a plain `python` start.

    Raises:
        ValueError: WORLD_SIZE is not a number, or it is above 1 and RANK is missing.
    """
    announced = os.environ.get("WORLD_SIZE", "1")
    if not announced.isdecimal():
        raise ValueError(f"WORLD_SIZE={announced} in the environment: not an integer; start with torchrun")
    if int(announced) > 1 and needs_rank and "RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={announced} in the environment, but no RANK: start with torchrun, or unset it"
        )
    return int(announced)


def refuse(error: object, code: int = REFUSED, request: StopRequest | None = None) -> int:
    """Print why this start is refused, and return its exit code.

    If all ranks find the same error, only rank 0 reports it: rank 0 exits, and torchrun ends the other ranks. But rank
    0 may find no error, for example if a tokenizer is missing only on another node. The other ranks therefore wait for
    HEAD_START_SECONDS, and report their error if torchrun has not ended them.

    Args:
        request: if it has recorded a signal, this rank prints nothing.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        say_last(str(error))
        return code
    time.sleep(HEAD_START_SECONDS)
    if request is None or not request.reason:
        say_last(f"rank {rank} on {socket.gethostname()}: {error}")
    return code
