"""Times value and gradients of the indexer's KL loss on one CUDA device, after checking both.

    python benchmarks/bench_kl.py [--lengths 4096 16384] [--heads 8]

The target of the loss (attention probabilities, summed over heads) is an input here, because in training the attention
computes it. Queries attend to all causal keys, or to about 2048 random keys (`sparse`). The columns are times:
- total_ms: the loss and its gradients; graph_ms: the same in a CUDA graph, without launch overhead
- value_only_ms: the loss without gradients
- stats_ms, scores_ms, queries_ms, keys_ms: single kernels on the last chunk of queries, of size last_chunk_rows

At CHECKED_LENGTH tokens, value and gradients are compared with torch in fp64 by relative errors.
"""

import sys
from dataclasses import dataclass, replace
from itertools import product

import cases
import harness
import torch

from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import (
    Inputs,
    choose_blocks,
    chunk_launches,
    new_outputs,
    score_kind,
)
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.reference import indexer_kl, indexer_scores, renormalise_target
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Indexer

NAMES = ("q_idx", "k_idx", "weight_logits", "score_bias", "weight_bias", "inverse_temperature")
CHECKED_LENGTH = 1024
TOLERANCE = 5e-3
TIGHTER = {"value": 1e-4, "inverse_temperature": 1e-3}


@dataclass(frozen=True)
class Case:
    indexer: Indexer
    beta: torch.Tensor
    """The inverse temperature."""
    packed_mask: torch.Tensor | None
    """None: every causal key is attended."""
    target: torch.Tensor
    """fp32 [1, L, L]"""
    labels: dict[str, harness.Cell]
    """First columns of its rows."""

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Return what has gradients, in the order of `Inputs`."""
        return dict(zip(NAMES, [*cases.leaves_of(self.indexer), self.beta], strict=True))

    def loss(self) -> torch.Tensor:
        indexer = replace(self.indexer, inverse_temperature=self.beta)
        target = Target(lambda rows: self.target[:, rows.start : rows.start + rows.count])
        return triton_indexer_loss(indexer, target, Attended(self.packed_mask))[0]


def make_case(length: int, attended: str, heads: int) -> Case:
    torch.manual_seed(0)
    beta = torch.tensor(2.0, device=cases.DEVICE, requires_grad=True)
    mask = cases.random_packed_mask(length, cases.K_BASE) if attended == "sparse" else None
    labels: dict[str, harness.Cell] = {"length": length, "heads": heads, "attended": attended}
    return Case(cases.random_indexer(length, heads=heads), beta, mask, make_target(length), labels)


def make_target(length: int) -> torch.Tensor:
    """Return a random target, fp32 [1, L, L]: for each query, 16 times the softmax of random logits over its causal
    keys. The factor stands for a sum over 16 heads. Keys that are not causal have NaN."""
    rng = torch.Generator(cases.DEVICE).manual_seed(1)
    target = torch.empty(1, length, length, device=cases.DEVICE)
    keys = torch.arange(length, device=cases.DEVICE)
    for rows in keys.split(1024):  # the logits of all rows would be large
        hidden = keys > rows[:, None]
        logits = 2 * torch.randn(len(rows), length, device=cases.DEVICE, generator=rng)
        probabilities = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        target[0, rows] = (16 * probabilities).masked_fill(hidden, float("nan"))
    return target


def exact_results(case: Case) -> dict[str, torch.Tensor]:
    """Compute value and gradients by torch in fp64."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in case.leaves.items()}
    length = case.target.shape[1]
    attended = torch.ones(1, length, length, dtype=torch.bool, device=cases.DEVICE).tril()
    if case.packed_mask is not None:
        attended &= unpack_mask(case.packed_mask, length)
    scores = indexer_scores(
        leaves["q_idx"],
        leaves["k_idx"],
        leaves["weight_logits"],
        score_bias=leaves["score_bias"],
        weight_bias=leaves["weight_bias"],
    )
    target = renormalise_target(case.target.double(), attended)
    loss = indexer_kl(scores, target, attended, leaves["inverse_temperature"]).sum()
    return {
        "value": loss.detach(),
        **dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)),
    }


def check(report: harness.Report, case: Case) -> None:
    loss = case.loss()
    results = (loss, *torch.autograd.grad(loss, list(case.leaves.values())))
    wanted = exact_results(case)
    errors = dict(zip(wanted, map(harness.relative_error, results, wanted.values()), strict=True))
    report.row(**case.labels, **{f"{name}_error": error for name, error in errors.items()})
    for name, error in errors.items():
        limit = TIGHTER.get(name, TOLERANCE)
        if not error < limit:
            about = ", ".join(map(str, case.labels.values()))
            report.fail(f"{name} at {about}: relative error {error:.1e}, at most {limit:g}")


def measure(report: harness.Report, case: Case) -> None:
    q_idx, k_idx, weight_logits, score_bias, weight_bias, beta = (
        leaf.detach() for leaf in case.leaves.values()
    )
    kind = score_kind(cases.DTYPE, "sigmoid", beta.device)
    mask = case.packed_mask
    inputs = Inputs(q_idx, k_idx, weight_logits, score_bias, weight_bias, beta.reshape(1), mask, None, kind)
    blocks = choose_blocks(inputs)
    outputs = new_outputs(inputs, blocks, with_gradients=True, sampled=False, one_chunk=False)
    length = case.target.shape[1]
    chunk = min(length, 256 * 2**20 // (4 * length))
    rows = SampledRows(length - chunk, chunk)
    launches = chunk_launches(inputs, outputs, case.target[:, rows.start :], rows, blocks)
    candidates: dict[str, harness.Run] = {
        "total": case.loss,
        "graph": harness.capture(case.loss),
        "value_only": torch.no_grad()(case.loss),
        **launches,  # in order, because each reads what the previous ones wrote
    }
    times = harness.measure(candidates)
    report.row(
        **case.labels,
        **{f"{name}_ms": ms for name, ms in times.items()},
        last_chunk_rows=chunk,
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=cases.INDEXER_HEADS)
    args = parser.parse_args()
    harness.require_cuda()

    report = harness.Report("bench_kl", args)
    for attended in ("all", "sparse"):
        check(report, make_case(CHECKED_LENGTH, attended, args.heads))
    for length, attended in product(args.lengths, ("all", "sparse")):
        measure(report, make_case(length, attended, args.heads))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
