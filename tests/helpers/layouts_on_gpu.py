"""Compares every layout that fits the machine with one rank, in bf16. `make layouts-gpu` runs the script.

    torchrun --standalone --nproc_per_node=N tests/helpers/layouts_on_gpu.py [--experts] [--json OUT] \\
        [--only "tp 2, sp" ...]

In bf16, a sum in another order gives another result. Five runs on one rank therefore measure how much training changes
if only rounding changes:

* the reference
* micro-batches in opposite order
* two sequences at a time
* two runs that compute every matrix product in two or four parts, and round each part to bf16 before the sum, as tensor
  parallelism does

For each layout the script computes how far the loss, KL and gradient norm of each step deviate from the reference. A
layout passes if no deviation exceeds FACTOR times the largest deviation of the other one-rank runs (see `allowed`).

First, the ranks divide the one-rank runs among themselves. Then all ranks join one process group and train one layout
after another. If a layout needs fewer ranks, the remaining ranks add data parallelism. `make layouts-gpu` sets
CUDA_DEVICE_MAX_CONNECTIONS to the value for tensor parallelism (gsa_train/distributed/cuda_connections.py).
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from gsa_train.config import Config, ParallelConfig, PhaseConfig
from gsa_train.config.checks import check_config, check_packages
from gsa_train.distributed.parallel import Parallel, init_parallel, leave_layout, shutdown_parallel
from gsa_train.model.mcore.build import Model
from helpers.layout_cases import INSTANCES, INTERLEAVED, OVERLAP, ZERO_1, ZERO_2, ZERO_3
from helpers.many_layouts import train_case
from helpers.single_rank import CONFIG, with_sections
from whole_steps.step_bench import release_memory

LR = 1e-4
"""With 1e-3, bf16 rounding differences grow so fast that one rank's own runs differ too much for a test."""
FACTOR = 3.0
"""Allowed ratio of a layout's largest deviation to the largest deviation of one-rank runs."""
FLOOR = 1e-6
"""Relative error of fp32 sums over ranks, which is allowed even if one rank's runs agree by chance."""
SETTLED_STEPS = 3
METRICS = ("loss", "indexer_kl", "grad_norm")
REPLICATED = {"distributed_optimizer": False}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
NO_SP = {"sequence": False}
OFFLOAD = {"offload_optimizer": True}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, {}),
    "dp, replicated optimizer": (REPLICATED, {}),
    "dp, overlapped": (OVERLAP, {}),
    "dp, recompute full": ({}, FULL),
    "dp, recompute selective": ({}, SELECTIVE),
    "tp 2": ({"tensor": 2, **NO_SP}, {}),
    "tp 2, sp": ({"tensor": 2}, {}),
    "tp 2, sp, replicated optimizer": ({"tensor": 2, **REPLICATED}, {}),
    "tp 2, sp, recompute full": ({"tensor": 2}, FULL),
    "tp 4": ({"tensor": 4, **NO_SP}, {}),
    "tp 4, sp": ({"tensor": 4}, {}),
    "pp 2": ({"pipeline": 2}, {}),
    "pp 2, recompute full": ({"pipeline": 2}, FULL),
    "pp 2, interleaved": (INTERLEAVED, {}),
    "pp 4": ({"pipeline": 4}, {}),
    "pp 4, interleaved": ({"pipeline": 4, "virtual_pipeline": 2}, {}),
    "cp 2": ({"context": 2}, {}),
    "cp 2, recompute full": ({"context": 2}, FULL),
    "cp 2, replicated optimizer": ({"context": 2, **REPLICATED}, {}),
    "cp 4": ({"context": 4}, {}),
    "tp 2, sp, pp 2": ({"tensor": 2, "pipeline": 2}, {}),
    "tp 2, sp, pp 2, interleaved": ({"tensor": 2, **INTERLEAVED}, {}),
    "tp 2, sp, cp 2": ({"tensor": 2, "context": 2}, {}),
    "cp 2, pp 2": ({"context": 2, "pipeline": 2}, {}),
    "tp 2, sp, cp 2, pp 2": ({"tensor": 2, "context": 2, "pipeline": 2}, {}),
    "dp, two optimizer instances": (INSTANCES, {}),
    "dp, two optimizer instances, overlapped": ({**INSTANCES, **OVERLAP}, {}),
    "dp, deepspeed 1": (ZERO_1, {}),
    "dp, deepspeed 2": (ZERO_2, {}),
    "dp, deepspeed 2 in host memory": ({**ZERO_2, **OFFLOAD}, {}),
    "dp, deepspeed 3": (ZERO_3, {}),
    "dp, deepspeed 3 in host memory": ({**ZERO_3, **OFFLOAD}, {}),
    "tp 2, sp, deepspeed 1, recompute full": ({"tensor": 2, **ZERO_1}, FULL),
    "tp 2, sp, deepspeed 3, recompute selective": ({"tensor": 2, **ZERO_3}, SELECTIVE),
}
"""Maps a name to fields of `parallel` and of `train`. Layouts of DeepSpeed are left out if it is not installed."""

EXPERT_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, {}),
    "ep 2": ({"expert": 2}, {}),
    "ep 2, overlapped": ({"expert": 2, **OVERLAP}, {}),
    "ep 2, replicated optimizer": ({"expert": 2, **REPLICATED}, {}),
    "ep 2, recompute full": ({"expert": 2}, FULL),
    "ep 4": ({"expert": 4}, {}),
    "tp 2, sp, whole experts": ({"tensor": 2}, {}),
    "tp 2, sp, ep 2": ({"tensor": 2, "expert": 2}, {}),
    "tp 2, sp, etp 2": ({"tensor": 2, "expert_tensor": 2}, {}),
    "tp 2, sp, ep 2, etp 2": ({"tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
    "tp 2, sp, ep 4": ({"tensor": 2, "expert": 4}, {}),
    "cp 2, ep 2": ({"context": 2, "expert": 2}, {}),
    "pp 2": ({"pipeline": 2}, {}),
    "pp 2, ep 2": ({"pipeline": 2, "expert": 2}, {}),
    "pp 2, interleaved, ep 2": ({**INTERLEAVED, "expert": 2}, {}),
}
"""Layouts for `--experts`, in the same form. Two ranks run all layouts that do not need four ranks."""

Series = list[dict[str, Any]]


BASELINE = "one rank"
ONE_RANK = {
    BASELINE: (False, 1, 1),
    "micro-batches backwards": (True, 1, 1),
    "two sequences at a time": (False, 2, 1),
    "products in 2 parts": (False, 1, 2),
    "products in 4 parts": (False, 1, 4),
}
"""Runs on one rank. Columns: whether micro-batches run in opposite order, sequences per micro-batch, parts of each
matrix product. Layouts are compared with BASELINE. Several parts need separate gradients, and therefore exclude fused
operations."""


def config_of(parallel: dict[str, Any], train: dict[str, Any], experts: bool) -> Config:
    """Return a config with 8 layers (enough for four pipeline stages of two chunks), width 256, 512 tokens and small
    budgets. With `experts`, feed-forward layers are mixtures of experts, and a change in rounding sends some tokens to
    other experts, even on one rank."""
    model = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "init_std": 0.02}
    sizes = {"hidden_size": 256, "head_dim": 32, "ffn_hidden_size": 704, "vocab_size": 4096}
    gsa = {"indexer_heads": 4, "indexer_dim": 64, "k_base": 128, "k_min": 64, "k_max": 256}
    lengths = {"seq_len_tokens": 512, "global_batch_size": 8, "micro_batch_size": 1}
    phases = [
        PhaseConfig(name="warm-up", attention="dense", train="indexer"),
        PhaseConfig(name="sparse", attention="sparse", train="all"),
    ]
    sections = {
        "model": {**model, **sizes},
        "gsa": gsa,
        "parallel": parallel,
        "train": {**lengths, "grad_clip": 1.0, "precision": "bf16", **train},
        "logging": {"wandb": "disabled"},  # nothing is logged, so W&B need not be installed
    }
    if experts:
        widths = {"expert_ffn_hidden_size": 176, "shared_expert_ffn_hidden_size": 176}
        sections["moe"] = {"experts": 8, "top_k": 2, **widths}
    return with_sections(CONFIG, sections, phases)


def in_parts(model: Model, parts: int) -> None:
    """Compute matrix products on one rank with the rounding of tensor parallelism over `parts` ranks. The outputs of
    row-parallel layers, and the input gradients of column-parallel layers, become sums of `parts` products, each
    rounded before the sum."""
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, RowParallelLinear | ColumnParallelLinear):
                axis = 1 if isinstance(module, RowParallelLinear) else 0
                module._forward_impl = partial(_product_in_parts, module._forward_impl, parts, axis)


def _product_in_parts(
    product: Callable[..., torch.Tensor], parts: int, axis: int, *, input: Any, weight: Any, **rest: Any
) -> torch.Tensor:
    weights = weight.chunk(parts, axis)
    if axis == 0:
        return torch.cat([product(input=input, weight=each, **rest) for each in weights], -1)
    products = [
        product(input=part, weight=each, **rest)
        for part, each in zip(input.chunk(parts, -1), weights, strict=True)
    ]
    return sum(products[1:], products[0])


@contextmanager
def alone() -> Iterator[Parallel]:
    world = ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    with patch.dict(os.environ):
        for name in world:
            os.environ.pop(name, None)
        yield init_parallel(ParallelConfig(), seed=1)
        shutdown_parallel()


def numbers(records: Series) -> Series:
    """Return the compared numbers of the training steps; None if a phase has no such number."""
    return [
        {name: fmean(value) if isinstance(value := record.get(name), list) else value for name in METRICS}
        for record in records[:-1]
    ]


def deviations(series: Series, expected: Series, metric: str) -> list[float]:
    pairs = [(mine[metric], other[metric]) for mine, other in zip(series, expected, strict=True)]
    return [abs(mine - other) / abs(other) if other else 0.0 for mine, other in pairs]


def allowed(spread: Sequence[Sequence[float]], steps: int) -> list[float]:
    """Return each step's allowed deviation from the reference run: FACTOR times the largest deviation of the other
    one-rank runs, and at least FLOOR. The largest deviation is taken over three groups of steps: this step, the earlier
    steps of its phase, and the first SETTLED_STEPS steps of every phase. The third group is included because rounding
    has similar effects at the start of all phases. `steps` is the length of a phase."""
    furthest = [max(each) for each in zip(*spread, strict=True)]
    starts = range(0, len(furthest), steps)
    rounding = max(max(furthest[start : start + min(SETTLED_STEPS, steps)]) for start in starts)
    so_far = [max(furthest[step - step % steps : step + 1]) for step in range(len(furthest))]
    return [max(FACTOR * max(each, rounding), FLOOR) for each in so_far]


def judge(found: Series, one_rank: dict[str, Series], steps: int) -> dict[str, Any]:
    """Return the largest deviation per phase and metric, and its largest share of the allowed deviation."""
    expected, row = one_rank[BASELINE], {}
    for metric in METRICS:
        spread = [
            deviations(series, expected, metric) for name, series in one_rank.items() if name != BASELINE
        ]
        bounds, off = allowed(spread, steps), deviations(found, expected, metric)
        for phase, start in enumerate(range(0, len(off), steps)):
            part = slice(start, start + steps)
            shares = [deviation / bound for deviation, bound in zip(off[part], bounds[part], strict=True)]
            row[f"{metric} {phase + 1}"] = {"deviation": largest(off[part]), "of_allowed": largest(shares)}
    return {**row, "passed": all(cell["of_allowed"] <= 1 for cell in row.values())}


def largest(values: Sequence[float]) -> float:
    """Return the largest value, or infinity if one is NaN, which max() would ignore."""
    return math.inf if any(math.isnan(value) for value in values) else max(values)


def layouts_that_fit(world_size: int, experts: bool) -> dict[str, Config]:
    """Return the layouts whose sizes divide the world and whose libraries are installed.

    Raises:
        ValueError: none fits; the message gives the reason for each.
    """
    layouts = EXPERT_LAYOUTS if experts else LAYOUTS
    configs = {name: config_of(parallel, train, experts) for name, (parallel, train) in layouts.items()}
    problems = {
        name: check_config(config, world_size) + check_packages(config) for name, config in configs.items()
    }
    fitting = {name: config for name, config in configs.items() if not problems[name]}
    if not fitting:
        reasons = [f"  {name}: {' | '.join(lines)}" for name, lines in problems.items()]
        raise ValueError("\n".join([f"on {world_size} ranks no layout fits:", *reasons]))
    return fitting


def run_one_rank(rank: int, world_size: int, steps: int, experts: bool) -> dict[str, Series]:
    done = {}
    for name in list(ONE_RANK)[rank::world_size]:
        backwards, sequences, parts = ONE_RANK[name]
        train = {"micro_batch_size": sequences, **({"fused_ops": "none"} if parts > 1 else {})}
        config = config_of({}, train, experts)
        prepare = partial(in_parts, parts=parts) if parts > 1 else None
        with alone() as parallel:
            done[name] = numbers(
                train_case(config, parallel, (steps, steps), prepare, backwards, LR, measures=True)
            )
            release_memory(parallel.device)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="of each phase")
    parser.add_argument("--experts", action="store_true", help="a model with experts, and their layouts")
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    steps = arguments.steps
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        configs = layouts_that_fit(world_size, arguments.experts)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(arguments.only) - set(configs):
        parser.error(f"--only {sorted(unknown)}: on {world_size} ranks there are {', '.join(configs)}")

    mine = run_one_rank(rank, world_size, steps, arguments.experts)
    one_rank: dict[str, Series] = {}
    rows = {}
    for name, config in configs.items():
        if arguments.only and name not in arguments.only:
            continue
        began = time.monotonic()
        parallel = init_parallel(config.parallel, seed=1)
        if not one_rank:
            shared: list[Any] = [None] * world_size
            dist.all_gather_object(shared, mine)
            one_rank = {each: run for part in shared for each, run in part.items()}
            if parallel.is_main:
                print("Largest relative deviation from one rank (share of the allowed one), by phase:")
                print(f"{'':<42}" + "".join(f"{metric:>21}" * 2 for metric in METRICS))
        found = numbers(train_case(config, parallel, (steps, steps), lr=LR, measures=True))
        rows[name] = {**judge(found, one_rank, steps), "seconds": time.monotonic() - began, "series": found}
        if parallel.is_main:
            print(line(name, rows[name]), flush=True)
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                content = {"world_size": world_size, "layouts": rows, "one_rank": one_rank}
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")
        release_memory(parallel.device)
        leave_layout()
    dist.barrier()
    dist.destroy_process_group()
    failed = [name for name, row in rows.items() if not row["passed"]]
    if rank == 0:
        print(
            f"{len(rows) - len(failed)} of {len(rows)} layouts within {FACTOR:g} times the spread of one rank"
        )
    return 1 if failed else 0


def line(name: str, row: dict[str, Any]) -> str:
    cells = [cell for cell in row.values() if isinstance(cell, dict)]
    shown = "".join(f"{cell['deviation']:>14.1e} ({cell['of_allowed']:4.2f})" for cell in cells)
    return f"{name:<42}{shown} {row['seconds']:6.1f} s {'ok' if row['passed'] else 'FAILED'}"


if __name__ == "__main__":
    sys.exit(main())
