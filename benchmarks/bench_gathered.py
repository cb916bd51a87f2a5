"""Times attention over key lists, forward and backward, on one CUDA device.

    python benchmarks/bench_gathered.py [--lengths 32768 131072] [--shapes 1.7B 7B heads-256 heads-128]
                                        [--ratios 1 4 8] [--selection FILE ...]

The lists are synthetic: each query has k = 2048 keys, and each tile of 32 queries has r * 2048 keys. TFLOP/s count the
executed work, which is every query of a tile times every key in the list of the tile. The forward pass has 2 products
and the backward pass has 5. The backward pass has three parts. walk_ms is the loop over the lists. add_ms is the
addition of the loop's partial rows per key. turn_ms is the transposition of the lists for these sums.

`--selection` measures selections of a trained model's layers in real text. It takes files that launch/export_indexer.py
wrote. Each file is measured at its own length. These results go to bench_gathered_trained.json.

Before timing, output and gradients are compared with torch in fp64 at CHECKED_LENGTH.
"""

import sys
from pathlib import Path

import cases
import harness
import torch
from cases import AttentionInputs, Shape
from lists_for_bench import random_lists
from torch.profiler import ProfilerActivity, profile
from trained_indexers import read_all, union_ratio

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists
from gsa_kernels.limits import TILE_QUERIES

CHECKED_LENGTH = 2048
TOLERANCE = 1e-2

FORWARD_PROMISES = {("token", 4, 131072): 24.6}
BACKWARD_PROMISES = {("token", 4, 131072): 100.0}
"""Maps (selection, r, length) to the largest allowed ms, for the 1.7B shape."""

PARTS = {
    "walk_ms": ("_backward_kernel", "_add_segments_kernel"),
    "add_ms": ("_add_kernel",),
    "turn_ms": ("_mark_kernel", "_count_kernel", "_place_kernel"),
}
"""Maps a column to the kernels that it counts."""


def attend(x: AttentionInputs, lists: KeyLists) -> torch.Tensor:
    return gathered_attention(x.q, x.k, x.v, lists, x.output_gate)[0]


def check(report: harness.Report, shape: Shape) -> None:
    lists = random_lists(1, CHECKED_LENGTH, 256, 4, cases.DEVICE, 0)
    x = cases.attention_inputs(shape, 1, CHECKED_LENGTH)
    leaves = [x.q, x.k, x.v, x.output_gate]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q, k, v, gate = exact
    wanted = sparse_attention(q, k, v, mask_from_key_lists(lists)).out * gate.sigmoid()
    wanted_grads = torch.autograd.grad(wanted, exact, x.grad.double())
    out = attend(x, lists)
    grads = torch.autograd.grad(out, leaves, x.grad)
    for name, value, want in zip(
        ("out", "q", "k", "v", "gate"), (out, *grads), (wanted, *wanted_grads), strict=True
    ):
        error = harness.relative_error(value, want)
        if not error < TOLERANCE:
            report.fail(f"{shape.name}, {name}: relative error {error:.1e}")


def time_parts(run: harness.Run) -> dict[str, float]:
    """Return the ms in the kernels of each of PARTS."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 1e3 for event in recorded.key_averages()}
    return {column: sum(spent.get(name, 0.0) for name in names) for column, names in PARTS.items()}


def run(
    report: harness.Report, shape: Shape, selection: str, length: int, ratio: float, lists: KeyLists
) -> None:
    x = cases.attention_inputs(shape, 1, length)
    leaves = [x.q, x.k, x.v, x.output_gate]
    kept = attend(x, lists)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(x, lists)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(kept, leaves, x.grad, retain_graph=True)

    times = harness.measure({"forward": forward, "backward": backward})
    peak, _ = harness.peak_bytes(backward)
    entries = int(lists.counts.sum())
    product = 2 * entries * TILE_QUERIES * shape.heads * shape.head_size
    report.row(
        shape=shape.name,
        selection=selection,
        length=length,
        r=ratio,
        entries=entries,
        forward_ms=times["forward"].ms,
        forward_tflops=2 * product / times["forward"].ms / 1e9,
        backward_ms=times["backward"].ms,
        backward_tflops=5 * product / times["backward"].ms / 1e9,
        **time_parts(backward),
        backward_peak_gib=peak / 2**30,
    )
    case = (selection, int(ratio), length)  # cases with a promise have integer ratios
    if shape.name == "1.7B" and case in FORWARD_PROMISES:
        what = f"{selection}, r = {ratio}, {length}"
        report.bar(f"{what}: forward ms", times["forward"].ms, at_most=FORWARD_PROMISES[case])
        report.bar(f"{what}: backward ms", times["backward"].ms, at_most=BACKWARD_PROMISES[case])


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=cases.USUAL)
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--selection", type=Path, nargs="+", default=[], metavar="FILE")
    args = parser.parse_args()
    harness.require_cuda()
    try:
        trained = read_all(args.selection)
    except ValueError as error:
        parser.error(str(error))
    report = harness.Report("bench_gathered_trained" if trained else "bench_gathered", args)
    for name in args.shapes:
        check(report, cases.SHAPES[name])
    for name in args.shapes:
        shape = cases.SHAPES[name]
        for length in trained or args.lengths:
            if trained:
                for layer, indexer in trained[length].items():
                    found = indexer.select()
                    assert found.key_lists is not None
                    ratio = union_ratio(found, indexer)
                    run(report, shape, f"layer {layer}", length, ratio, found.key_lists)
                continue
            for ratio in args.ratios:
                lists = random_lists(1, length, cases.K_BASE, ratio, cases.DEVICE, 0)
                run(report, shape, "token", length, ratio, lists)
    cases.judge_wide_heads(report, "selection", "length", "r")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
