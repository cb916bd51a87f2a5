"""Products of one and of 16 rows, as decoding takes them: `row_product` in many tilings, and cuBLAS.

    python benchmarks/bench_row_product.py [--batches 1 16] [--only gate_up] [--seconds 140]

Weights of configs/gsa_1.7b.yaml, one for each of its layers, multiplied one after the other in a CUDA graph, so that
none comes from the L2 cache; the output layer, larger than that cache, alone. us: of one product. cuBLAS is the product
alone; ours has the norm in front of it, the gate, the residual. `chain`: the four products of a layer, each on the
result of the one before, in all layers, with the default tilings and with those that were fastest here.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import yaml
from triton.errors import TritonError

from gsa_kernels.row_product.op import row_product
from gsa_kernels.row_product.reference import Norm
from gsa_kernels.row_product.reference import row_product as wanted_product
from gsa_kernels.row_product.tiling import Tiling, default_tiling
from gsa_kernels.row_product.triton_product import Launch

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
    """The default first. Registers of one row: rows * columns * 2 bytes over 32 threads a warp, twice with a gate."""
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
            self.run(row_product, weight, launch=Launch(tiling))

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
            found = given.run(row_product, given.weights[0], launch=Launch(tiling))
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
    return f"{tiling.rows} rows, {tiling.warps} warps"


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
        weight, gated, launch = each.weights[layer], each.shape.gated, Launch(tilings.get(name))
        return row_product(x, weight, each.norm, residual=residual, gated=gated, launch=launch)

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


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", nargs="+", metavar="PRODUCT", help="of joined, out, gate_up, down, head")
    parser.add_argument("--budget-ms", type=float, default=30.0, help="of device time for each candidate")
    parser.add_argument("--seconds", type=float, default=140.0, help="after which no candidate is begun")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    path = Path(harness.ROOT / "configs" / "gsa_1.7b.yaml")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    report = harness.Report("bench_row_product", arguments)
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
