"""Compares the whole GSA attention operation with dense attention on one CUDA device, as one layer runs in training.

    python benchmarks/bench_gsa.py [--lengths 4096 8192] [--batches 1 4] [--shapes 1.7B 7B]

GSA is G2, scores, variance, budget and top-k, attention over the selected keys with G1, and the indexer loss of sparse
training with its gradients. Dense is torch SDPA on cuDNN. Both sides leave out the projections. Times are medians in
ms. `kl` is the loss alone; in `both` it is part of attention's backward pass, as in training.

Each row comes twice. `graph` rows run both sides as CUDA graphs, which measures the device alone. `eager` rows include
the launches, which at batch 1 take longer than the kernels. In training these launches overlap with other work.
"""

import sys
from dataclasses import dataclass
from functools import partial

import cases
import harness
import torch
from cases import AttentionInputs, IndexerInputs, Shape

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.hopper.fused_indexer_loss import attention_with_indexer_loss, can_fuse_indexer_loss
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, FusedLoss, Geometry, Selection

CHECKED_LENGTH = 512
TOLERANCE = 1e-2
MOST_PAIRS = 4 * 8192**2
"""Largest B L^2 that is timed, because dense attention is slow beyond; bench_long.py covers longer sequences."""


@dataclass(frozen=True)
class Operation:
    """Runs GSA of one layer, step by step, for random inputs."""

    inputs: AttentionInputs
    indexer: IndexerInputs
    ema: torch.Tensor
    budget: tuple[int, int, int]
    """k_base, k_min and k_max."""

    @torch.no_grad()
    def select(self, with_kl: bool = False) -> Selection:
        rule = BudgetRule(*self.budget)
        return select_keys(self.indexer.of_kernels, rule, self.ema, with_log_sum=with_kl)

    def attend(self, packed_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs
        v = fused_sigmoid_gate(x.v, x.value_gate)
        return masked_attention(x.q, x.k, v, packed_mask, gate_logits=x.output_gate)

    def kl_backward(self, selection: Selection, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, words = self.inputs.q.detach(), self.inputs.k.detach(), selection.packed_mask
        target = Target(
            lambda rows: head_sum_probs_rows(q, k, lse, words, rows, dtype=torch.float16, fill=False),
            float(q.shape[2]),
        )
        attended = Attended(words, selection.log_sum)
        loss, _ = masked_indexer_loss(self.indexer.of_kernels, target, attended)
        return torch.autograd.grad(loss, self.indexer.leaves)

    def distil(self, selection: Selection) -> torch.Tensor:
        """Run `attend` with the indexer loss in the backward pass."""
        x, indexer = self.inputs, self.indexer
        v = fused_sigmoid_gate(x.v, x.value_gate)
        assert selection.packed_mask is not None
        return attention_with_indexer_loss(
            x.q,
            x.k,
            v,
            selection,
            Geometry(),
            FusedLoss(indexer.of_kernels, 1.0),
            x.output_gate,
        )[0]

    def forward(self) -> torch.Tensor:
        return self.attend(self.select().packed_mask)[0]

    def both(self, with_kl: bool, fused: bool | None = None) -> tuple[torch.Tensor, ...]:
        """Return output and gradients of q, k, v and the gates; with the loss also the indexer's gradients.

        Args:
            fused: whether attention's backward pass computes the loss; None: as training chooses
        """
        selection = self.select(with_kl)
        if with_kl and (can_fuse_indexer_loss(self.inputs.q, self.inputs.k) if fused is None else fused):
            out = self.distil(selection)
            return out, *torch.autograd.grad(
                out, (*self.inputs.leaves, *self.indexer.leaves), self.inputs.grad
            )
        out, lse = self.attend(selection.packed_mask)
        indexer_grads = self.kl_backward(selection, lse) if with_kl else ()
        return out, *torch.autograd.grad(out, self.inputs.leaves, self.inputs.grad), *indexer_grads


def operation(shape: Shape, batch: int, length: int, k_base: int, k_min: int, k_max: int) -> Operation:
    """Build an operation whose moving average is the mean variance of its own scores, as in a trained layer."""
    inputs, indexer = cases.attention_inputs(shape, batch, length), cases.indexer_inputs(batch, length)
    budget = (k_base, k_min, k_max)
    first = Operation(inputs, indexer, torch.ones((), device=cases.DEVICE), budget).select()
    return Operation(inputs, indexer, first.variance.mean(), budget)


def check(report: harness.Report, shape: Shape) -> None:
    """Check that GSA with a budget of all keys equals dense attention with both gates."""
    length = CHECKED_LENGTH
    gsa = operation(shape, 2, length, length, length, length)
    wanted = cases.gated_dense(gsa.inputs)
    worst = max(map(harness.relative_error, gsa.both(with_kl=False), wanted))
    report.row(check="GSA of all keys = dense", shape=shape.name, length=length, relative_error=worst)
    if not worst < TOLERANCE:
        report.fail(f"GSA of all keys differs from dense attention by {worst:.1e}, {shape.name}")
    if can_fuse_indexer_loss(gsa.inputs.q, gsa.inputs.k):
        gsa = operation(shape, 2, length, length // 2, 1, length)
        apart = gsa.both(with_kl=True, fused=False)
        worst = max(map(harness.relative_error, gsa.both(with_kl=True, fused=True), apart))
        report.row(
            check="loss fused into attention = by itself",
            shape=shape.name,
            length=length,
            relative_error=worst,
        )
        if not worst < TOLERANCE:
            report.fail(
                f"the loss fused into attention differs from the loss by itself by {worst:.1e}, {shape.name}"
            )


def measure(report: harness.Report, shape: Shape, batch: int, length: int) -> None:
    gsa = operation(shape, batch, length, cases.K_BASE, cases.K_MIN, cases.K_MAX)
    harness.require_finite(f"GSA {shape.name}, {batch} x {length}", gsa.both(with_kl=True))
    dense = cases.cudnn(gsa.inputs)
    selection = gsa.select(with_kl=True)
    lse = gsa.attend(selection.packed_mask)[1]  # frees the output and its autograd graph: see `capture`
    candidates: dict[str, harness.Run] = {
        "dense_forward": dense.forward,
        "dense_both": dense.both,
        "select": gsa.select,
        "forward": gsa.forward,
        "both_without_kl": partial(gsa.both, with_kl=False),
        "kl": partial(gsa.kl_backward, selection, lse),
        "both": partial(gsa.both, with_kl=True),
    }
    modes = {
        "eager": candidates,
        "graph": {name: harness.capture(run) for name, run in candidates.items()},
    }
    for mode, runs in modes.items():
        ms = {name: timing.ms for name, timing in harness.measure(runs).items()}
        ratio = ms["both"] / ms["dense_both"]
        report.row(
            shape=shape.name,
            batch=batch,
            length=length,
            mode=mode,
            **{f"{name}_ms": value for name, value in ms.items()},
            ratio=ratio,
            mean_selected=selection.budget.float().mean().item(),
        )
        if mode == "graph" and length == 4096 and shape.name == "1.7B":
            report.bar(f"GSA / cuDNN, {shape.name}, {batch} x {length}, in graphs", ratio, at_most=2.0)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=cases.USUAL)
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)

    report = harness.Report("bench_gsa", arguments)
    shapes = [cases.SHAPES[name] for name in arguments.shapes]
    for shape in shapes:
        check(report, shape)
    for shape in shapes:
        for batch in arguments.batches:
            for length in arguments.lengths:
                if batch * length**2 <= MOST_PAIRS:
                    measure(report, shape, batch, length)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
