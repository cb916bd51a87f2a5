"""Checks whether the readers keep up, in a short run: python benchmarks/data_wait.py --config FILE [key=value ...]

The script starts launch/pretrain.py on --gpus ranks in a temporary folder. Each phase except the last has one warm-up
step. The run ends after --steps further steps, without a checkpoint. The script prints the share of the time that steps
waited for text (`data_wait`), and the CPU cores that the reader processes used meanwhile. This example runs on one GPU
and streams the bundled text:

    python benchmarks/data_wait.py --config configs/gsa_1.7b.yaml --steps 40 --sample model.num_layers=8 \\
        train.global_batch_size=32
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.config import Config, ConfigError, load_config
from gsa_train.metrics.record_format import read_records

SAMPLE = ("train_dir=train", "validation_dir=validation", "tokenizer=tokenizer.model")
SETTLE_STEPS = 8
"""Steps left out, because kernels compile and readers start with full queues."""


@dataclass(frozen=True)
class CpuTimes:
    """Holds the seconds of CPU time until now."""

    at: float
    """Wall-clock time."""
    ranks: float
    readers: float


def cpu_times(launcher: psutil.Process, world_size: int) -> CpuTimes:
    """Measure the ranks and the processes that they started."""
    ranks = [launcher] if world_size == 1 else launcher.children()
    readers = [child for rank in ranks for child in rank.children(recursive=True)]
    return CpuTimes(time.monotonic(), sum(map(_cpu_seconds, ranks)), sum(map(_cpu_seconds, readers)))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def summary(records: list[dict[str, Any]], before: CpuTimes, after: CpuTimes, config: Config) -> str:
    """Summarise the logged steps between the two times."""
    waits = [record["data_wait"] for record in records]
    seconds = after.at - before.at
    readers = (after.readers - before.readers) / seconds
    speed = median(record["tokens_per_second"] for record in records)
    where = f"readers ({config.data.num_workers} per data-parallel rank) kept {readers:.2f} CPU cores busy"
    if config.data.num_workers == 0:
        where = "data.num_workers = 0: the ranks read themselves"
    return (
        f"steps {records[0]['step']}-{records[-1]['step']}: {speed:,.0f} tokens/s, "
        f"{median(record['step_seconds'] for record in records):.3f} s a step\n"
        f"waiting for text: {100 * median(waits):.2f}% of the time (median of {len(waits)} logged steps), "
        f"at most {100 * max(waits):.2f}%\n"
        f"{where}; the ranks themselves {(after.ranks - before.ranks) / seconds:.2f} cores"
    )


def command_of(arguments: argparse.Namespace, config: Config, folder: Path) -> list[str]:
    last = len(config.phases) - 1
    overrides = [
        *arguments.overrides,
        f"run.dir={folder}",
        "run.name=data_wait",
        "logging.every_steps=4",
        "logging.tensorboard=off",
        "logging.wandb=disabled",
        "logging.plots=off",
        "evaluate.every_steps=0",
        "checkpoint.every_steps=1000000",
        f"phases.{last}.steps=1000000",
        *(f"phases.{index}.steps=1" for index in range(last)),
        *(f"phases.{index}.warmup_steps=0" for index in range(last)),
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.gpus}"]
    return [
        sys.executable,
        *(torchrun if arguments.gpus > 1 else []),
        str(ROOT / "launch" / "pretrain.py"),
        "--config",
        str(arguments.config),
        *overrides,
    ]


def watch(
    launcher: psutil.Popen, metrics: Path, steps: int, world_size: int
) -> tuple[list[dict[str, Any]], CpuTimes, CpuTimes]:
    """Return records of `steps` steps after the first SETTLE_STEPS, and CPU times before and after them.

    Raises:
        RuntimeError: the run ended earlier.
    """
    before: CpuTimes | None = None
    first = 0
    while launcher.poll() is None:
        time.sleep(0.2)
        records = [each for each in read_records(metrics) if "event" not in each] if metrics.exists() else []
        step = records[-1]["step"] if records else 0
        if before is None and step >= SETTLE_STEPS:
            before, first = cpu_times(launcher, world_size), step
        elif before is not None and step >= first + steps:
            return [each for each in records if each["step"] > first], before, cpu_times(launcher, world_size)
    raise RuntimeError(f"the run ended with exit code {launcher.returncode}")


def end(launcher: psutil.Popen) -> None:
    """End the run at once; there is nothing to save."""
    for process in [*launcher.children(recursive=True), launcher]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="data_wait.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=40, help="that are measured")
    parser.add_argument("--gpus", type=int, default=1, help="ranks")
    parser.add_argument("--sample", action="store_true", help="the bundled text instead of the config's")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    if arguments.sample:
        sample = [f"data.{field.replace('=', f'={ROOT}/data/sample/')}" for field in SAMPLE]
        arguments.overrides = [*sample, *arguments.overrides]
    try:
        config = load_config(arguments.config, arguments.overrides, world_size=arguments.gpus)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="data_wait_") as folder:
        command = command_of(arguments, config, Path(folder))
        launcher = psutil.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        try:
            found = watch(
                launcher, Path(folder) / "data_wait" / "metrics.jsonl", arguments.steps, arguments.gpus
            )
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            end(launcher)
    print(summary(*found, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
