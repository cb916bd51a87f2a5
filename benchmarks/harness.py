"""Provides what all benchmarks share: timing, peak memory, the record of the machine, results as JSON and as a table.

    args = harness.parser(__doc__).parse_args()
    harness.require_cuda()
    report = harness.Report("bench_long", args)
    times = harness.measure({"ours": run, "dense": run_dense})      # in turns, so the ratio is fair
    report.row(length=4096, ours_ms=times["ours"], dense_ms=times["dense"])
    report.bar("ours / dense at 4096", times["ours"] / times["dense"], at_most=2.0)
    sys.exit(report.finish())

Only `measure`, `capture` and `peak_bytes` need a CUDA device.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "data")]

RESULTS = ROOT / "benchmarks" / "results"
QUIET = "GSA_BENCH_QUIET"
"""Set by `make bench`, which prints the machine once for all benches."""

MOST_RUNS = 200
"""Largest number of runs of a candidate."""

T = TypeVar("T")
Run = Callable[[], object]
Cell = str | int | float | bool | None

_BEGAN = time.monotonic()
_FLUSH_BYTES = 256 * 2**20  # several times the size of any L2


# --- timing --------------------------------------------------------------------------------------------


def measure(
    candidates: Mapping[str, Run],
    *,
    budget_ms: float = 200.0,
    min_runs: int = 3,
    rounds: int = 5,
    flush_l2: bool = True,
    compiled: bool = False,
    before: Mapping[str, Run] | None = None,
) -> dict[str, float]:
    """Return the median time of each candidate in ms, on the current CUDA device by CUDA events.

    Each candidate first runs a few times, to compile, to warm up, and to estimate its time. Then the candidates take
    turns in `rounds` rounds, so that the falling clock of a warm device slows down all of them alike.

    Args:
        candidates: name -> function to time; its results are dropped
        budget_ms: device time per candidate, which determines its number of runs
        min_runs: smallest number of runs of a candidate
        rounds: turns per candidate
        compiled: whether all kernels have run before, which saves the first run of each candidate
        flush_l2: overwrite the L2 cache before each run, as another layer would
        before: name of a candidate -> function to call before each of its runs, outside the timed region
    """
    schedules, before = {}, before or {}
    for name, run in candidates.items():
        if not compiled:
            run()
        estimate = _time(run, 1, None, before.get(name))[0]
        if estimate * min_runs < budget_ms:
            estimate = min(_time(run, 3, None, before.get(name)))
        schedules[name] = share_rounds(count_runs(estimate, budget_ms, min_runs), rounds)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda") if flush_l2 else None
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds):
        for name, run in candidates.items():
            samples[name] += _time(run, schedules[name][turn], flush, before.get(name))
    return {name: median(times) for name, times in samples.items()}


def count_runs(estimate_ms: float, budget_ms: float, min_runs: int) -> int:
    return min(max(int(budget_ms / max(estimate_ms, 1e-6)), min_runs), MOST_RUNS)


def share_rounds(runs: int, rounds: int) -> list[int]:
    """Divide runs over rounds; the first rounds get the remainder."""
    return [runs // rounds + (turn < runs % rounds) for turn in range(rounds)]


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, assuming a normal distribution: the standard deviation is 1.48 times
    the median absolute deviation, and the median's standard error is 1.25 times the mean's."""
    middle = median(values)
    spread = 1.48 * median(abs(each - middle) for each in values)
    return middle, 1.25 * spread / len(values) ** 0.5


def _time(run: Run, runs: int, flush: torch.Tensor | None, before: Run | None) -> list[float]:
    """Return the time of each run in ms. The host launches all runs without a wait between them, so that the device
    always has work."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in events:
        if flush is not None:
            flush.zero_()
        if before is not None:
            before()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def capture(run: Run) -> Run:
    """Capture `run` as a CUDA graph, which excludes the host's time, and return a function that replays it.

    `run` must do the same work on the same tensors each time, and must never wait for the device. The leaf tensors of
    `run` must not be part of an earlier autograd graph that still exists. Otherwise, autograd computes their gradients
    on the stream of that graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def bandwidth() -> float:
    """Return the bytes per millisecond that a device copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ms = measure({"copy": lambda: target.copy_(source)}, flush_l2=False)["copy"]
    return 2 * source.nbytes / ms


def peak_bytes(run: Callable[[], T]) -> tuple[int, T]:
    """Return the peak device memory of a run in addition to existing memory, including its results, and the results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, results


# --- correctness ---------------------------------------------------------------------------------------


def require_finite(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """
    Raises:
        ArithmeticError: a tensor has an infinity or a NaN.
    """
    for index, tensor in enumerate(tensors):
        if not tensor.isfinite().all():
            raise ArithmeticError(f"{what}: result {index}, {tuple(tensor.shape)}, is not finite")


def relative_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||value - wanted|| / ||wanted||, in fp64."""
    wanted = wanted.detach().double()
    return float((value.detach().double() - wanted).norm() / wanted.norm())


# --- the machine ---------------------------------------------------------------------------------------


def commit() -> str:
    """Return the commit of these sources, from GSA_COMMIT or from git. Git adds -dirty if the sources differ from the
    commit. Set GSA_COMMIT for a copy of the sources without an up-to-date git repository."""
    found = os.environ.get("GSA_COMMIT", "")
    # Only the repository of this file counts, because a copy may lie inside another repository.
    if not found and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        print("!!! UNKNOWN COMMIT: there is no repository here; set GSA_COMMIT", file=sys.stderr)
    return found or "unknown"


def environment() -> dict[str, str]:
    """Return what a result depends on in addition to the code."""
    has_gpu = torch.cuda.is_available()
    return {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()) if has_gpu else "none",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def require_cuda() -> None:
    """Exit with a message if there is no CUDA device, or if Triton compiles kernels wrongly."""
    if not torch.cuda.is_available():
        sys.exit("No CUDA device here. Where there is one: make bench PYTHON=<a Python whose torch has CUDA>")
    from gsa_kernels.miscompile_guard import refuse_wrong_sums  # found by the path above

    refuse_wrong_sums()


# --- results -------------------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser with the option that all benches have. `description` is the module's docstring."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON file")
    return made


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    limit: float
    kind: str
    """`at least` or `at most`."""
    met: bool


class Report:
    """Holds rows of named columns, which are printed at once. `<out>/<name>.json` is complete after every row."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        """
        Args:
            name: name of the file
            arguments: result of a parser made by `parser`
        """
        self.path = Path(arguments.out) / f"{name}.json"
        self.environment = environment()
        self.rows: list[dict[str, Cell]] = []
        self.bars: list[Bar] = []
        self.failures: list[str] = []
        self._columns: dict[str, str] = {}
        if not os.environ.get(QUIET):
            print(describe(self.environment), flush=True)

    def take_over(self) -> None:
        """Start with the rows of the existing file, so that this call adds to them."""
        if self.path.exists():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]

    def row(self, **cells: Cell) -> None:
        """Store and print a row. A change of columns begins a new table."""
        if list(cells) != list(self._columns):
            self._columns = {name: column_format(name, cell) for name, cell in cells.items()}
            print("\n" + table_line(self._columns, {name: name for name in cells}))
        self.rows.append(cells)
        print(table_line(self._columns, cells), flush=True)
        self._write()

    def bar(
        self, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Store and print whether a promised figure is met. Give one of the two limits. NaN meets no limit."""
        if at_least is not None and at_most is None:
            bar = Bar(what, value, at_least, "at least", value >= at_least)
        elif at_most is not None and at_least is None:
            bar = Bar(what, value, at_most, "at most", value <= at_most)
        else:
            raise ValueError(f"{what}: pass one of at_least and at_most")
        self.bars.append(bar)
        verdict = "met   " if bar.met else "MISSED"
        print(f"{verdict} {what}: {value:.2f}, {bar.kind} {bar.limit:g}", flush=True)
        self._write()

    def fail(self, what: str) -> None:
        """Record that results are wrong: `finish` returns 1."""
        self.failures.append(what)
        print(f"WRONG  {what}", flush=True)
        self._write()

    def finish(self) -> int:
        """Return the exit code: 1 if something failed. A missed bar is not a failure."""
        self._write()
        met = sum(bar.met for bar in self.bars)
        print(
            f"\n{self.path}: {len(self.rows)} rows, {met} of {len(self.bars)} bars met, "
            f"{len(self.failures)} failures, {time.monotonic() - _BEGAN:.0f} s"
        )
        return 1 if self.failures else 0

    def _write(self) -> None:
        """Replace the file atomically, so that a reader never sees half of it."""
        content = {
            "command": " ".join(["python", *map(_shown, sys.argv)]),
            "environment": self.environment,
            "rows": [{name: plain(cell) for name, cell in row.items()} for row in self.rows],
            "bars": [asdict(bar) | {"value": plain(bar.value)} for bar in self.bars],
            "failures": self.failures,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".json.partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(self.path)


def describe(about: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def table_line(columns: Mapping[str, str], cells: Mapping[str, Cell]) -> str:
    """Align cells by the format of their column."""
    return "  ".join(f"{_text(cells[name]):{align}}" for name, align in columns.items()).rstrip()


def column_format(name: str, first: Cell) -> str:
    """Align numbers to the right and text to the left, with room for more than the first cell."""
    if isinstance(first, str):
        return f"<{max(len(name), 6 if len(first) <= 6 else 32)}"
    return f">{max(len(name), 9)}"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:.1f}"
    return str(cell)


def plain(cell: Cell) -> Cell:
    """Replace NaN and infinity, which JSON does not have."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _shown(argument: str) -> str:
    """Write paths inside this repository relative to its root, so that the record does not depend on the checkout's
    location."""
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else argument


if __name__ == "__main__":
    print(describe(environment()))
