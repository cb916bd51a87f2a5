"""Write the report of finished, running or killed runs: launch/plot.py of a checkout, `gsa-plot` of an installation.

    python launch/plot.py RUN_DIR [RUN_DIR ...]

The report is one page that needs no server and no network: charts, which can be zoomed, config, events and restarts.
The page of one run is RUN_DIR/report.html. The page of several runs is comparison.html in the first folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_eval.report.page import write_report
from gsa_eval.report.run_series import records_of
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(description="Write the HTML report of runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with metrics.jsonl")
    parser.add_argument("--out", type=Path, help="folder of comparison.html (default: the first run)")
    arguments = parser.parse_args()
    run_dirs: list[Path] = arguments.run_dirs
    if arguments.out and len(run_dirs) == 1:
        parser.error("--out is the folder of the comparison; give at least two runs")
    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: a file; give a folder")
    for run_dir in run_dirs:
        if problem := find_problem(run_dir):
            parser.error(problem)

    name = "comparison.html" if len(run_dirs) > 1 else "report.html"
    try:
        print(write_report(run_dirs, (arguments.out or run_dirs[0]) / name))
    except OSError as error:
        print(f"no report was written: {error}; make room, or give another place", file=sys.stderr)
        return 2
    return 0


def find_problem(run_dir: Path) -> str | None:
    metrics = run_dir / "metrics.jsonl"
    if not run_dir.is_dir():
        return f"{run_dir}: no such folder; give the folder of a run, <run.dir>/<run.name>"
    if not metrics.is_file():
        return f"{run_dir}: not the folder of a run (it has no metrics.jsonl); give <run.dir>/<run.name>"
    try:
        records = records_of(run_dir)
    except (ValueError, OSError) as error:  # damaged, or another user's
        return str(error)
    return (
        None if records else f"{metrics}: nothing has been logged yet; draw it once it has trained some steps"
    )


if __name__ == "__main__":  # the end of a run draws its report in a process of its own
    sys.exit(main())
