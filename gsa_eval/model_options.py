"""Define what the commands share: handling of errors, options that name a model, and a check of packages."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gsa_data.faults import DataFault
from gsa_train.distributed.megatron_import import quiet_libraries
from gsa_train.process.as_command import as_command

PACKAGES = ("transformers", "safetensors", "tokenizers")
"""Packages of the extra `hf`, without which no model can be read."""


def refusing(main: Callable[[], int]) -> Callable[[], int]:
    """Decorate a command like `as_command`. An input error prints its message and gives exit code 2."""

    @functools.wraps(main)
    def command() -> int:
        try:
            with as_command():
                return main()
        except (ValueError, OSError, DataFault) as error:
            print(error, file=sys.stderr)
            return 2

    return command


def add_source(parser: argparse.ArgumentParser, exported: bool = True) -> None:
    """Add --run, --checkpoint, --step and, if `exported`, --hf."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN_DIR", help="folder of a run: its newest checkpoint")
    source.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a step_* folder, or what import_hf.py wrote"
    )
    if exported:
        source.add_argument("--hf", type=Path, metavar="DIR", help="a folder that export_hf.py wrote")
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step")


def check_step(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.step is not None and arguments.run is None:
        parser.error("--step is of a run; give --run RUN_DIR")


def prepare_imports() -> None:
    """Exit with code 2 if a package is missing, before an import fails. Also silence the libraries."""
    for name in PACKAGES:
        if find_spec(name) is None:
            print(
                f"the package {name} is not installed; run in the checkout: pip install '.[hf]'",
                file=sys.stderr,
            )
            sys.exit(2)
    quiet_libraries()
