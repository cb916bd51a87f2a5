"""Draw the figures of finished, running or killed runs: launch/plot.py of a checkout, `gsa-plot` of an installation.

    python launch/plot.py RUN_DIR [RUN_DIR ...] [--html]

--html writes one page that needs no server and no network: all figures, which can be zoomed, config, events and
restarts. The page of one run is RUN_DIR/report.html. The page of several runs is comparison.html in the first folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_eval.report.page import write_report
from gsa_eval.report.plots import write_comparison, write_plots
from gsa_eval.report.run_series import records_of
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the figures of runs into their plots/ folders.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with metrics.jsonl")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the comparison (default: plots/ of the first run, with --html the run)",
    )
    parser.add_argument("--html", action="store_true", help="write one HTML page instead of pictures")
    arguments = parser.parse_args()
    run_dirs: list[Path] = arguments.run_dirs
    if arguments.out and len(run_dirs) == 1:
        parser.error("--out is the folder of the comparison; give at least two runs")
    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: a file; give a folder")
    for run_dir in run_dirs:
        if problem := find_problem(run_dir):
            parser.error(problem)

    try:
        written = draw(run_dirs, arguments.out, arguments.html)
    except OSError as error:
        print(f"not all was drawn: {error}; make room, or give another place", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in written))
    return 0


def draw(run_dirs: list[Path], out: Path | None, html: bool) -> list[Path]:
    """Draw the figures and return their files. --html makes a single file.

    Args:
        out: folder of the comparison.
    """
    several = len(run_dirs) > 1
    if html:
        return [
            write_report(run_dirs, (out or run_dirs[0]) / ("comparison.html" if several else "report.html"))
        ]
    written = [path for run_dir in run_dirs for path in write_plots(run_dir)]
    if several:
        written.append(write_comparison(run_dirs, out or run_dirs[0] / "plots"))
    return written


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
