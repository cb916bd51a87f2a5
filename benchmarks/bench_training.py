"""Measures training steps of whole models on all GPUs of a node: speed, MFU and memory, with megatron-core as baseline.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_training.py \\
        --config configs/gsa_1.7b.yaml configs/standard_1.7b.yaml --megatron configs/standard_1.7b.yaml \\
        --layouts "tp=1;tp=2,sp;tp=1,recompute=full" --json runs/bench.json [key=value ...]

Each config runs its last phase on random tokens with initial weights, one document per sequence and no data pipeline.
All layouts have the same number of sequences per device. The short name of a layout gives its parallel sizes
(whole_steps/layout_names.py). The data-parallel size follows from the number of ranks. The bench also runs on CPUs, but
there it reports neither memory nor MFU.

With --breakdown, the bench traces two more steps of each model, which take longer than the measured steps. The bench
prints the mean milliseconds per step of each model part on rank 0's device. The parts plus `exposed` and `idle`
add up to the traced step's time (gsa_train/profiling/step_breakdown.py):
- `exposed`: only NCCL kernels ran, including their waits for other ranks. `exposed_max` is the maximum over ranks.
- `idle`: no kernel ran.
- `overlapped`: communication ran together with other kernels. The parts include this time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "data")]

from gsa_train.cli import announced_world_size, refuse
from gsa_train.config import ConfigError
from gsa_train.distributed.cuda_connections import VARIABLE, compute_capability, prepare_connections
from whole_steps.layout_names import layout_list
from whole_steps.results import Result
from whole_steps.variants import Sizes, variants

TRACED_STEPS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_training.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, nargs="+", default=[], metavar="FILE", help="our models")
    parser.add_argument(
        "--megatron", type=Path, metavar="FILE", help="megatron-core's model with these sizes"
    )
    parser.add_argument("--layouts", default="tp=1", help='"tp=1;tp=2,sp"; see layout_names.py')
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--layers", type=int, help="instead of the configs'")
    parser.add_argument("--seq-len", type=int, help="tokens, instead of the configs'")
    parser.add_argument("--sequences-per-device", type=int, default=8, help="per optimizer step")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "bench_training.json", metavar="OUT")
    parser.add_argument("--breakdown", action="store_true", help="what a step's time goes to; needs GPUs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all configs")
    arguments = parser.parse_intermixed_args()
    if not arguments.config and arguments.megatron is None:
        parser.error("name --config, --megatron or both")
    if min(arguments.steps, arguments.sequences_per_device) < 1:
        parser.error("--steps and --sequences-per-device must be 1 or more")
    return arguments


def cells_of(result: Result) -> dict[str, Any]:
    """Format a line of the printed table. The file lists the ranks separately."""
    peak, reserved, predicted = result.peak_gib, result.peak_reserved_gib, result.predicted_gib
    return {
        "model": result.model,
        "layout": result.layout,
        "dp": result.data_parallel,
        "step_ms": result.step_ms,
        "low": result.step_ms_low,
        "high": result.step_ms_high,
        "tok/s/gpu": result.tokens_per_second_per_device,
        "mfu": result.mfu,
        "peak_gib": max(peak, default=None),
        "reserved": max(reserved, default=None),
        "predicted": max(predicted, default=None),
        "error_%": 100 * result.prediction_error,
        "loss": result.loss,
    }


def measure(arguments: argparse.Namespace) -> int:
    is_main = os.environ.get("RANK", "0") == "0"
    sizes = Sizes(arguments.sequences_per_device, arguments.seq_len, arguments.layers, arguments.overrides)
    layouts = layout_list(arguments.layouts)
    try:
        world_size = announced_world_size()
        plan = variants(arguments.config, arguments.megatron, layouts, sizes, world_size)
    except (ConfigError, ValueError) as error:
        return refuse(error)
    chosen = VARIABLE in os.environ
    prepare_connections([variant.config.parallel for variant in plan], os.environ, compute_capability())
    # An import may ask CUDA for devices, and CUDA then reads VARIABLE, which the line above may set.
    import harness  # benchmarks/harness.py
    import torch

    from gsa_train.distributed.parallel import shutdown_parallel
    from whole_steps.training import run_variants

    if arguments.breakdown and not torch.cuda.is_available():
        return refuse(
            "--breakdown needs CUDA devices: on CPUs there is no device whose time could be looked at"
        )
    if is_main and not chosen and VARIABLE in os.environ and any(v.config.parallel.tensor == 1 for v in plan):
        print(f"{VARIABLE}=1 for all layouts, also those without tensor parallelism, which train without it:")
        print("to see their own speed, measure them in a run without tp")
    about = harness.environment() | {
        "megatron": version("megatron-core"),
        "devices": str(world_size),
        VARIABLE: os.environ.get(VARIABLE, "not set"),
    }
    if is_main:
        print(harness.describe(about), flush=True)
    content: dict[str, Any] = {"command": " ".join(sys.argv), "environment": about, "rows": []}
    results: list[Result] = []
    traced_steps = TRACED_STEPS if arguments.breakdown else 0
    for result in run_variants(plan, arguments.steps, arguments.warmup_steps, 1, traced_steps):
        results.append(result)
        row = {**asdict(result), "prediction_error": result.prediction_error}
        content["rows"].append({name: harness.plain(cell) for name, cell in row.items()})
        if is_main:
            write(content, arguments.json)
            print_rows([cells_of(result)], [result.failed], with_header=len(results) == 1)
    shutdown_parallel()
    if is_main:
        if arguments.breakdown:
            print_breakdowns(results)
        print(arguments.json)
    return 0


def write(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def print_rows(rows: list[dict[str, Any]], remarks: list[str], with_header: bool) -> None:
    import harness  # loads torch

    columns = {
        "model": "<20",
        "layout": "<28",
        **{name: f">{max(9, len(name))}" for name in list(rows[0])[2:]},
    }
    if with_header:
        print(harness.table_line(columns, {name: name for name in columns}))
    for cells, remark in zip(rows, remarks, strict=True):
        shown = {name: harness.plain(cell) for name, cell in cells.items()}
        print(harness.table_line(columns, shown), remark, flush=True)


def print_breakdowns(results: list[Result]) -> None:
    rows = []
    for result in results:
        if result.breakdown:
            named = {
                name.removesuffix("_ms").removesuffix("_communication"): ms
                for name, ms in result.breakdown.items()
            }
            largest = {"exposed_max": max(result.exposed_communication_ms)}
            rows.append({"model": result.model, "layout": result.layout, **named, **largest})
    if rows:
        print("\nms of a traced step on rank 0's device:")
        print_rows(rows, [""] * len(rows), with_header=True)


def main() -> int:
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with contextlib.nullcontext() if is_main else contextlib.redirect_stderr(io.StringIO()):
        arguments = parse_arguments()
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
