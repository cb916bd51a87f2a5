"""The indexer loss of a short context in its parts, each in the forms that there are, side by side, on one CUDA device.

    python kernels/bench/bench_kl_forms.py [--length 4096] [--batches 1 8] [--parts probabilities gradients]

Shape and dtypes of the 1.7B model in its sparse phase, selection from the kernels. A form of a part is compared with
the part's first one, which is how it ran before, and then takes turns with it. `us` is per sequence; `saved_us` is over
the first form. The whole, from probabilities to gradients, runs as a CUDA graph.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cases
import harness
import torch

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_probs import PROBS_FORMS, head_sum_probs_rows
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.kl.triton_launch import (
    GRADIENT_FORMS,
    Blocks,
    Inputs,
    Outputs,
    choose_blocks,
    chunk_launches,
    score_kind,
)
from gsa_kernels.sampling import RowSample
from gsa_kernels.selection.op import Selection, select_keys

CHUNK_BYTES = 256 * 2**20  # of the target, as `indexer_kl_loss` counts
TOLERANCE = 1e-2  # of a gradient: the four biases have one bf16 rounding each
PARTS = ("selection", "probabilities", "first pass", "gradients", "whole")


@dataclass(frozen=True)
class Layer:
    """What the loss of a layer reads."""

    attention: cases.AttentionInputs
    indexer: cases.IndexerInputs
    ema: torch.Tensor
    beta: torch.Tensor

    @torch.no_grad()
    def select(self, with_log_sum: bool) -> Selection:
        return select_keys(
            self.indexer.q_idx,
            self.indexer.k_idx,
            self.indexer.weight_logits,
            self.ema,
            **self.indexer.biases,
            k_base=cases.K_BASE,
            k_min=cases.K_MIN,
            k_max=cases.K_MAX,
            mode="inverse",
            inverse_temperature=self.beta if with_log_sum else None,
        )


@dataclass(frozen=True)
class Sums:
    """Which sums the loss is given."""

    target: bool
    scores: bool


class Case:
    """A layer, its selection and what follows from it."""

    def __init__(self, batch: int, length: int) -> None:
        shape = cases.SHAPES["1.7B"]
        attention, indexer = cases.attention_inputs(shape, batch, length), cases.indexer_inputs(batch, length)
        beta = torch.tensor([2.0], device=cases.DEVICE)
        first = Layer(attention, indexer, torch.ones((), device=cases.DEVICE), beta).select(False)
        self.layer = Layer(attention, indexer, first.variance.mean(), beta)
        self.selection = self.layer.select(True)
        self.batch, self.length, self.heads = batch, length, shape.heads
        self.q, self.k = attention.q.detach(), attention.k.detach()
        with torch.no_grad():
            self.lse = masked_attention(self.q, self.k, attention.v, self.selection.words)[1]
        rows = max(CHUNK_BYTES // (4 * batch * length) // 128, 1) * 128
        self.chunks = [RowSample(start, min(rows, length - start)) for start in range(0, length, rows)]

    def probabilities(self, form: dict[str, Any]) -> list[torch.Tensor]:
        return [self.target_rows(rows, form) for rows in self.chunks]

    def target_rows(self, rows: RowSample, form: dict[str, Any], fill: bool = False) -> torch.Tensor:
        return head_sum_probs_rows(
            self.q, self.k, self.lse, self.selection.words, rows, dtype=torch.float16, fill=fill, **form
        )

    def inputs(self, sums: Sums) -> Inputs:
        x = self.layer.indexer
        return Inputs(
            q_idx=x.q_idx.detach(),
            k_idx=x.k_idx.detach(),
            weight_logits=x.weight_logits.detach(),
            score_bias=None if x.score_bias is None else x.score_bias.detach(),
            weight_bias=None if x.weight_bias is None else x.weight_bias.detach(),
            beta=self.layer.beta,
            words=self.selection.words,
            document_starts=None,
            kind=score_kind(cases.DTYPE, "sigmoid", x.q_idx.device),
            target_sum=float(self.heads) if sums.target else None,
            log_sum=self.selection.log_sum if sums.scores else None,
        )

    def launches(self, sums: Sums, blocks: Blocks) -> tuple[dict[str, harness.Run], Outputs]:
        """The kernels of all chunks by name. Their target stays as it is made here."""
        inputs = self.inputs(sums)
        heads = inputs.q_idx.shape[2]
        outputs = Outputs(
            row_results=torch.empty(self.batch, self.length, 1 + 3 * heads, device=cases.DEVICE),
            dq=torch.empty_like(inputs.q_idx),
            dk=torch.zeros_like(inputs.k_idx, dtype=torch.float32),
            dw=torch.empty_like(inputs.weight_logits),
        )
        made = [
            chunk_launches(inputs, outputs, self.target_rows(rows, {}), rows, blocks) for rows in self.chunks
        ]
        return {name: partial(run_all, [chunk[name] for chunk in made]) for name in made[0]}, outputs

    def whole(self, sums: Sums, blocks: Blocks, probs: dict[str, Any]) -> list[torch.Tensor]:
        """Value and gradients."""
        x = self.layer.indexer
        loss = indexer_kl_loss(
            x.q_idx,
            x.k_idx,
            x.weight_logits,
            partial(self.target_rows, form=probs),
            **x.biases,
            inverse_temperature=self.layer.beta,
            words=self.selection.words,
            target_sum=float(self.heads) if sums.target else None,
            log_sum=self.selection.log_sum if sums.scores else None,
            row_chunk_bytes=CHUNK_BYTES,
            blocks=blocks,
        )
        assert isinstance(loss, torch.Tensor)
        return [loss.detach(), *torch.autograd.grad(loss, x.leaves)]


def run_all(runs: list[Callable[[], object]]) -> None:
    for run in runs:
        run()


BEFORE, HALF, KNOWN = Sums(False, False), Sums(True, False), Sums(True, True)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_kl_forms", args)
    for batch in args.batches:
        torch.manual_seed(0)
        case = Case(batch, args.length)
        for part in args.parts:
            MEASURES[part](report, case)
    return report.finish()


def say(
    report: harness.Report, part: str, case: Case, runs: dict[str, harness.Run], error: dict[str, float]
) -> None:
    """A row per form; the first is the one that the others are compared with."""
    times = {name: timing.ms for name, timing in harness.measure(runs, budget_ms=60).items()}
    first = next(iter(times.values()))
    for name, ms in times.items():
        report.row(
            part=part,
            form=name,
            batch=case.batch,
            us=1e3 * ms / case.batch,
            saved_us=1e3 * (first - ms) / case.batch,
            error=error.get(name, 0.0),
        )
        if not error.get(name, 0.0) < TOLERANCE:
            report.fail(f"{part}, {name}, batch {case.batch}: error {error[name]:.1e}")


def measure_selection(report: harness.Report, case: Case) -> None:
    plain, summed = case.layer.select(False), case.layer.select(True)
    assert summed.log_sum is not None
    if not torch.equal(plain.words, summed.words) or not summed.log_sum.isfinite().all():
        report.fail("the selection with its sums differs from that without")
    runs: dict[str, harness.Run] = {
        "without log-sums": partial(case.layer.select, False),
        "with": partial(case.layer.select, True),
    }
    say(report, "selection", case, {name: harness.capture(run) for name, run in runs.items()}, {})


def measure_probabilities(report: harness.Report, case: Case) -> None:
    rows = case.chunks[-1]
    wanted = case.target_rows(rows, {}, fill=True)
    error = {
        name: harness.relative_error(case.target_rows(rows, form, fill=True), wanted)
        for name, form in PROBS_FORMS.items()
    }
    runs: dict[str, harness.Run] = {
        name: partial(case.probabilities, form) for name, form in PROBS_FORMS.items()
    }
    say(report, "probabilities", case, runs, error)


def blocks_before(case: Case) -> Blocks:
    return replace(choose_blocks(case.inputs(BEFORE)), one_reduction=False)


def measure_first_pass(report: harness.Report, case: Case) -> None:
    runs = {
        name: case.launches(sums, blocks_before(case))[0]["stats"]
        for name, sums in {"reads the target": BEFORE, "target's sum given": HALF}.items()
    }
    say(report, "first pass", case, runs, {})


def measure_gradients(report: harness.Report, case: Case) -> None:
    """Kernel of the gradients and the reductions after it, for every form; and what both take together."""
    before = blocks_before(case)
    forms = {"before": (BEFORE, before), "sums given": (KNOWN, before)}
    forms |= {f"{name}, sums given": (KNOWN, blocks) for name, blocks in GRADIENT_FORMS.items()}
    gradients: dict[str, harness.Run] = {}
    reductions: dict[str, harness.Run] = {}
    error: dict[str, float] = {}
    wanted: list[torch.Tensor] = []
    for name, (sums, blocks) in forms.items():
        runs, outputs = case.launches(sums, blocks)
        run_all(list(runs.values()))
        assert outputs.dq is not None
        assert outputs.dk is not None
        got = [outputs.dq, outputs.dk.clone(), outputs.row_results[..., 0]]
        wanted = wanted or got
        error[name] = max(map(harness.relative_error, got, wanted))
        gradients[name] = runs["gradients"]
        reductions[name] = partial(run_all, [run for kind, run in runs.items() if kind.startswith("reduce")])
    say(report, "gradients", case, gradients, error)
    say(report, "reductions", case, reductions, error)


def measure_whole(report: harness.Report, case: Case) -> None:
    before, now = blocks_before(case), choose_blocks(case.inputs(KNOWN))
    forms: dict[str, tuple[Sums, Blocks, dict[str, Any]]] = {
        "before": (BEFORE, before, {}),
        "now: sums given, one reduction": (KNOWN, now, {}),
    }
    for name in (
        "three stages",
        *(name for name in GRADIENT_FORMS if name.startswith("8 warps")),
        "all of it",
    ):
        forms[name] = (KNOWN, GRADIENT_FORMS[name], {})
    forms |= {name: (KNOWN, now, probs) for name, probs in PROBS_FORMS.items() if probs}
    runs = {name: partial(case.whole, *form) for name, form in forms.items()}
    wanted = runs["before"]()
    error = {name: max(map(harness.relative_error, run(), wanted)) for name, run in runs.items()}
    say(report, "whole", case, {name: harness.capture(run) for name, run in runs.items()}, error)


MEASURES: dict[str, Callable[[harness.Report, Case], None]] = {
    "selection": measure_selection,
    "probabilities": measure_probabilities,
    "first pass": measure_first_pass,
    "gradients": measure_gradients,
    "whole": measure_whole,
}

if __name__ == "__main__":
    sys.exit(main())
