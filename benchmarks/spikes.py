"""Judges runs by spike detectors: python benchmarks/spikes.py RUN_FOLDER [--faults] [monitor.sigmas=5 ...]

The script replays the losses and gradient norms of a run through our rule and through OLMo-core's, phase by phase, and
prints the steps that each rule calls spikes. The run must have logged every step (logging.every_steps=1). --faults also
puts faults into the run, and prints how many of them each rule finds and after how many steps. Overrides change
`monitor` and `train.grad_clip`. In place of a run folder the script accepts FILE.npz with an array [steps, (loss,
gradient norm)] per run, whose gradients were clipped to 1: benchmarks/clean_traces.npz.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.config import Config, MonitorConfig, load_config
from gsa_train.config.checks import check_config
from gsa_train.metrics.record_format import read_records
from spike_trials import FAULTS, OLMO, table, try_rule

RULE_FIELDS = (
    "monitor.window_steps", "monitor.min_history_steps", "monitor.sigmas", "monitor.lasting_", "monitor.loss_min_",
    "monitor.grad_norm_min_", "train.grad_clip",
)  # fmt: skip
"""What a detector judges by. Faults that show only on one rank, such as different replicas, were not in the run."""
DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="spikes.py", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--faults", action="store_true", help="also put faults into the run")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)  # the tensors are tiny
    is_folder = arguments.run.is_dir()
    try:
        check_path(arguments.run)
        config = load_config(arguments.run / "config.yaml" if is_folder else DEMO, arguments.overrides)
        check_rule(config)
        traces = (of_folder if is_folder else of_file)(arguments.run)
    except (OSError, ValueError) as error:  # a wrong config is also a ValueError
        parser.error(str(error))
    monitor = config.monitor
    rules: dict[str, MonitorConfig] = {monitor.detector: monitor, "OLMo-core": OLMO}
    for run, (numbers, trace) in traces.items():
        trials = {
            name: try_rule(trace, rule, config.train.grad_clip, FAULTS if arguments.faults else {})
            for name, rule in rules.items()
        }
        print(f"{run}: {len(trace)} steps")
        for rule, trial in trials.items():
            steps = [numbers[alarm] for alarm in trial.false_alarms]
            shown = " ".join(map(str, steps[:12])) + (" ..." if len(steps) > 12 else "")
            print(f"  {rule:<10} {len(steps):>4} flagged  {shown}")
        if arguments.faults:
            print(table(trials) + "\n")


def check_rule(config: Config) -> None:
    """Raise ValueError if the detector cannot judge by these numbers."""
    wrong = [line for line in check_config(config, 1) if line.startswith(RULE_FIELDS)]
    if wrong:
        raise ValueError("\n".join(wrong))


def check_path(run: Path) -> None:
    """Raise ValueError if the path is neither a run nor a file of traces."""
    if run.is_dir() and not ((run / "config.yaml").is_file() and (run / "metrics.jsonl").is_file()):
        raise ValueError(f"{run}: not the folder of a run, which has config.yaml and metrics.jsonl")
    if not run.is_dir() and not (run.is_file() and zipfile.is_zipfile(run)):
        raise ValueError(f"{run}: neither a folder nor an .npz file; give <run.dir>/<run.name>")


def of_folder(run: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Map each phase to the numbers of its steps and its trace.

    Raises:
        ValueError: the run logged only some of its steps. Distant steps do not show the noise between neighbours.
    """
    records = [record for record in read_records(run / "metrics.jsonl") if "event" not in record]
    traces = {}
    for phase, group in itertools.groupby(records, key=lambda record: record["phase"]):
        of_phase = list(group)
        steps = [record["step"] for record in of_phase]
        if 2 * len(steps) < steps[-1] - steps[0]:  # a few may be missing: skipped batches, or a full disk
            raise ValueError(
                f"{run}: phase {phase} logged {len(steps)} of its steps {steps[0]} to {steps[-1]}; this needs a run "
                "with logging.every_steps=1"
            )
        traces[phase] = (steps, torch.tensor([[record["loss"], record["grad_norm"]] for record in of_phase]))
    return traces


def of_file(path: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return {name: ([*range(1, len(trace) + 1)], trace) for name, trace in found.items()}


if __name__ == "__main__":
    main()
