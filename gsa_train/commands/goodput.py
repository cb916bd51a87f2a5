"""Account for a run's time, and simulate it on more GPUs: launch/goodput.py of a checkout, `gsa-goodput` of an
installation.

    python launch/goodput.py --run RUN_DIR
    python launch/goodput.py --gpus 4096 --mtbf-hours 50000 --checkpoint-seconds 2 [--run RUN_DIR] [options]

The first form prints a run's account: ETTR, the cost of each part, and every start with its fault. The second form
simulates runs of --gpus GPUs, where each GPU has a fault every --mtbf-hours on average. It prints ETTR and the best
interval between checkpoints, next to Young's and Daly's formulas. Missing options come from --run if that run measured
them, otherwise from the defaults. The output names the source. Exit code 2 means wrong use or no run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gsa_train.metrics.goodput.words import about_run
from gsa_train.planning.goodput.measure import MeasuredRun, NoAccount, again_in_fast_motion, measure_run
from gsa_train.planning.goodput.planned import Planned, about_plan
from gsa_train.planning.goodput.simulate import Parts, try_interval, try_intervals
from gsa_train.process.as_command import as_command
from gsa_train.process.exit_codes import REFUSED

DEFAULTS = Parts(
    step_seconds=1.0,
    stall_seconds=1.0,
    durable_seconds=30.0,
    start_up_seconds=60.0,
    detection_seconds=60.0,
    down_seconds=60.0,
    extra_share=0.0,
)
"""Targets for a model of a few billion parameters, not measurements."""
OPTIONS = {
    "step_seconds": ("--step-seconds", "of a step"),
    "stall_seconds": ("--checkpoint-seconds", "that training waits for a save"),
    "durable_seconds": ("--durable-seconds", "from a save's begin until a restart would find it"),
    "start_up_seconds": (
        "--start-up-seconds",
        "from a process's begin to its first step, compilation included",
    ),
    "detection_seconds": ("--detection-seconds", "from a fault to the end of the processes"),
    "down_seconds": ("--down-seconds", "from there to the begin of the next ones"),
    "extra_share": ("--extra-share", "validation and the like: seconds for each second of steps"),
}
"""Maps fields of Parts to (option, meaning)."""


@as_command()
def main() -> int:
    arguments = parse(sys.argv[1:])
    try:
        run = measure_run(arguments.run) if arguments.run else None
        parts, sources = choose_parts(arguments, run)
        check_faults(arguments, parts)
    except (NoAccount, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    if run is not None:
        print(about_run(str(arguments.run), run.account, again_in_fast_motion(run, parts).ettr))
    if arguments.gpus is not None:
        print(about_plan(plan(arguments, parts, run), {name: _source(name, sources) for name in sources}))
    return 0


def _source(name: str, sources: Mapping[str, str]) -> str:
    """Returns the source of a value. The source of a default includes its option."""
    return f"default ({OPTIONS[name][0]})" if sources[name] == "default" else sources[name]


def check_faults(arguments: argparse.Namespace, parts: Parts) -> None:
    """
    Raises:
        ValueError: there are too many faults to simulate, or faults come so fast that few starts reach their first
            step. Such a run only restarts, and a simulation of a month has millions of restarts.
    """
    if arguments.gpus is None:
        return
    seconds, first_step = (
        3600 * arguments.mtbf_hours / arguments.gpus,
        parts.start_up_seconds + parts.step_seconds,
    )
    if seconds < first_step:
        raise ValueError(
            f"--mtbf-hours {arguments.mtbf_hours:g}: of {arguments.gpus} GPUs one then has a fault every {seconds:.3g} "
            f"s, before a start has done its first step ({first_step:.3g} s); give the hours between faults of one GPU"
        )
    faults = 86400 * arguments.days / seconds + 1  # each run also has an end
    if arguments.trials * faults > MOST_FAULTS:
        raise ValueError(
            f"--trials {arguments.trials} of --days {arguments.days:g}: {arguments.trials * faults:.3g} faults to "
            f"simulate, more than {MOST_FAULTS}; give fewer trials, at most {max(2, int(MOST_FAULTS / faults))}, or "
            "fewer days"
        )


MOST_FAULTS = 500_000
"""Limit of faults over all simulated runs with one interval, so that the table takes about a minute."""


def plan(arguments: argparse.Namespace, parts: Parts, run: MeasuredRun | None) -> Planned:
    mean_seconds = 3600 * arguments.mtbf_hours / arguments.gpus
    options = (mean_seconds, arguments.days, arguments.trials, arguments.seed)
    asked = arguments.interval_steps or (run.interval_steps if run else None)
    return Planned(
        gpus=arguments.gpus,
        mtbf_hours=arguments.mtbf_hours,
        days=arguments.days,
        trials=arguments.trials,
        parts=parts,
        tried=try_intervals(parts, *options),
        asked=try_interval(parts, asked, *options) if asked else None,
    )


def choose_parts(arguments: argparse.Namespace, run: MeasuredRun | None) -> tuple[Parts, dict[str, str]]:
    """Returns the parts, and the source of each: given, measured, or default."""
    values, sources = dataclasses.asdict(DEFAULTS), dict.fromkeys(OPTIONS, "default")
    for name in OPTIONS:
        given = getattr(arguments, name)
        if given is not None:
            values[name], sources[name] = given, "given"
        elif run is not None and name in run.parts:
            values[name], sources[name] = run.parts[name], "measured"
    if values["durable_seconds"] < values["stall_seconds"] and sources["durable_seconds"] != "given":
        values["durable_seconds"], sources["durable_seconds"] = (
            values["stall_seconds"],
            "as long as the stall",
        )
    return Parts(**values), sources


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="goodput.py",
        description="Account of a run's time, and simulation on more GPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="folder of a run: print its account, and use the parts that it measured",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="of the run to simulate")
    parser.add_argument(
        "--mtbf-hours",
        type=float,
        metavar="H",
        help="mean time between faults of one GPU and its share of the host",
    )
    for field, (option, meaning) in OPTIONS.items():
        unit = "SHARE" if field == "extra_share" else "S"
        default = getattr(DEFAULTS, field)
        parser.add_argument(
            option,
            dest=field,
            type=float,
            metavar=unit,
            help=f"{meaning} (default: from --run, else {default:g})",
        )
    parser.add_argument(
        "--interval-steps", type=int, metavar="N", help="an interval between saves to compare"
    )
    parser.add_argument("--days", type=float, default=30.0, help="length of a simulated run (default: 30)")
    parser.add_argument(
        "--trials", type=int, default=40, help="simulated runs of each interval (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: 1)")
    arguments = parser.parse_args(argv)
    refuse_wrong_numbers(parser, arguments)
    return arguments


def refuse_wrong_numbers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.run is None and arguments.gpus is None:
        parser.error("give --run DIR, or --gpus N with --mtbf-hours H")
    if (arguments.gpus is None) != (arguments.mtbf_hours is None):
        parser.error(
            "--gpus and --mtbf-hours go together: each of the GPUs has a fault every --mtbf-hours on average"
        )
    if arguments.gpus is None and arguments.interval_steps is not None:
        parser.error("--interval-steps needs --gpus with --mtbf-hours: a run that is over has its own")
    positive = {"--gpus": arguments.gpus, "--mtbf-hours": arguments.mtbf_hours, "--days": arguments.days}
    positive |= {"--interval-steps": arguments.interval_steps, "--step-seconds": arguments.step_seconds}
    positive |= {"--checkpoint-seconds": arguments.stall_seconds}
    for option, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"{option} {value}: not above 0; give a number above 0")
    if arguments.trials < 2:
        parser.error(f"--trials {arguments.trials}: too few for an error of the mean; give 2 or more")
    for field, (option, _) in OPTIONS.items():
        value = getattr(arguments, field)
        if value is not None and not 0 <= value < float("inf"):
            parser.error(f"{option} {value}: negative or not finite; give 0 or more")
    stall, durable = arguments.stall_seconds, arguments.durable_seconds
    if stall is not None and durable is not None and durable < stall:
        parser.error(f"--durable-seconds {durable}: below --checkpoint-seconds {stall}; give that or more")
