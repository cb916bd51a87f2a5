"""Account for a run's time: launch/goodput.py of a checkout, `gsa-goodput` of an installation.

    python launch/goodput.py --run RUN_DIR

Prints the run's ETTR (effective training time ratio), its lost time by cause, and every start with its fault. Exit code
2 means incorrect usage or no run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.goodput.words import about_run
from gsa_train.process.as_command import as_command
from gsa_train.process.exit_codes import REFUSED


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="goodput.py", description="Account of a run's time.", allow_abbrev=False
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="folder of a run")
    folder = parser.parse_args().run
    try:
        account = read_account(folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if account is None or account.step_seconds is None:
        print(
            f"{folder}: no goodput.jsonl with steps in it; give the folder of a run of this version, "
            "<run.dir>/<run.name>, once it has trained some steps",
            file=sys.stderr,
        )
        return REFUSED
    print(about_run(str(folder), account))
    return 0
