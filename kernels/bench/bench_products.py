"""The matrix products on a layer's normed input, at the 1.7B model's sizes: QKV, the gates and the indexer.

    python kernels/bench/bench_products.py [--tokens 32768] [--forward]

Each weight gradient in one product, in parts of the tokens whose fp32 results are added, and all of them in one product
that is then added to its buffers. `waves` are tiles of 128 x 256 over the multiprocessors of an H200, where cuBLAS may
take others; TFLOP/s are those of the product as it is asked for, whatever is padded.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in (".", "kernels", "data"))

import harness
import torch
import torch.nn.functional as F
from cases import DEVICE, normal

from gsa_train.model.weight_gradients import CublasAccumulation, gradient_in_parts

WIDTH, MULTIPROCESSORS = 2048, 132
ROWS = {"qkv": 3072, "gates": 2560, "indexer": 328}
PARTS = (2, 4, 8, 16)

Product = Callable[[], torch.Tensor]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch (default: 8 x 4096)")
    parser.add_argument(
        "--forward", action="store_true", help="forward products and gradients of the input, too"
    )
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_products", args)
    torch.manual_seed(0)
    inputs = normal(args.tokens, WIDTH)
    for name, (rows, runs) in weight_gradients(inputs).items():
        row(report, f"{name}, weight", rows, WIDTH, args.tokens, runs)
    if args.forward:
        for name, count in ROWS.items():
            weight, bias = normal(count, WIDTH), torch.zeros(count, device=DEVICE, dtype=inputs.dtype)
            forward = {
                "plain": partial(F.linear, inputs, weight),
                "bias": partial(F.linear, inputs, weight, bias),
            }
            row(report, f"{name}, forward", args.tokens, count, WIDTH, forward)
        row(
            report,
            "qkv + gates, input",
            args.tokens,
            WIDTH,
            ROWS["qkv"] + ROWS["gates"],
            input_gradients(args.tokens),
        )
    return report.finish()


def row(
    report: harness.Report, name: str, rows: int, columns: int, depth: int, runs: dict[str, Product]
) -> None:
    """Check every version against the first and time it."""
    expected = next(iter(runs.values()))().float()
    for version, run in runs.items():
        error = harness.relative_error(run().float(), expected)
        if not error < 0.01:
            report.fail(f"{name}, {version}: {error:.1e} from the first, relative")
    times = harness.measure(runs)
    tflop = 2e-12 * rows * columns * depth
    for version, time in times.items():
        report.row(
            product=name,
            version=version,
            m=rows,
            n=columns,
            k=depth,
            waves=tiles_of(rows, columns) / MULTIPROCESSORS,
            us=1e3 * time.ms,
            tflops=tflop / (1e-3 * time.ms),
        )


def weight_gradients(inputs: torch.Tensor) -> dict[str, tuple[int, dict[str, Product]]]:
    """Name -> outputs, and versions that return the gradient [outputs, in]; those of the base add it to a buffer of
    zeros that they clear first, which is in the time of each."""
    tokens = len(inputs)
    grads = {name: normal(tokens, count) for name, count in ROWS.items()}
    buffers = {
        name: torch.zeros(count, WIDTH, dtype=torch.float32, device=DEVICE) for name, count in ROWS.items()
    }

    def accumulated(name: str) -> torch.Tensor:
        CublasAccumulation.wgrad_gemm_accum_fp32(inputs, grads[name], buffers[name].zero_())
        return buffers[name]

    def added(name: str, parts: int) -> torch.Tensor:
        accumulate_in_parts(inputs, grads[name], buffers[name].zero_(), parts)
        return buffers[name]

    found: dict[str, tuple[int, dict[str, Product]]] = {}
    for name in ("qkv", "gates"):
        versions: dict[str, Product] = {"one": partial(accumulated, name)}
        versions |= {f"{parts} parts": partial(added, name, parts) for parts in PARTS[:2]}
        found[name] = ROWS[name], versions
    versions = {
        f"{parts} parts": partial(gradient_in_parts, inputs, grads["indexer"], parts) for parts in (1, *PARTS)
    }
    found["indexer"] = ROWS["indexer"], versions

    names = list(ROWS)
    together = torch.cat([grads[name] for name in names], dim=1)
    sizes = list(ROWS.values())

    def one_by_one() -> torch.Tensor:
        parts = [accumulated("qkv"), accumulated("gates"), gradient_in_parts(inputs, grads["indexer"], 1)]
        return torch.cat([part[:1] for part in parts])

    def merged() -> torch.Tensor:
        sums = torch.mm(together.t(), inputs, out_dtype=torch.float32)
        targets = [buffers[name].zero_() for name in names]
        torch._foreach_add_(targets, list(sums.split(sizes)))
        return torch.cat([target[:1] for target in targets])

    found["all three"] = sum(sizes), {"one by one": one_by_one, "merged": merged}
    return found


def accumulate_in_parts(
    inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor, parts: int
) -> None:
    """main_grad [out, in] += grad_output [tokens, out]^T inputs [tokens, in], a sum over parts of the tokens."""
    left = grad_output.unflatten(0, (parts, -1)).transpose(1, 2)
    sums = torch.bmm(left, inputs.unflatten(0, (parts, -1)), out_dtype=torch.float32)
    main_grad.add_(sums.sum(0))


def tiles_of(rows: int, columns: int) -> int:
    return -(-rows // 128) * -(-columns // 256)


def input_gradients(tokens: int) -> dict[str, Product]:
    """As autograd adds them, and as the product does (gsa_train/model/gates.py)."""
    first, second = normal(tokens, ROWS["qkv"]), normal(tokens, ROWS["gates"])
    weights = normal(ROWS["qkv"], WIDTH), normal(ROWS["gates"], WIDTH)
    return {
        "two and a sum": lambda: (first @ weights[0]).add_(second @ weights[1]),
        "added by the product": lambda: (first @ weights[0]).addmm_(second, weights[1]),
    }


if __name__ == "__main__":
    sys.exit(main())
