"""Times the indexer scores and the selection on one CUDA device, and checks each selection.

    python benchmarks/bench_selection.py [--lengths 4096 32768]

The bench times the score pass and the selection pass over the same chunks of queries. Further columns:
- select_keys_ms: `select_keys`, which runs both passes and searches all scores
- candidates_ms: `select_keys` when it searches only candidates (keys whose score reaches an estimated threshold)
- lists_ms and candidate_lists_ms: `select_key_lists` with all scores and with candidates
- best_ratio: the smaller of lists_ms and candidate_lists_ms, divided by the time of the score pass
- topk_ms: torch.topk over the same scores, for comparison
TFLOP/s counts 2 HI DI operations per causal query-key pair, with HI heads of size DI. GB/s assumes that each causal
score is written once (score pass) or read once (selection pass).
"""

import sys
from dataclasses import asdict

import harness
import torch
from cases import INDEXER_HEADS, INDEXER_SIZE, K_BASE, K_MAX, K_MIN, random_indexer, without_biases

from gsa_kernels.indexer.triton_scores import write_scores
from gsa_kernels.limits import SELECTION_CHUNK_BYTES
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.reference import adaptive_budget, causal_mask, select_top_k
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.selection.op import (
    Selector,
    new_outputs,
    score_rows,
    select_chunk,
    select_keys,
)
from gsa_kernels.selection.score_chunks import chunk_view
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

RULE = BudgetRule(K_BASE, K_MIN, K_MAX)
CANDIDATES_FROM = 8192
"""Number of keys from which a row is selected by candidates, in the runs that use candidates."""


def measure(report: harness.Report, length: int) -> None:
    torch.manual_seed(length)
    indexer, geometry = without_biases(random_indexer(length), "sigmoid"), Geometry()

    def select(ema: torch.Tensor, start: int | None = None) -> Selection:
        return select_keys(indexer, RULE, ema, geometry, candidates_from=start)

    def select_lists(start: int | None = None) -> Selection:
        return select_key_lists(indexer, RULE, ema, geometry, candidates_from=start)

    ema = select(torch.ones((), device="cuda")).variance.mean()
    selection = select(ema)
    for way, found in (("all scores", selection), ("candidates", select(ema, CANDIDATES_FROM))):
        if not is_correct(indexer, geometry, found, ema):
            report.fail(f"selection of {length} tokens by {way}")

    selector = Selector(indexer, RULE, ema, geometry, SELECTION_CHUNK_BYTES, None)
    outputs = new_outputs(selector.inputs)
    views = [(rows, chunk_view(selector.buffer, selector.inputs, rows)) for rows in selector.chunks]

    def scores_pass() -> None:
        for rows, view in views:
            write_scores(selector.inputs, rows.start, rows.stop, view)

    def selection_pass() -> None:
        # All chunks share one buffer, so a chunk finds scores of other chunks. Any scores do for timing.
        for rows, view in views:
            select_chunk(selector.criteria, view, rows, outputs)

    def topk_pass() -> None:
        for rows, view in views:
            view[..., : rows.stop].topk(min(K_BASE, rows.stop), sorted=False)

    candidates: dict[str, harness.Run] = {
        "scores": scores_pass,
        "selection": selection_pass,
        "select_keys": lambda: select(ema),
        "candidates": lambda: select(ema, CANDIDATES_FROM),
        "lists": select_lists,
        "candidate_lists": lambda: select_lists(CANDIDATES_FROM),
        "topk": topk_pass,
    }
    ms = harness.measure(candidates)
    pairs = length * (length + 1) / 2
    report.row(
        length=length,
        **{f"{name}_ms": time for name, time in ms.items()},
        best_ratio=min(ms["lists"], ms["candidate_lists"]) / ms["scores"],
        scores_tflops=2 * INDEXER_HEADS * INDEXER_SIZE * pairs / ms["scores"] / 1e9,
        scores_gbps=4 * pairs / ms["scores"] / 1e6,
        selection_gbps=4 * pairs / ms["selection"] / 1e6,
        mean_k=selection.budget.float().mean().item(),
    )


def is_correct(indexer: Indexer, geometry: Geometry, selection: Selection, ema: torch.Tensor) -> bool:
    """Compare budget and selection with the reference implementation, on some rows at the start, in the middle and at
    the end."""
    num_rows, length = indexer.queries.shape[1], indexer.keys.shape[1]
    assert selection.packed_mask is not None
    sample = min(64, num_rows)
    for start in (0, (num_rows - sample) // 2, num_rows - sample):
        rows = torch.arange(start, start + sample, device="cuda")
        visible = causal_mask(length, query_positions=rows)
        scores = score_rows(indexer, range(start, start + sample), geometry)
        scores = torch.where(visible, scores, 0)
        budget = adaptive_budget(selection.variance[:, rows], ema, visible.sum(-1), **asdict(RULE))
        wanted = select_top_k(scores, visible, budget)
        found = unpack_mask(selection.packed_mask[:, rows], length)
        if not (torch.equal(budget.int(), selection.budget[:, rows]) and torch.equal(wanted, found)):
            return False
    return True


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_selection", args)
    for length in args.lengths:
        measure(report, length)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
