"""Measures a model's training step: time, memory and parts. Steps of a second model can alternate with these steps."""

import dataclasses
import re
import statistics
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import harness
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gsa_train.data.batches import MicroBatch
from whole_steps.baseline import Baseline
from whole_steps.step_bench import OurTrainee, random_batches, speed

PARTS = (
    (
        "selection",
        r"^_?(scores_kernel|select|best_groups|candidates|guess|narrow|fill_kernel)",
    ),
    (
        "indexer KL",
        r"^_?(gathered_)?(probs_kernel|score_pass_kernel|grad_(queries|keys)_kernel|totals_kernel)",
    ),
    (
        "attention",
        r"^_?(forward_kernel|backward_kernel|queries_kernel|keys_kernel|rows_kernel)",
    ),
    ("attention", r"^_?(sum_parts|transpose_kernel)"),
    ("attention", r"flash|fmha|sdpa|cudnn_generated"),
    ("sums by key", r"^_?(mark|count|place|add)_kernel"),
    ("indexer split", r"^_?split_(backward_)?kernel"),
    ("cross-entropy", r"cross_entropy|softmax|vocabulary"),
    ("optimizer", r"multi_tensor|adam|update_kernel|lpnorm|foreach"),
    ("matmuls", r"gemm|nvjet|cutlass|splitK|cublas"),
    ("norm", r"norm|GammaBeta"),
    ("split, rope, gates", r"^_?(heads_(backward_)?kernel|gate_(backward_)?kernel)"),
    ("swiglu", r"swiglu|silu"),
    ("FP8 casts", r"^_?(magnitudes|cast)_kernel"),
    ("communication", r"nccl"),
    (
        "embedding",
        r"embedding|index|radix_?sort|sum_and_scatter|compute_grad_weight|gather_kernel|unique|scan",
    ),
    ("copies, fills", r"memcpy|memset|copy|fill|cat"),
    ("elementwise, sums", r"elementwise|reduce|_total_kernel|column_sums|add_parts"),
)
"""Maps a part to a pattern of kernel names. The first match counts. `sums by key` are gradients of gathered keys summed
by key, for attention and loss over key lists."""


@dataclass
class Row:
    config: str
    micro_batch: int
    sequences: int
    step_ms: float
    host_ms: float
    """The host's time to launch a step."""
    ratio: float
    """Step time divided by the first config's step time, measured in turns."""
    ratio_error: float
    """Standard error of the ratio."""
    tokens_per_second: float
    mfu: float
    """FLOPs per second of the phase's matrix products, divided by the peak. Sparse attention counts selected keys."""
    peak_gib: float
    synchronizations: int
    """How often a step made the host wait for the device."""
    launches: int
    """Kernels, copies and fills of a step."""
    parts: dict[str, float] = field(default_factory=dict)
    """ms per sequence."""


STEPS_OF_A_TURN = 3


@dataclass
class Subject:
    name: str
    bench: OurTrainee | Baseline
    others_bytes: int
    """Memory on the device before the model."""
    batches: list[MicroBatch] = field(default_factory=list)

    def set_micro_batch(self, size: int) -> None:
        train = dataclasses.replace(self.bench.config.train, micro_batch_size=size)
        self.bench.config = dataclasses.replace(self.bench.config, train=train)
        self.batches = random_batches(self.bench.config, self.bench.parallel)

    def step_seconds(self) -> float:
        """Return the mean time of STEPS_OF_A_TURN steps. As in training, the host does not wait between them."""
        began = time.perf_counter()
        for _ in range(STEPS_OF_A_TURN):
            self.bench.step(self.batches)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS_OF_A_TURN

    def host_seconds(self) -> float:
        """Return the time that the host needs to launch a step. The device may continue after that."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.bench.step(self.batches)
        return time.perf_counter() - began

    def peak_bytes(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        self.step_seconds()
        with_graph = torch.cuda.memory_allocated() + self.bench.graph_bytes
        return max(torch.cuda.max_memory_allocated(), with_graph) - self.others_bytes


@dataclass(frozen=True)
class Turns:
    """Limits how often two models take turns."""

    warm_up_seconds: float
    turns: int
    """Largest number."""
    seconds: float = float("inf")
    """Time after which no further turn begins, after at least `FEWEST_TURNS`."""


FEWEST_TURNS = 3


def measure(subject: Subject, reference: Subject | None, turns: Turns, with_profile: bool) -> Row:
    """Measure step times, alternating with `reference` if given."""
    taking_turns = [subject] if reference is None else [reference, subject]
    began = time.perf_counter()
    while time.perf_counter() - began < turns.warm_up_seconds:
        for one in taking_turns:
            one.step_seconds()
    began = time.perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < turns.turns:
        rounds.append([one.step_seconds() for one in taking_turns])
        if len(rounds) >= FEWEST_TURNS and time.perf_counter() - began > turns.seconds:
            break
    seconds = statistics.median(times[-1] for times in rounds)
    ratio, ratio_error = harness.median_and_error([times[-1] / times[0] for times in rounds])
    bench = subject.bench
    config = bench.config
    tokens_per_second, mfu = speed(config, bench.phase, seconds, torch.device("cuda"))
    row = Row(
        config=subject.name,
        micro_batch=config.train.micro_batch_size,
        sequences=config.train.global_batch_size,
        step_ms=1e3 * seconds,
        host_ms=1e3 * statistics.median(subject.host_seconds() for _ in range(3)),
        ratio=ratio,
        ratio_error=ratio_error,
        tokens_per_second=tokens_per_second,
        mfu=mfu,
        peak_gib=subject.peak_bytes() / 2**30,
        synchronizations=count_synchronizations(bench, subject.batches),
        launches=0,
    )
    if with_profile:
        add_parts(row, bench, subject.batches)
    return row


def count_synchronizations(bench: OurTrainee | Baseline, batches: list[MicroBatch]) -> int:
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


def add_parts(row: Row, bench: OurTrainee | Baseline, batches: list[MicroBatch]) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.step(batches)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    per_sequence = 1 / (1e3 * row.sequences)  # from us per step
    parts: Counter[str] = Counter()
    for kernel in kernels:
        parts[part_of(kernel.name)] += kernel.time_range.elapsed_us() * per_sequence
    row.launches = len(kernels)
    row.parts = dict(parts.most_common())
    row.parts["idle"] = row.step_ms / row.sequences - busy_us(kernels) * per_sequence


def part_of(kernel: str) -> str:
    for part, pattern in PARTS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return "other"


def busy_us(kernels: list) -> float:
    """Return the time in which at least one kernel runs."""
    busy = end = 0.0
    for start, stop in sorted((k.time_range.start, k.time_range.end) for k in kernels):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy
