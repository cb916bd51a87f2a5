"""Times the indexer scores and the selection on a GPU, and checks the selection beside each time.

python kernels/bench/bench_selection.py [--lengths 4096 32768] [--query-start 98304] [--candidates-from 8192]
    [--profile] [--json FILE]

Per length: the score pass and the selection pass over the same chunks of rows; both together as `select_keys`
runs them, by all scores and by candidates; the same to key lists, as `select_key_lists` runs them; torch.topk
over the same scores (its sort, without the words). All are medians of CUDA events. `best / scores` is the faster
way to the lists over the score pass. TFLOP/s count the products of the causal pairs, 2 HI DI each; GB/s count one
write (scores) or one read (selection) of each causal score. --query-start N takes the queries from N on and all keys,
as a context-parallel rank has them. --profile adds each kernel's share of the lists.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from gsa_kernels import adaptive_budget, select_top_k, visible_mask
from gsa_kernels.indexer.triton_scores import ScoreInputs, score_inputs, score_tiles, write_scores
from gsa_kernels.lists.key_lists import KeyLists
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.selection.op import (
    ROW_CHUNK_BYTES,
    Selection,
    mask_from_words,
    new_outputs,
    score_rows,
    select_chunk,
    select_keys,
)
from gsa_kernels.selection.score_chunks import chunk_view, row_chunks, score_buffer

HEADS, DIM = 4, 64
K_BASE, K_MIN, K_MAX = 2048, 256, 4096
RULE: dict[str, Any] = {"k_base": K_BASE, "k_min": K_MIN, "k_max": K_MAX, "mode": "inverse"}


@dataclass
class Row:
    length: int
    scores_ms: float
    selection_ms: float
    select_keys_ms: float
    candidates_ms: float
    lists_ms: float
    candidate_lists_ms: float
    best_ratio: float
    topk_ms: float
    scores_tflops: float
    scores_gbps: float
    selection_gbps: float
    mean_k: float
    correct: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--query-start", type=int, default=0, help="position of the first query")
    parser.add_argument("--candidates-from", type=int, default=8192, help="keys of the first such row")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel too")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if not 0 <= args.query_start < min(args.lengths):
        parser.error(f"--query-start is {args.query_start}; pass 0 to {min(args.lengths) - 1}")

    about = {
        "commit": _commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": args.dtype,
        "first query": args.query_start,
        "heads x dim": f"{HEADS} x {DIM}",
        "k": f"base {K_BASE}, {K_MIN} to {K_MAX}",
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    columns = ["length", "scores ms", "selection ms", "select_keys ms", "by candidates ms", "lists ms"]
    columns += ["lists by candidates ms", "best / scores", "topk ms"]
    columns += ["TFLOP/s", "write GB/s", "read GB/s", "mean k", "correct"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    rows = []
    for length in args.lengths:
        row = measure(
            length, args.query_start, getattr(torch, args.dtype), args.candidates_from, args.profile
        )
        rows.append(row)
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in asdict(row).values()]
        print("| " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def measure(length: int, query_start: int, dtype: torch.dtype, candidates_from: int, profiled: bool) -> Row:
    """Of the queries from `query_start` on, with all `length` keys."""
    generator = torch.Generator("cuda").manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    # The keys wider than the queries: logits of standard deviation 1.5, sigmoids neither flat nor saturated.
    q_idx, k_idx, weights = draw(1, length, HEADS, DIM), draw(1, length, DIM) * 1.5, draw(1, length, HEADS)
    q_idx, weights = q_idx[:, query_start:].contiguous(), weights[:, query_start:].contiguous()
    num_rows, options = length - query_start, {**RULE, "query_start": query_start}
    budget_rule = (K_BASE, K_MIN, min(K_MAX, length), "inverse")

    def select(ema: torch.Tensor, start: int | None = None) -> Selection:
        return select_keys(q_idx, k_idx, weights, ema, **options, candidates_from=start)

    def select_lists(start: int | None = None) -> KeyLists:
        return select_key_lists(q_idx, k_idx, weights, ema, **options, candidates_from=start).lists

    ema = select(torch.ones((), device="cuda")).variance.mean()
    selection = select(ema)
    narrowed = select(ema, candidates_from)

    inputs = score_inputs(q_idx, k_idx, weights, query_start=query_start)
    chunks = list(row_chunks(1, num_rows, score_tiles(inputs).rows, ROW_CHUNK_BYTES, query_start=query_start))
    buffer = score_buffer(inputs, chunks)
    outputs = new_outputs(inputs)
    views = [(rows, chunk_view(buffer, inputs, rows)) for rows in chunks]

    def scores_pass() -> None:
        for rows, view in views:
            write_scores(inputs, rows.start, rows.stop, view)

    def selection_pass() -> None:
        # What the chunks before the last left in the buffer is overwritten, but scores all the same.
        for rows, view in views:
            select_chunk(view, rows, outputs, inputs, ema, budget_rule, 0)

    def topk_pass() -> None:
        for rows, view in views:
            num_keys = query_start + rows.stop
            view[..., :num_keys].topk(min(K_BASE, num_keys), sorted=False)

    scores_ms = median_ms(scores_pass)
    selection_ms = median_ms(selection_pass)
    lists_ms = median_ms(select_lists)
    candidate_lists_ms = median_ms(lambda: select_lists(candidates_from))
    if profiled:
        print_kernels(lambda: select_lists(candidates_from))
    pairs = num_rows * (query_start + length + 1) / 2
    return Row(
        length=length,
        scores_ms=scores_ms,
        selection_ms=selection_ms,
        select_keys_ms=median_ms(lambda: select(ema)),
        candidates_ms=median_ms(lambda: select(ema, candidates_from)),
        lists_ms=lists_ms,
        candidate_lists_ms=candidate_lists_ms,
        best_ratio=min(lists_ms, candidate_lists_ms) / scores_ms,
        topk_ms=median_ms(topk_pass),
        scores_tflops=2 * HEADS * DIM * pairs / scores_ms / 1e9,
        scores_gbps=4 * pairs / scores_ms / 1e6,
        selection_gbps=4 * pairs / selection_ms / 1e6,
        mean_k=selection.budget.float().mean().item(),
        correct=is_correct(inputs, selection, ema) and is_correct(inputs, narrowed, ema),
    )


def median_ms(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=25, rep=150, return_mode="median"))


def print_kernels(run: Callable[[], object]) -> None:
    """What each kernel takes in one run, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times = sorted(
        ((event.device_time_total / 1e3, event.count, event.key[:60]) for event in profile.key_averages()),
        reverse=True,
    )
    for ms, count, name in times[:12]:
        print(f"  {ms:8.3f} ms in {count:4d} launches: {name}")


def is_correct(inputs: ScoreInputs, selection: Selection, ema: torch.Tensor, sample: int = 64) -> bool:
    """Budget and selection equal the reference's on some rows at the start, in the middle and at the end."""
    num_rows, length = inputs.q_idx.shape[1], inputs.k_idx.shape[1]
    sample = min(sample, num_rows)
    for start in (0, (num_rows - sample) // 2, num_rows - sample):
        rows = torch.arange(start, start + sample, device="cuda")
        visible = visible_mask(length, query_positions=inputs.query_start + rows)
        scores = score_rows(
            inputs.q_idx,
            inputs.k_idx,
            inputs.weight_logits,
            start,
            start + sample,
            query_start=inputs.query_start,
        )
        scores = torch.where(visible, scores, 0)
        budget = adaptive_budget(
            selection.variance[:, rows],
            ema,
            visible.sum(-1),
            k_base=K_BASE,
            k_min=K_MIN,
            k_max=K_MAX,
            mode="inverse",
        )
        wanted = select_top_k(scores, visible, budget)
        found = mask_from_words(selection.words[:, rows], length)
        if not (torch.equal(budget.int(), selection.budget[:, rows]) and torch.equal(wanted, found)):
            return False
    return True


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
