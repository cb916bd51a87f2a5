"""Times the indexer KL over key lists, value and all gradients, on one CUDA device.

    python benchmarks/bench_gathered_kl.py [--lengths 32768 131072] [--shapes 1.7B 7B] [--ratios 1 4 8]

target_ms is the time for attention probabilities of all entries, summed over heads. both_ms is the time for the target,
the loss and its gradients in chunks, as in training. quarter_ms is both_ms for a quarter of the tiles (row_fraction = 1
/ 4).

Before timing, target, value and gradients are compared with torch in fp64 at CHECKED_LENGTH.
"""

import sys
from functools import partial

import cases
import harness
import torch
from cases import IndexerInputs, Shape
from lists_for_bench import random_lists

from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists
from gsa_kernels.loss.gathered import TargetTiles, gathered_indexer_loss
from gsa_kernels.reference import indexer_kl, indexer_scores, renormalise_target
from gsa_kernels.types import RowSample

CHECKED_LENGTH = 2048
TOLERANCE = 1e-2

PROMISES = {(4, 131072): 60.0}
"""Maps (r, length) to the largest allowed ms of both stages, for the 1.7B shape."""


class Attention:
    """Holds queries, keys and a log-sum-exp that makes each row's probabilities sum to about 1 per head."""

    def __init__(self, shape: Shape, length: int, selected: int) -> None:
        self.q = cases.normal(1, length, shape.heads, shape.head_size)
        self.k = cases.normal(1, length, shape.kv_heads, shape.head_size)
        keys = torch.arange(1, length + 1, device="cuda").clamp(max=selected)
        self.lse = (keys.log() + 0.5).float().expand(1, shape.heads, length).contiguous()

    def target(self, lists: KeyLists, tiles: torch.Tensor) -> torch.Tensor:
        return head_sum_probs_lists(self.q, self.k, self.lse, lists, tiles)


def loss_of(
    x: IndexerInputs, lists: KeyLists, target_tiles: TargetTiles, row_fraction: float = 1.0
) -> tuple[torch.Tensor, ...]:
    loss, _ = gathered_indexer_loss(x.of_kernels, target_tiles, lists, RowSample(row_fraction, seed=0))
    return loss, *torch.autograd.grad(loss, x.leaves)


def check(report: harness.Report, shape: Shape) -> None:
    length = CHECKED_LENGTH
    lists = random_lists(1, length, 256, 4, "cuda", 0)
    attention, x = Attention(shape, length, 256), cases.indexer_inputs(1, length)
    loss, *gradients = loss_of(x, lists, partial(attention.target, lists))

    mask = mask_from_key_lists(lists)
    target = torch.zeros(1, length, length, device="cuda", dtype=torch.float64)
    for head in range(shape.heads):
        keys = attention.k[0, :, head * shape.kv_heads // shape.heads].double()
        logits = attention.q[0, :, head].double() @ keys.T * shape.head_size**-0.5
        target[0] += torch.where(mask[0], (logits - attention.lse[0, head, :, None].double()).exp(), 0)
    leaves = [leaf.detach().double().requires_grad_() for leaf in x.leaves]
    scores = indexer_scores(*leaves[:3], score_bias=leaves[3], weight_bias=leaves[4])
    wanted = indexer_kl(scores, renormalise_target(target, mask), mask).sum()
    for name, value, want in zip(
        ("loss", "q_idx", "k_idx", "weight_logits", "score_bias", "weight_bias"),
        (loss, *gradients),
        (wanted, *torch.autograd.grad(wanted, leaves)),
        strict=True,
    ):
        error = harness.relative_error(value, want)
        if not error < TOLERANCE:
            report.fail(f"{shape.name}, {name}: relative error {error:.1e}")


def run(report: harness.Report, shape: Shape, length: int, ratio: int) -> None:
    lists = random_lists(1, length, cases.K_BASE, ratio, "cuda", 0)
    attention, x = Attention(shape, length, cases.K_BASE), cases.indexer_inputs(1, length)
    target = partial(attention.target, lists)

    def all_targets() -> None:
        every = torch.arange(lists.counts.shape[1], device="cuda", dtype=torch.int32)
        for tiles in every.split(128):  # the target of all tiles would take gigabytes
            target(tiles)

    times = harness.measure(
        {
            "target": all_targets,
            "both": lambda: loss_of(x, lists, target),
            "quarter": lambda: loss_of(x, lists, target, 0.25),
        }
    )
    peak, _ = harness.peak_bytes(lambda: loss_of(x, lists, target))
    report.row(
        shape=shape.name,
        length=length,
        r=ratio,
        entries=int(lists.counts.sum()),
        target_ms=times["target"].ms,
        both_ms=times["both"].ms,
        quarter_ms=times["quarter"].ms,
        peak_gib=peak / 2**30,
    )
    limit = PROMISES.get((ratio, length))
    if limit is not None and shape.name == "1.7B":
        report.bar(f"r = {ratio}, {length}: ms", times["both"].ms, at_most=limit)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=cases.USUAL)
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_gathered_kl", args)
    for name in args.shapes:
        check(report, cases.SHAPES[name])
    for name in args.shapes:
        for length in args.lengths:
            for ratio in args.ratios:
                run(report, cases.SHAPES[name], length, ratio)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
