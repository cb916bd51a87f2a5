"""Times the indexer KL, value and all gradients, on one CUDA device, and checks both first.

    python benchmarks/bench_kl.py [--lengths 4096 16384] [--attended sparse]
    python benchmarks/bench_kl.py --lengths 4096 --blocks 64,64,4,32,4,256,2,2 --blocks 128,...

The target is ready in memory, because attention's kernels compute it. Attended set `sparse`: each causal key with
probability 2048 / L. total_ms is value and gradients. graph_ms is the same as a CUDA graph, without the time of the
host where a launch takes longer than a kernel. value_only_ms leaves out the gradients. stats_ms, gradients_ms and
reduce_ms are the kernels for the last last_chunk_rows rows. floor_ms is the time of an H200 for the products plus the
special functions.

Up to `--check-up-to` tokens, value and gradients are compared with torch in fp64 by relative errors.
"""

import argparse
import sys
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import harness
import torch

from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.loss.triton_launch import (
    Blocks,
    Inputs,
    choose_blocks,
    chunk_launches,
    new_outputs,
    score_kind,
)
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_kernels.reference import indexer_kl, indexer_scores, renormalise_target
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Indexer

TOLERANCE = 5e-3
TIGHTER = {"value": 1e-4, "inverse_temperature": 1e-3}

# These are two limits of an H200: measured bf16 products, and special functions (16 per clock and SM).
FLOP_PER_SECOND = 798e12
MUFU_PER_SECOND = 132 * 16 * 1.755e9


@dataclass(frozen=True)
class Case:
    leaves: dict[str, Any]
    """Arguments of the loss, with gradients, in the order of `Inputs`."""
    inputs: Inputs
    """The same values for the kernels."""
    target: torch.Tensor
    """fp32 [1, L, L]"""
    blocks: Blocks
    labels: dict[str, harness.Cell]
    """First columns of its rows."""

    def loss(self) -> torch.Tensor:
        q_idx, k_idx, weight_logits, score_bias, weight_bias, beta = self.leaves.values()
        indexer = Indexer(q_idx, k_idx, weight_logits, score_bias, weight_bias, inverse_temperature=beta)
        target = Target(lambda rows: self.target[:, rows.start : rows.start + rows.count])
        return masked_indexer_loss(indexer, target, Attended(self.inputs.packed_mask), blocks=self.blocks)[0]


def make_case(args: argparse.Namespace, length: int, attended: str, blocks: Blocks | None) -> Case:
    """Build a case; `blocks` defaults to `choose_blocks`."""
    leaves = make_leaves(length, args.heads, args.dim, getattr(torch, args.dtype))
    q_idx, k_idx, weight_logits, score_bias, weight_bias, beta = (leaf.detach() for leaf in leaves.values())
    packed_mask = make_packed_mask(length, 2048 / length) if attended == "sparse" else None
    kind = score_kind(q_idx.dtype, "sigmoid", beta.device)
    biases = (score_bias, weight_bias)
    inputs = Inputs(q_idx, k_idx, weight_logits, *biases, beta.reshape(1), packed_mask, None, kind)
    chosen = blocks or choose_blocks(inputs)
    shown = ",".join(str(int(value)) for value in astuple(chosen))  # in the format of --blocks
    labels = {"length": length, "attended": attended, "dtype": args.dtype, "blocks": shown}
    return Case(leaves, inputs, make_target(length), chosen, labels)


def make_leaves(length: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype).requires_grad_()

    return {
        "q_idx": normal(1, length, heads, dim),
        "k_idx": normal(1, length, dim),
        "weight_logits": normal(1, length, heads),
        "score_bias": normal(heads, dtype=torch.float32),
        "weight_bias": normal(heads, dtype=torch.float32),
        "inverse_temperature": torch.tensor(2.0, device="cuda", requires_grad=True),
    }


def make_target(length: int) -> torch.Tensor:
    """Sum a peaked softmax over 16 heads: fp32 [1, L, L], NaN where a key is not causal."""
    rng = torch.Generator("cuda").manual_seed(1)
    target = torch.empty(1, length, length, device="cuda")
    keys = torch.arange(length, device="cuda")
    for rows in keys.split(1024):  # the logits of all rows would be large
        hidden = keys > rows[:, None]
        logits = 2 * torch.randn(len(rows), length, device="cuda", generator=rng)
        probabilities = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        target[0, rows] = (16 * probabilities).masked_fill(hidden, float("nan"))
    return target


def make_packed_mask(length: int, share: float) -> torch.Tensor:
    """Draw int32 [1, L, ceil(L / 32)]: each causal key with probability `share`, and always the query's own."""
    rng = torch.Generator("cuda").manual_seed(2)
    keys = torch.arange(length, device="cuda")
    parts = []
    for rows in keys.split(1024):  # the mask of all rows would be large
        chosen = torch.rand(1, len(rows), length, device="cuda", generator=rng) < share
        parts.append(pack_mask((chosen | (keys == rows[:, None])) & (keys <= rows[:, None])))
    return torch.cat(parts, 1)


def exact_results(case: Case) -> dict[str, torch.Tensor]:
    """Compute value and gradients by torch in fp64, in chunks of rows."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in case.leaves.items()}
    length, packed_mask = case.target.shape[1], case.inputs.packed_mask
    keys = torch.arange(length, device="cuda")
    value = torch.zeros((), device="cuda", dtype=torch.float64)
    gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
    for start in range(0, length, 512):
        rows = slice(start, start + 512)
        attended = (keys <= keys[rows, None])[None]
        if packed_mask is not None:
            attended = attended & unpack_mask(packed_mask[:, rows], length)
        scores = indexer_scores(
            leaves["q_idx"][:, rows],
            leaves["k_idx"],
            leaves["weight_logits"][:, rows],
            score_bias=leaves["score_bias"],
            weight_bias=leaves["weight_bias"],
        )
        target = renormalise_target(case.target[:, rows].double(), attended)
        loss = indexer_kl(scores, target, attended, leaves["inverse_temperature"]).sum()
        value += loss.detach()
        for total, part in zip(gradients, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total += part
    return {"value": value, **dict(zip(leaves, gradients, strict=True))}


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
    outputs = new_outputs(case.inputs, with_gradients=True, sampled=False, one_chunk=False)
    length = case.target.shape[1]
    chunk = min(length, 256 * 2**20 // (4 * length))
    rows = SampledRows(length - chunk, chunk)
    launches = chunk_launches(case.inputs, outputs, case.target[:, None, rows.start :], rows, case.blocks)
    candidates: dict[str, harness.Run] = {
        "total": case.loss,
        "graph": harness.capture(case.loss),
        "value_only": torch.no_grad()(case.loss),
        **launches,  # in order, because each reads what the previous ones wrote
    }
    times = harness.measure(candidates)
    _, _, heads, dim = case.inputs.q_idx.shape
    pairs = length * (length + 1) / 2
    products = 1e3 * pairs * 4 * 2 * heads * dim / FLOP_PER_SECOND
    special_functions = 1e3 * pairs * (3 * heads + 2) / MUFU_PER_SECOND
    report.row(
        **case.labels,
        **{f"{name}_ms": timed.ms for name, timed in times.items()},
        last_chunk_rows=chunk,
        floor_ms=products + special_functions,
        floor_products_ms=products,
        floor_special_functions_ms=special_functions,
    )


def read_blocks(text: str) -> Blocks:
    fields: list[Any] = [int(field) for field in text.split(",")]
    return Blocks(*fields)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--attended", choices=["all", "sparse", "both"], default="both")
    parser.add_argument(
        "--blocks", type=read_blocks, action="append", help="the fields of Blocks, separated by commas"
    )
    parser.add_argument("--check-up-to", type=int, default=8192, help="compare with fp64 up to this length")
    args = parser.parse_args()
    harness.require_cuda()

    report = harness.Report("bench_kl", args)
    attended_sets = ["all", "sparse"] if args.attended == "both" else [args.attended]
    cases = list(product(args.lengths, attended_sets, args.blocks or [None]))
    for length, attended, blocks in cases:
        if length <= args.check_up_to:
            check(report, make_case(args, length, attended, blocks))
    for length, attended, blocks in cases:
        measure(report, make_case(args, length, attended, blocks))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
