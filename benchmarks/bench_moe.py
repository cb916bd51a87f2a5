"""Times training steps of a model with experts on one CUDA device, with GSA and with standard attention.

    python benchmarks/bench_moe.py [key=value ...] [--layers 18] [--experts 16] [--models standard gsa]
    python benchmarks/bench_moe.py --layers 3 --experts 128

The shapes come from configs/*_moe_15b_a2b.yaml (4096 tokens, 8 experts per token), with fewer layers and experts, so
that one device can hold the training state. The default of 18 layers and 16 experts needs an 80 GB device. With 128
experts, each layer equals a layer of the 15B model. All models have the same micro-batch of 1, 2 or 4 sequences: the
largest that the memory estimate allows for every model.

The bench also runs the models `standard` and `gsa` with `train.cuda_graphs`, as `standard_graphs` and `gsa_graphs`. It
checks that a GSA step takes at most 1.10 times as long as a standard step. For each of the two, the faster variant
counts: with or without CUDA graphs.

The learning rate is 0, so that weights and routing do not change during the run. `load_max` is the load of the expert
with the most tokens, divided by the mean load of all experts.

The models take turns in `--rounds` rounds. All models together do not fit into memory, so each turn builds and warms up
its model again. In each round, the step time of each model is divided by the step time of the standard model without
CUDA graphs. `ratio` is the median of these quotients over the rounds, with its standard error.

A second table shows the ms per step of each part, traced in the last round. `experts` is the matrix products of the
routed experts. `exchange` sorts tokens by expert and adds up the outputs. `mlp` includes the shared expert. Models with
CUDA graphs are not traced, because a trace cannot attribute the kernels of a graph to a part.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import harness
import torch

from gsa_train.config import Config, load_config
from gsa_train.distributed.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.metrics.record import expert_metrics
from gsa_train.model.flops import count_parameters
from gsa_train.model.mcore.build import Model
from gsa_train.model.probes.stats import EXPERTS
from gsa_train.optimizer.micro_batch_graph import CaptureError, leave_default_stream
from gsa_train.planning.memory.estimate import estimate_memory
from whole_steps.step_bench import OurTrainee, random_batches, release_memory, speed, time_steps
from whole_steps.step_cases import GRAPHS
from whole_steps.step_timing import count_synchronizations
from whole_steps.step_trace import OF_EXPERTS, in_columns, trace_steps

STANDARD, GSA = "standard", "gsa"
WITH_GRAPHS = "_graphs"
"""Ends the names of models with `train.cuda_graphs`."""
MODELS = (STANDARD, GSA, STANDARD + WITH_GRAPHS, GSA + WITH_GRAPHS)
MICRO_BATCHES = (1, 2, 4)
SPARE_GIB = 6.0
"""Memory that the estimate leaves out: the allocator's gaps and memory of libraries."""
LEFT_GIB = 1.0
"""Memory that a turn may leave allocated: workspaces of libraries."""
TRACED_STEPS = 2


@dataclass
class Found:
    """Holds the measurements of a model in its turns."""

    config: Config
    step_seconds: list[float] = field(default_factory=list)
    """Median of each round."""
    peak_gib: float = 0.0
    left_gib: float = 0.0
    """Memory that is still allocated after a turn, minus the memory before it."""
    load_max: float = float("nan")
    synchronizations: int = 0
    """How often a step made the host wait for the device."""
    parts: dict[str, float] = field(default_factory=dict)
    """ms per step."""
    failed: str = ""
    """Why the model takes no more turns."""
    is_fault: bool = False
    """The failure is not a lack of memory."""

    @property
    def predicted_gib(self) -> float:
        return estimate_memory(self.config, self.config.phases[-1], world_size=1, stage=0).total / 2**30


@dataclass(frozen=True)
class Turns:
    rounds: int
    warm_up_steps: int
    steps: int
    traces: bool


def load(name: str, options: Sequence[str]) -> Config:
    """
    Raises:
        ConfigError: an override does not fit.
    """
    fixed = ["parallel.expert=1", "data.num_workers=0", "data.num_lanes=1"]
    fixed += GRAPHS if name.endswith(WITH_GRAPHS) else ()
    path = harness.ROOT / "configs" / f"{name.removesuffix(WITH_GRAPHS)}_moe_15b_a2b.yaml"
    return load_config(path, [*fixed, *options], world_size=1, need_data=False)


def load_all(
    names: Sequence[str], options: Sequence[str], sequences: int, micro_batch: int | None
) -> dict[str, Found]:
    """Load the models with one micro-batch for all.

    Args:
        sequences: number of sequences per step.
        micro_batch: number of sequences per micro-batch. None: the largest of MICRO_BATCHES with which all models fit
            the device by the memory estimate, or 1 if they fit with none.
    """
    sizes = [micro_batch] if micro_batch else [size for size in MICRO_BATCHES if sequences % size == 0]
    loaded = {
        size: {name: Found(load(name, [f"train.micro_batch_size={size}", *options])) for name in names}
        for size in sizes
    }
    room = torch.cuda.mem_get_info()[0] / 2**30 - SPARE_GIB
    need = {size: max(each.predicted_gib for each in found.values()) for size, found in loaded.items()}
    chosen = max((size for size in sizes if need[size] <= room), default=sizes[0])
    predictions = ", ".join(f"{gib:.0f} GiB with {size}" for size, gib in need.items())
    print(f"micro-batch: {chosen} sequences; all models need at most {predictions}; there are {room:.0f} GiB")
    return loaded[chosen]


def take_turns(found: dict[str, Found], turns: Turns, parallel: Parallel) -> None:
    allocated = release_memory(parallel.device)
    for number in range(turns.rounds):
        is_last = number == turns.rounds - 1
        for name, each in found.items():
            if not each.failed:
                try:
                    take_turn(each, turns, is_last, parallel)
                except torch.OutOfMemoryError as error:
                    each.failed = f"out of memory: {str(error).splitlines()[0]}"
                except CaptureError as error:
                    each.failed, each.is_fault = f"no graph: {error.__cause__}".splitlines()[0], True
                # This runs after the handler, because the handler's error holds references to the tensors.
                before, allocated = allocated, release_memory(parallel.device)
                each.left_gib = max(each.left_gib, (allocated - before) / 2**30)
            shown = each.failed or f"{1e3 * each.step_seconds[-1]:.1f} ms"
            print(f"round {number + 1}, {name}: {shown}", flush=True)


def take_turn(found: Found, turns: Turns, is_last: bool, parallel: Parallel) -> None:
    config = found.config
    batches = random_batches(config, parallel)
    torch.cuda.reset_peak_memory_stats(parallel.device)
    trainee = OurTrainee(config, config.phases[-1], parallel, lr=0.0)
    try:
        for _ in range(turns.warm_up_steps + trainee.warm_up_steps):
            trainee.step(batches)
        seconds = time_steps(lambda: trainee.step(batches), turns.steps, parallel.device)
        found.step_seconds.append(statistics.median(seconds))
        with_graph = torch.cuda.memory_allocated(parallel.device) + trainee.graph_bytes
        peak = max(torch.cuda.max_memory_allocated(parallel.device), with_graph)
        found.peak_gib = max(found.peak_gib, peak / 2**30)
        if is_last:
            found.synchronizations = count_synchronizations(trainee, batches)
            trainee.step(batches, measures=True)
            found.load_max = largest_load(trainee.model)
            if turns.traces and trainee.graph is None:
                traced = trace_steps(lambda: trainee.step(batches), TRACED_STEPS)
                found.parts = in_columns(traced, TRACED_STEPS, OF_EXPERTS)
    finally:
        trainee.close()


def largest_load(model: Model) -> float:
    """Return the largest load of any expert in the last step, divided by the mean."""
    stats = model.runtime.stats
    layers = stats.read()
    stats.reset()
    shares = [values for label, values in layers.items() if label.startswith(f"{EXPERTS}/")]
    return float(expert_metrics(shares)["expert_load_max"])


def add_to(report: harness.Report, found: dict[str, Found]) -> None:
    reference = found[STANDARD]
    for name, each in found.items():
        report.row(model=name, **cells_of(each, reference), failed=each.failed)
        if each.left_gib > LEFT_GIB:
            report.fail(f"{name}: after a turn {each.left_gib:.1f} GiB stay allocated, which others lack")
        if each.is_fault:
            report.fail(f"{name}: {each.failed}")
    for part in dict.fromkeys(part for each in found.values() for part in each.parts):
        times = {name: each.parts.get(part) for name, each in found.items()}
        report.row(ms_per_step=part.removesuffix("_ms"), **times)
    if any(name.startswith(GSA) for name in found):
        mine, others = faster_way(found, GSA), faster_way(found, STANDARD)
        ratio, _ = ratio_of(found[mine], found[others])
        report.bar(f"step of {mine} over {others}", ratio, at_most=1.10)


def faster_way(found: dict[str, Found], kind: str) -> str:
    """Return the name of the faster variant of a kind (GSA or standard): with or without CUDA graphs."""
    ways = [name for name in (kind, kind + WITH_GRAPHS) if name in found]
    return min(
        ways,
        key=lambda name: (
            bool(found[name].failed),
            statistics.median(found[name].step_seconds or [float("inf")]),
        ),
    )


def ratio_of(one: Found, reference: Found) -> tuple[float, float]:
    """Return the median ratio of the step times in neighbouring turns, and its standard error."""
    if one.failed or reference.failed:
        return float("nan"), float("nan")
    pairs = zip(one.step_seconds, reference.step_seconds, strict=True)
    return harness.median_and_error([mine / other for mine, other in pairs])


def cells_of(found: Found, reference: Found) -> dict[str, harness.Cell]:
    config, phase = found.config, found.config.phases[-1]
    count = count_parameters(config.model, config.gsa, config.moe)
    seconds = statistics.median(found.step_seconds or [float("nan")])
    per_second, mfu = speed(config, phase, seconds, torch.device("cuda"))
    ratio, error = ratio_of(found, reference)
    return {
        "layers": config.model.num_layers,
        "experts": config.moe.experts,
        "micro_batch": config.train.micro_batch_size,
        "total": count.total,
        "active": count.active,
        "step_ms": 1e3 * seconds,
        "ratio": ratio,
        "ratio_error": error,
        "tokens_per_second": per_second,
        "mfu": mfu,
        "peak_gib": found.peak_gib,
        "predicted_gib": found.predicted_gib,
        "synchronizations": found.synchronizations,
        "load_max": found.load_max,
    }


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8, help="per optimizer step")
    parser.add_argument("--micro-batch", type=int, help="sequences; default: the most of 1, 2 and 4 that fit")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up-steps", type=int, default=3, help="of each turn")
    parser.add_argument("--steps", type=int, default=5, help="of each turn")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    harness.require_cuda()
    options = [f"model.num_layers={arguments.layers}", f"moe.experts={arguments.experts}"]
    options += [f"train.global_batch_size={arguments.sequences}", *arguments.overrides]
    names = list(dict.fromkeys([STANDARD, *arguments.models]))  # the baseline comes first
    found = load_all(names, options, arguments.sequences, arguments.micro_batch)
    report = harness.Report("bench_moe", arguments)
    parallel = init_parallel(found[STANDARD].config.parallel, seed=1)
    leave_default_stream(parallel.device)  # for CUDA graphs; the same for all models
    turns = Turns(arguments.rounds, arguments.warm_up_steps, arguments.steps, not arguments.no_profile)
    take_turns(found, turns, parallel)
    add_to(report, found)
    shutdown_parallel()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
