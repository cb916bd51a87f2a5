"""Products of one and of 16 rows, as decoding takes them: `row_product` in many tilings, and cuBLAS.

    python benchmarks/bench_row_product.py [--batches 1 16] [--only gate_up] [--seconds 140]
    python benchmarks/bench_row_product.py --step [--length 131072]

Weights of configs/gsa_1.7b.yaml, one for each of its layers, multiplied one after the other in a CUDA graph, so that
none comes from the L2 cache; the output layer, larger than that cache, alone. us: of one product. cuBLAS is the product
alone; ours has the norm in front of it, the gate, the residual. `chain`: the four products of a layer, each on the
result of the one before, in all layers, with the default tilings and with those that were fastest here.

--step: instead, one sequence's step of the whole model: as it is, and in other ways (step_variants.py), group by group,
of which the fastest is kept; and when the kernels of one layer start and end. Each way begins at the same state
(step_state.py) and must give the logits of the code as it is, by graphs with the same bits as by launches. A kernel
that waits for the one in front counts.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import bench_generate
import harness
import torch
import yaml
from step_state import HeldState, hold, same_bits, walk
from step_variants import Way, applied, groups
from torch.profiler import ProfilerActivity, profile
from triton.errors import TritonError

from gsa_hf.decoding import FusedDecoder
from gsa_hf.generation import DecodingGraphs
from gsa_kernels.row_product.op import row_product
from gsa_kernels.row_product.reference import Norm
from gsa_kernels.row_product.reference import row_product as wanted_product
from gsa_kernels.row_product.tiling import Tiling, default_tiling

TOLERANCE = 1e-2
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """One of a layer's products."""

    rows: int
    columns: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


def shapes(config: dict[str, Any]) -> dict[str, Shape]:
    model, gsa = config["model"], config["gsa"]
    hidden, heads, kv_heads = model["hidden_size"], model["num_heads"], model["num_kv_heads"]
    joined = (2 * heads + 3 * kv_heads) * model["head_dim"]
    joined += (gsa["indexer_heads"] + 1) * gsa["indexer_dim"] + gsa["indexer_heads"]
    joined += -joined % 64
    return {
        "joined": Shape(joined, hidden, norm=True),
        "out": Shape(hidden, heads * model["head_dim"], residual=True),
        "gate_up": Shape(model["ffn_hidden_size"], hidden, norm=True, gated=True),
        "down": Shape(hidden, model["ffn_hidden_size"], residual=True),
        "head": Shape(model["vocab_size"], hidden, norm=True),
    }


def candidates(batch: int, shape: Shape) -> list[Tiling]:
    """The default first. Registers of one row: rows * columns * 2 bytes over 32 threads a warp, twice with a gate, and
    twice where tiles are taken in turns."""
    found = [default_tiling(batch, shape.columns, shape.rows, shape.gated)]
    if batch > 1:
        for rows, chunk, stages, warps in (
            (16, 128, 4, 4),
            (16, 256, 4, 4),
            (16, 512, 3, 4),
            (32, 128, 4, 4),
            (32, 256, 3, 4),
            (64, 128, 4, 4),
            (64, 64, 6, 4),
        ):
            found.append(Tiling(rows, warps, chunk=chunk, stages=stages))
        return list(dict.fromkeys(found))
    wide = shape.columns > 4096
    for warps, kilobytes in ((1, 4), (1, 8), (2, 8), (2, 16), (4, 8), (4, 16), (4, 32), (8, 32), (8, 64)):
        row_bytes = (12288 if wide else 2 * shape.columns) * (2 if shape.gated else 1)
        rows = kilobytes * 1024 // row_bytes
        if wide:  # a row has 1.5 times a power of two
            rows = 1 << max(rows, 1).bit_length() - 1
        if rows >= 1:
            found.append(Tiling(rows, warps))
    for warps, rows, programs in ((4, 4, 264), (4, 4, 528), (8, 8, 132), (8, 8, 264)):
        found.append(Tiling(max(rows // (2 if shape.gated or wide else 1), 1), warps, programs))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Operands:
    """Of one product in all layers."""

    shape: Shape
    weights: list[torch.Tensor]
    x: torch.Tensor
    norm: Norm | None
    residual: torch.Tensor | None

    def run(
        self, multiply: Callable[..., torch.Tensor], weight: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return multiply(self.x, weight, self.norm, residual=self.residual, gated=self.shape.gated, **options)

    def all(self, tiling: Tiling) -> None:
        for weight in self.weights:
            self.run(row_product, weight, tiling=tiling)

    def all_by_cublas(self) -> None:
        for weight in self.weights:
            torch.nn.functional.linear(self.x, weight)


def operands(batch: int, shape: Shape, layers: int) -> Operands:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    rows = shape.rows * (2 if shape.gated else 1)
    return Operands(
        shape,
        [normal(rows, shape.columns) * shape.columns**-0.5 for _ in range(layers)],
        normal(batch, shape.columns),
        Norm(1 + 0.1 * normal(shape.columns), EPS) if shape.norm else None,
        normal(batch, shape.rows) if shape.residual else None,
    )


def measure(
    report: harness.Report, name: str, batch: int, given: Operands, budget_ms: float, until: float
) -> Tiling:
    """The fastest tiling. One that does not compile, or gives something else, is named and left out."""
    wanted = given.run(wanted_product, given.weights[0])
    runs: dict[str, Callable[[], object]] = {"cuBLAS": harness.capture(given.all_by_cublas)}
    tilings: dict[str, Tiling] = {}
    for tiling in candidates(batch, given.shape):
        what = label(batch, tiling)
        if time.perf_counter() > until and tilings:
            print(f"{name}, batch {batch}: {what} and those behind it left out (--seconds)")
            break
        try:
            found = given.run(row_product, given.weights[0], tiling=tiling)
        except (TritonError, RuntimeError) as error:
            print(f"{name}, batch {batch}, {what}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        error_found = harness.relative_error(found, wanted)
        if not error_found < TOLERANCE:
            report.fail(f"{name}, batch {batch}, {what}: relative error {error_found:.1e}")
            continue
        runs[what], tilings[what] = harness.capture(partial(given.all, tiling)), tiling
    times = harness.measure(runs, budget_ms=budget_ms, flush_l2=False, compiled=True)
    moved = given.weights[0].nbytes
    default = next(iter(tilings))
    for what, timing in sorted(times.items(), key=lambda each: each[1].ms):
        us = timing.ms * 1e3 / len(given.weights)
        shown = f"{what} (default)" if what == default else what
        report.row(product=name, batch=batch, by=shown, us=us, gb_per_s=moved / us / 1e3)
    return tilings[min(tilings, key=lambda what: times[what].ms)]


def label(batch: int, tiling: Tiling) -> str:
    if batch > 1:
        return f"{tiling.rows} x {tiling.chunk}, {tiling.stages} stages, {tiling.warps} warps"
    turns = f", {tiling.programs} programs" if tiling.programs else ""
    return f"{tiling.rows} rows, {tiling.warps} warps{turns}"


def chain(
    batch: int, given: dict[str, Operands], multiply: Callable[[str, torch.Tensor, int, torch.Tensor], Any]
) -> None:
    """A layer's four products after each other; W_O takes the first columns of the joined product, as q has them."""
    h = given["joined"].x
    for layer in range(len(given["joined"].weights)):
        attended = multiply("joined", h, layer, h)[:, : given["out"].shape.columns].contiguous()
        h = multiply("out", attended, layer, h)
        h = multiply("down", multiply("gate_up", h, layer, h), layer, h)


def chain_by_ours(given: dict[str, Operands], tilings: dict[str, Tiling]) -> Callable[..., torch.Tensor]:
    def multiply(name: str, x: torch.Tensor, layer: int, h: torch.Tensor) -> torch.Tensor:
        each = given[name]
        residual = h if each.shape.residual else None
        return row_product(
            x, each.weights[layer], each.norm, None, residual, each.shape.gated, tilings.get(name)
        )

    return multiply


def chain_by_cublas(given: dict[str, Operands]) -> Callable[..., torch.Tensor]:
    def multiply(name: str, x: torch.Tensor, layer: int, h: torch.Tensor) -> torch.Tensor:
        each = given[name]
        out = torch.nn.functional.linear(x, each.weights[layer])
        return out[:, : each.shape.rows].contiguous() if each.shape.gated else out

    return multiply


def measure_chain(
    report: harness.Report, batch: int, given: dict[str, Operands], tilings: dict[str, Tiling]
) -> None:
    """For one sequence `contiguous` copies nothing."""
    ways = {
        "cuBLAS, products alone": chain_by_cublas(given),
        "default tilings": chain_by_ours(given, {}),
        "fastest tilings": chain_by_ours(given, tilings),
    }
    runs = {name: harness.capture(partial(chain, batch, given, way)) for name, way in ways.items()}
    times = harness.measure(runs, budget_ms=100, flush_l2=False, compiled=True)
    layers = len(given["joined"].weights)
    moved = sum(given[name].weights[0].nbytes for name in ("joined", "out", "gate_up", "down"))
    for name, timing in times.items():
        us = timing.ms * 1e3 / layers
        report.row(chain_of_a_layer=name, batch=batch, us=us, gb_per_s=moved / us / 1e3)


CROSS_TOLERANCE = 5e-2
"""Of logits of another way beside those of the code as it is: bf16 rounds at other places, in all layers."""
GRAPH_WALKS = 5
"""Of each way: a kernel that reads too early may read what is right at times."""


@dataclass
class Trial:
    """A way, with its captured steps of each model; ms of a token."""

    name: str
    way: Way
    steps: dict[str, Callable[[], object]]
    held: list[Any]  # a graph keeps no tensor alive
    ms: float = float("inf")


@dataclass
class Subject:
    """A model's decoder, and what its steps give as the code is."""

    name: str
    decoder: FusedDecoder
    state: HeldState
    wanted: list[torch.Tensor] = field(default_factory=list)
    repeats: bool = True
    """Whether the code as it is gives the same bits each time: else other ways are not asked to."""


def first_walk(subject: Subject) -> str | None:
    """Fill `wanted`. What is wrong with it: steps from the same state gave other logits."""
    subject.wanted = walk(subject.state, subject.decoder.step)
    again = walk(subject.state, subject.decoder.step)
    moved = subject.state.moved(subject.decoder)
    subject.repeats = same_bits(subject.wanted, again)
    if subject.repeats and not moved:
        return None
    error = max(map(harness.relative_error, again, subject.wanted))
    return f"twice from one state: relative error {error:.1e}; not as before: {moved or 'nothing known'}"


def obstacle(subject: Subject, walks: list[list[torch.Tensor]]) -> tuple[float, str | None]:
    """Largest relative error of logits beside those of the code as it is, and what is wrong. `walks`: a way's, first by
    launches, then by graphs."""
    errors = [
        harness.relative_error(*pair) for each in walks for pair in zip(each, subject.wanted, strict=True)
    ]
    largest = max(errors, key=lambda each: each if math.isfinite(each) else math.inf)
    if not largest < CROSS_TOLERANCE:
        return largest, f"logits have relative error {largest:.1e}"
    if subject.repeats and not all(same_bits(walks[0], each) for each in walks[1:]):
        return largest, "steps of a graph give other bits than launches: something is read too early"
    return largest, None


def capture_way(report: harness.Report, name: str, way: Way, subjects: list[Subject]) -> Trial | None:
    """None, and a line, if it does not run, gives other logits than the code as it is, or not the same each time."""
    trial = Trial(name, way, {}, [])
    largest = 0.0
    for subject in subjects:
        decoder, state, what = subject.decoder, subject.state, f"{subject.name}, {name}"
        try:
            state.put_back()
            with applied(way, decoder):
                by_launches = walk(state, decoder.step)
                state.put_back()
                graphs = DecodingGraphs(decoder)
                trial.held.append(decoder._workspace)
            by_graphs = [walk(state, graphs.step) for _ in range(GRAPH_WALKS)]
        except (TritonError, RuntimeError, ValueError) as error:
            print(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            return None
        finally:
            state.put_back()
        error_found, wrong = obstacle(subject, [by_launches, *by_graphs])
        if wrong is not None:
            report.fail(f"{what}: {wrong}")
            return None
        largest = max(largest, error_found)

        def step(subject: Subject, graphs: DecodingGraphs, refresh: bool) -> torch.Tensor:
            subject.decoder.slot.fill_(subject.state.filled)
            subject.decoder.lengths.fill_(subject.state.filled + 1)
            return graphs.step(refresh)

        trial.steps[f"{subject.name} select"] = partial(step, subject, graphs, True)
        if decoder.config.index_block_size > 1:
            trial.steps[f"{subject.name} keep"] = partial(step, subject, graphs, False)
    print(f"{name}: right, logits differ by {largest:.1e}", flush=True)
    return trial


def time_trials(report: harness.Report, trials: list[Trial], subjects: list[Subject]) -> None:
    """In turns. ms: GSA's step and, of GSA shared, the mean over a block."""
    for subject in subjects:
        subject.state.put_back()
    runs = {f"{place} {what}": step for place, each in enumerate(trials) for what, step in each.steps.items()}
    times = harness.measure(runs, budget_ms=60, flush_l2=False, compiled=True)
    for place, trial in enumerate(trials):
        ms = {what: times[f"{place} {what}"].ms for what in trial.steps}
        gsa, select, keep = ms["GSA select"], ms["GSA shared select"], ms["GSA shared keep"]
        shared = (select + (bench_generate.BLOCK - 1) * keep) / bench_generate.BLOCK
        trial.ms = gsa + shared
        report.row(way=trial.name, gsa_ms=gsa, shared_ms=shared, select_ms=select, keep_ms=keep)


def open_subject(name: str, arguments: argparse.Namespace) -> Subject:
    layers = arguments.shapes["model"]["num_layers"]
    decoder = bench_generate.open_decoder(name, 1, arguments.length, layers, arguments, "cuda")
    return Subject(name, decoder, hold(decoder))


def measure_steps(report: harness.Report, arguments: argparse.Namespace) -> None:
    """Both models of `bench_generate` that have an indexer, with our products: group by group of changes, each beside
    the fastest way so far; then that way and the code as it is, kernel by kernel and side by side."""
    until = time.perf_counter() + arguments.seconds
    subjects = [open_subject(name, arguments) for name in bench_generate.PROMISES]
    for subject in subjects:
        wrong = first_walk(subject)
        if wrong is not None:
            report.fail(f"{subject.name}, as it is, {wrong}")
    first = capture_way(report, "as it is", Way(), subjects)
    if first is None:  # the report has failed; ways are still to be timed, by the size of their error
        for subject in subjects:
            subject.repeats = False
        first = capture_way(report, "as it is", Way(), subjects)
    if first is None:
        report.fail("the code as it is does not run")
        return
    best = first
    for group, changes in groups().items():
        trials = [best]
        for change, change_way in changes.items():
            way = change_way(best.way)
            if way == best.way:
                continue
            if time.perf_counter() > until:
                print(f"{group}: {change} left out (--seconds)")
                continue
            trial = capture_way(report, f"{group}: {change}", way, subjects)
            if trial is not None:
                trials.append(trial)
        if len(trials) > 1:
            time_trials(report, trials, subjects)
            best = min(trials, key=lambda each: each.ms)
            print(f"{group}: kept {best.name}", flush=True)
    shown = [first] if best is first else [first, best]
    for each in shown:
        for what, step in each.steps.items():
            show_layer(f"{what}, {each.name}", step)
    time_trials(report, [first, best], subjects)
    print("fastest way, what differs from the code as it is:")
    print(*(f"  {line}" for line in best.way.differences() or ["nothing"]), sep="\n")


def show_layer(name: str, step: Callable[[], object]) -> None:
    """Kernels from one launch of a joined product to the third behind it, in the middle of a step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = [each for each in recorded.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda each: each.time_range.start)
    entries = [place for place, each in enumerate(kernels) if "_joined_kernel" in each.name]
    if len(entries) < 2:
        print(f"{name}: the profiler saw no kernels")
        return
    middle = len(entries) // 2
    first, last = entries[middle], entries[min(middle + 3, len(entries) - 1)]  # a layer has one to three
    origin = kernels[first].time_range.start
    print(f"{name}, a layer or more, us: start, end, kernel")
    for each in kernels[first : last + 1]:
        start, end = each.time_range.start - origin, each.time_range.end - origin
        print(f"{start:9.2f} {end:9.2f}  {each.name[:60]}")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", nargs="+", metavar="PRODUCT", help="of joined, out, gate_up, down, head")
    parser.add_argument("--budget-ms", type=float, default=30.0, help="of device time for each candidate")
    parser.add_argument(
        "--seconds",
        type=float,
        help="after which no candidate, or way, is begun; 140, or 300 with --step",
    )
    parser.add_argument("--step", action="store_true", help="time steps of the model instead")
    parser.add_argument("--length", type=int, default=bench_generate.PROMISED_LENGTH, help="tokens")
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.seconds is None:
        arguments.seconds = 300.0 if arguments.step else 140.0
    harness.require_cuda()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    path = Path(harness.ROOT / "configs" / "gsa_1.7b.yaml")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    report = harness.Report("bench_row_product", arguments)
    if arguments.step:
        arguments.shapes, arguments.compile, arguments.products = config, False, "rows"
        measure_steps(report, arguments)
        return report.finish()
    started = time.perf_counter()
    summary = []
    for place, batch in enumerate(arguments.batches):
        until = started + arguments.seconds * (place + 1) / len(arguments.batches)
        given: dict[str, Operands] = {}
        fastest: dict[str, Tiling] = {}
        for name, shape in shapes(config).items():
            if arguments.only and name not in arguments.only:
                continue
            given[name] = operands(batch, shape, 1 if name == "head" else config["model"]["num_layers"])
            fastest[name] = measure(report, name, batch, given[name], arguments.budget_ms, until)
            summary.append(f"batch {batch}, {name}: {label(batch, fastest[name])}")
        if not arguments.only:
            measure_chain(report, batch, given, fastest)
    print("fastest of ours:", *summary, sep="\n  ")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
