"""Judge a finished run by spike detectors: python launch/spikes.py RUN_FOLDER [monitor.sigmas=5 ...]

Replays the logged losses and gradient norms of a run that logged every step (logging.every_steps=1) through our rule
and through OLMo-core's, phase by phase, and prints the steps that each calls spikes. Overrides change `monitor`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import torch

from gsa_train.config import MonitorConfig, load_config
from gsa_train.sinks import read_records
from gsa_train.spikes import replay


def main() -> None:
    parser = argparse.ArgumentParser(prog="spikes.py", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("overrides", nargs="*", metavar="monitor.field=value")
    arguments = parser.parse_args()
    monitor = load_config(arguments.run / "config.yaml", arguments.overrides).monitor
    records = [record for record in read_records(arguments.run / "metrics.jsonl") if "event" not in record]
    print(f"{'phase':<10} {'detector':<8} {'steps':>6} {'spiking':>7}  at")
    for phase, group in itertools.groupby(records, key=lambda record: record["phase"]):
        of_phase = list(group)
        trace = torch.tensor([[record["loss"], record["grad_norm"]] for record in of_phase])
        for config in (monitor, OLMO):
            rows = replay(trace, config)
            steps = [record["step"] for record, row in zip(of_phase, rows, strict=True) if row.flagged]
            shown = " ".join(map(str, steps[:12])) + (" ..." if len(steps) > 12 else "")
            print(f"{phase:<10} {config.detector:<8} {len(rows):>6} {len(steps):>7}  {shown}")


OLMO = dataclasses.replace(
    MonitorConfig(), detector="sigma", sigmas=6.0, window_steps=128, min_history_steps=64
)
"""SkipStepOptimizer of OLMo-core with its defaults."""

if __name__ == "__main__":
    main()
