"""Time the masked attention kernels next to torch's attention, on one CUDA device, with a verdict on their results.

    python benchmarks/bench_attention.py [--lengths 4096 8192] [--shapes 1.7B 7B heads-256 heads-128]
                                         [--selection FILE ...]

Rows `masked`: every query selects a random k = 2048 of its causal keys. Rows `dense`: the same kernels without a mask.
`--selection` takes the keys that a trained model's layers select in real text, from files that launch/export_indexer.py
wrote, each for its own length. These results go to bench_attention_trained.json. TFLOP/s count the causal half of dense
attention for all rows: 2 products forward, 7 forward and backward. Times are medians in ms from CUDA graphs, which
leave out the launches.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cases
import harness
import torch
from cases import AttentionInputs, Shape
from trained_indexers import read_all

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.packed_mask import unpack_mask

CHECKED_LENGTH = 1024
TOLERANCE = 1e-2
WIDE_OVER_NARROW = 1.2
"""Largest allowed time of the forward pass for heads-256 relative to heads-128."""


@dataclass(frozen=True)
class Ours:
    """Runs the masked kernels with the interface of `cases.Dense`."""

    inputs: AttentionInputs
    packed_mask: torch.Tensor | None

    def forward(self) -> torch.Tensor:
        return masked_attention(self.inputs.q, self.inputs.k, self.inputs.v, self.packed_mask)[0]

    def both(self) -> tuple[torch.Tensor, ...]:
        out, x = self.forward(), self.inputs
        return out, *torch.autograd.grad(out, [x.q, x.k, x.v], x.grad)


def worst_error(shape: Shape, packed_mask: torch.Tensor | None) -> float:
    """Return the largest relative error of output and gradients against fp64, at a length where fp64 is affordable."""
    inputs = cases.attention_inputs(shape, 1, CHECKED_LENGTH)
    exact = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if packed_mask is None:
        mask = torch.ones(1, CHECKED_LENGTH, CHECKED_LENGTH, dtype=torch.bool, device=cases.DEVICE).tril()
    else:
        mask = unpack_mask(packed_mask, CHECKED_LENGTH)
    q, k, v = exact
    out = sparse_attention(q, k, v, mask).out
    wanted = [out, *torch.autograd.grad(out, exact, inputs.grad.double())]
    return max(map(harness.relative_error, Ours(inputs, packed_mask).both(), wanted))


def measure(report: harness.Report, shape: Shape, length: int, masks: Mapping[str, torch.Tensor]) -> None:
    """
    Args:
        masks: masks by the names of their rows
    """
    inputs = cases.attention_inputs(shape, 1, length)
    attentions: dict[str, Ours | cases.Dense] = {
        **{name: Ours(inputs, mask) for name, mask in masks.items()},
        "dense": Ours(inputs, None),
        "torch cuDNN": cases.cudnn(inputs),
        "torch flash": cases.flash(inputs),
    }
    runs: dict[str, harness.Run] = {}
    for name, attention in list(attentions.items()):
        try:
            results = attention.both()
        except RuntimeError as refusal:
            if isinstance(attention, Ours):
                raise
            print(
                f"{name}, {shape.name}: {str(refusal).splitlines()[0]}"
            )  # some backends do not support heads of 256
            del attentions[name]
            continue
        harness.require_finite(f"{name} at {length}", results)
        del results  # frees its autograd graph: see `capture`
        runs[f"{name} forward"] = harness.capture(attention.forward)
        runs[f"{name} both"] = harness.capture(attention.both)
    times = harness.measure(runs)
    flops = 2 * shape.heads * shape.head_size * float(length) ** 2
    for name in attentions:
        forward, both = times[f"{name} forward"].ms, times[f"{name} both"].ms
        report.row(
            shape=shape.name,
            length=length,
            attention=name,
            forward_ms=forward,
            forward_tflops=flops / forward / 1e9,
            both_ms=both,
            both_tflops=3.5 * flops / both / 1e9,
        )


def judge_wide_heads(report: harness.Report) -> None:
    forward = {
        (row["shape"], row["length"], row["attention"]): row["forward_ms"]
        for row in report.rows
        if "forward_ms" in row
    }
    for (shape, length, attention), ms in forward.items():
        narrow = forward.get(("heads-128", length, attention))
        if shape == "heads-256" and narrow and not str(attention).startswith("torch"):
            ratio = float(str(ms)) / float(str(narrow))
            what = f"{length}, {attention}: heads of 256 / of 128, forward"
            report.bar(what, ratio, at_most=WIDE_OVER_NARROW)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=cases.USUAL)
    parser.add_argument(
        "--selected", type=int, default=cases.K_BASE, help="keys per query of the masked runs"
    )
    parser.add_argument("--selection", type=Path, nargs="+", default=[], metavar="FILE")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)

    try:
        trained = {
            length: {f"layer {layer}": indexer.packed_mask() for layer, indexer in layers.items()}
            for length, layers in read_all(arguments.selection).items()
        }
    except ValueError as wrong:
        parser.error(str(wrong))
    report = harness.Report("bench_attention_trained" if trained else "bench_attention", arguments)
    shapes = [cases.SHAPES[name] for name in arguments.shapes]
    for shape in shapes:
        some = cases.random_packed_mask(1, CHECKED_LENGTH, CHECKED_LENGTH // 2)
        for name, packed_mask in (("masked", some), ("dense", None)):
            error = worst_error(shape, packed_mask)
            report.row(shape=shape.name, length=CHECKED_LENGTH, attention=name, relative_error=error)
            if not error < TOLERANCE:
                report.fail(f"{name}, {shape.name}: relative error {error:.1e}, at most {TOLERANCE:g}")
    for shape in shapes:
        for length in trained or arguments.lengths:
            masks = trained.get(length) or {"masked": cases.random_packed_mask(1, length, arguments.selected)}
            measure(report, shape, length, masks)
    judge_wide_heads(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
