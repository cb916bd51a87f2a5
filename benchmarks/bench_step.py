"""A training step of whole models on one CUDA device, through the framework: time, MFU, memory, and where it goes.

    python benchmarks/bench_step.py [key=value ...] [--configs standard_1.7b gsa_1.7b] [--micro-batch 1 4]

Each config's last phase on random tokens, weights as initialised, one document per sequence, no data pipeline.
`key=value` overrides fields of all configs (`model.num_layers=4` for a quick look), `--configs NAME,key=value` of one:
the third of the defaults learns its indexer from a quarter of the queries. Step times are medians over unlogged steps.
Each config takes them in turn with the first one, step by step, for the clock of a device follows its temperature by
some percent; `ratio` is the median of what neighbours in time give, with its standard error. Another device of the same
kind may give another: 1.145 and 1.151 with the same kernels. The table by part is one profiled step, in ms per
sequence: what the kernels of a part took, and `idle`, the step's time without any kernel.
"""

import dataclasses
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import harness
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gsa_train.batches import MicroBatch
from gsa_train.config import Config, load_config
from gsa_train.model.flops import flops_per_token, peak_flops_per_second
from gsa_train.parallel import init_parallel, shutdown_parallel
from whole_steps.step_bench import OurTrainee, random_batches, release_memory

REPOSITORY = Path(__file__).resolve().parents[1]

DEFAULTS = ("standard_1.7b", "gsa_1.7b", "gsa_1.7b,gsa.indexer_loss_row_fraction=0.25")

PARTS = (
    ("selection", r"^_?(scores_kernel|select|best_groups)"),
    (
        "indexer KL",
        r"^_?(stacked_)?(probs_kernel|stats_kernel|grad_kernel|reduce_kernel|totals_kernel)",
    ),
    ("attention", r"^_?(forward_kernel|queries_(with_target_)?kernel|keys_kernel|rows_kernel)"),
    ("attention", r"^_?(sum_parts|transpose_kernel)"),
    ("attention", r"flash|fmha|sdpa|cudnn_generated"),
    ("cross-entropy", r"cross_entropy|softmax|vocabulary"),
    ("optimizer", r"multi_tensor|adam|lpnorm|foreach"),
    ("matmuls", r"gemm|nvjet|cutlass|splitK|cublas"),
    ("norm", r"norm|GammaBeta"),
    ("split, rope, gates", r"^_?heads_(backward_)?kernel"),
    ("swiglu", r"swiglu|silu"),
    ("communication", r"nccl"),
    (
        "embedding",
        r"embedding|index|radix_?sort|sum_and_scatter|compute_grad_weight|gather_kernel|unique|scan",
    ),
    ("copies, fills", r"memcpy|memset|copy|fill|cat"),
    ("elementwise, sums", r"elementwise|reduce|_total_kernel|column_sums|add_parts"),
)
"""Part -> pattern of kernel names, the first that is found."""


@dataclass
class Row:
    """One model at one micro-batch size."""

    config: str
    micro_batch: int
    sequences: int
    step_ms: float
    ratio: float
    """To the first config's steps, taken in turn with these."""
    ratio_error: float
    """Standard error of that."""
    tokens_per_second: float
    mfu: float
    """Matrix products of the model's phase, sparse attention counted as sparse, over the device's peak."""
    peak_gib: float
    synchronizations: int
    """Times that a step made the host wait for the device."""
    launches: int
    """Kernels, copies and fills of a step."""
    parts: dict[str, float] = field(default_factory=dict)
    """ms per sequence."""
    top: list[tuple[str, int, float]] = field(default_factory=list)
    """Kernels that took longest: name, launches and ms per sequence."""


@dataclass
class Subject:
    """A model on the device."""

    name: str
    bench: OurTrainee
    others_bytes: int
    """What was on the device before."""
    batches: list[MicroBatch] = field(default_factory=list)

    def set_micro_batch(self, size: int) -> None:
        train = dataclasses.replace(self.bench.config.train, micro_batch_size=size)
        self.bench.config = dataclasses.replace(self.bench.config, train=train)
        self.batches = random_batches(self.bench.config, self.bench.parallel)

    def step_seconds(self) -> float:
        began = time.perf_counter()
        self.bench.step(self.batches)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def peak_bytes(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        self.step_seconds()
        return torch.cuda.max_memory_allocated() - self.others_bytes


def measure(
    subject: Subject, reference: Subject | None, warm_up_seconds: float, steps: int, with_profile: bool
) -> Row:
    """Times in turn with those of `reference`, or alone."""
    taking_turns = [subject] if reference is None else [reference, subject]
    began = time.perf_counter()
    while time.perf_counter() - began < warm_up_seconds:
        for one in taking_turns:
            one.step_seconds()
    rounds = [[one.step_seconds() for one in taking_turns] for _ in range(steps)]
    seconds = statistics.median(times[-1] for times in rounds)
    ratio, ratio_error = harness.median_and_error([times[-1] / times[0] for times in rounds])
    bench = subject.bench
    config = bench.config
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    flops = flops_per_token(config.model, config.gsa, bench.phase, config.train.seq_len_tokens)
    peak = peak_flops_per_second(torch.cuda.get_device_name(), "bf16")
    row = Row(
        config=subject.name,
        micro_batch=config.train.micro_batch_size,
        sequences=config.train.global_batch_size,
        step_ms=1e3 * seconds,
        ratio=ratio,
        ratio_error=ratio_error,
        tokens_per_second=tokens / seconds,
        mfu=float("nan") if peak is None else tokens / seconds * flops.total / peak,
        peak_gib=subject.peak_bytes() / 2**30,
        synchronizations=count_synchronizations(bench, subject.batches),
        launches=0,
    )
    if with_profile:
        add_parts(row, bench, subject.batches)
    return row


def count_synchronizations(bench: OurTrainee, batches: list[MicroBatch]) -> int:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        bench.step(batches)
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    )
    for place, count in places.most_common(8):
        print(f"  host waits for the device {count} times at {place}")
    return sum(places.values())


def add_parts(row: Row, bench: OurTrainee, batches: list[MicroBatch]) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.step(batches)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    per_sequence = 1 / (1e3 * row.sequences)  # from us per step
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for kernel in kernels:
        duration = kernel.time_range.elapsed_us() * per_sequence
        parts[part_of(kernel.name)] += duration
        names[kernel.name] += duration
        launches[kernel.name] += 1
    row.launches = len(kernels)
    row.parts = dict(parts.most_common())
    row.parts["idle"] = row.step_ms / row.sequences - busy_us(kernels) * per_sequence
    row.top = [(name, launches[name], took) for name, took in names.most_common(40)]


def part_of(kernel: str) -> str:
    for part, pattern in PARTS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return "other"


def busy_us(kernels: list) -> float:
    """Time in which at least one kernel runs."""
    busy = end = 0.0
    for start, stop in sorted((k.time_range.start, k.time_range.end) for k in kernels):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def load(name: str, sequences: int, overrides: list[str]) -> Config:
    name, *own = name.split(",")
    path = REPOSITORY / "configs" / f"{name}.yaml"
    fixed = [f"train.global_batch_size={sequences}", "train.micro_batch_size=1", "data.num_workers=0"]
    return load_config(path, [*fixed, *overrides, *own], world_size=1, need_data=False)


def add_to(report: harness.Report, rows: list[Row]) -> None:
    for row in rows:
        cells = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        report.row(**{name: cell for name, cell in cells.items() if name not in ("parts", "top")})
    for part in dict.fromkeys(part for row in rows for part in row.parts):
        times = {f"{row.config}, {row.micro_batch}": row.parts.get(part, 0.0) for row in rows}
        report.row(ms_per_sequence=part, **times)
    for row in rows:
        if row.config.startswith("standard") and row.config == rows[0].config:
            report.bar(f"MFU of {row.config}, micro-batch {row.micro_batch}", row.mfu, at_least=0.42)
            for other in rows:
                if (
                    other.config.split(",")[0] == row.config.replace("standard", "gsa")
                    and other.micro_batch == row.micro_batch
                ):
                    what = f"step of {other.config} / {row.config}, micro-batch {row.micro_batch}"
                    report.bar(what, other.ratio, at_most=1.15)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--configs", nargs="+", default=DEFAULTS)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sequences", type=int, default=8, help="per optimizer step")
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--top", type=int, default=0, help="print this many of the longest kernels")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_step", arguments)

    configs = {name: load(name, arguments.sequences, arguments.overrides) for name in arguments.configs}
    parallel = init_parallel(next(iter(configs.values())).parallel, seed=1)
    rows: list[Row] = []
    reference: Subject | None = None
    for name, config in configs.items():
        others_bytes = torch.cuda.memory_allocated()
        subject = Subject(name, OurTrainee(config, config.phases[-1], parallel), others_bytes)
        for micro_batch in arguments.micro_batch:
            for one in filter(None, (reference, subject)):
                one.set_micro_batch(micro_batch)
            timing = (arguments.warm_up_seconds, arguments.steps)
            row = measure(subject, reference, *timing, not arguments.no_profile)
            rows.append(row)
            print(f"{name}, micro-batch {micro_batch}: {row.step_ms:.1f} ms, MFU {100 * row.mfu:.1f}%")
            for kernel, count, took in row.top[: arguments.top]:
                print(f"  {took:8.3f} ms {count:6} x [{part_of(kernel)}] {kernel[:130]}")
        if reference is None:
            reference = subject
        else:
            subject.bench.close()
            release_memory(parallel.device)
    assert reference is not None
    reference.bench.close()
    add_to(report, rows)
    shutdown_parallel()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
