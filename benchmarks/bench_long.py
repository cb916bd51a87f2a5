"""Compares one layer's attention at long contexts with dense attention on one CUDA device, and with promised figures.

    python benchmarks/bench_long.py [--lengths 32768 131072] [--shapes 1.7B 7B] [--ratios 1 2 4 8]
    python benchmarks/bench_long.py --lengths 262144 524288 1048576 --shapes 1.7B

The `torch cuDNN` and `torch flash` rows measure dense causal attention. The other rows measure GSA on random inputs:
- GSA token: each query selects about 2048 keys. The selection (indexer scores, budget, top-k, key lists) uses random
  indexer inputs, which are similar for neighbouring queries. Gated attention is measured separately, on random key
  lists with a given union ratio r. forward_ms and both_ms (with backward) are selection plus attention.
- GSA token selected: attention uses the key lists from the selection, and r is measured.
- GSA ReLU selected: the recommended ReLU indexer with 8 heads selects 1024 keys per query, plus a window of 64 keys.

Further columns:
- forward_reuse_ms: a quarter of the forward time of four layers that share one selection (gsa.selection_reuse)
- kl_ms: the time of the indexer loss with its gradients; both_kl_ms is both_ms plus kl_ms
- mean_k: the mean budget in `selected` rows
- peak_gib: peak memory of forward and backward, with the key lists that they make, without the inputs

The union ratio r is the number of keys that at least one of 32 neighbouring queries selects, divided by the number of
keys that one query selects. Beyond 131072 tokens, dense attention takes minutes, so the bench measures only cuDNN and
the `selected` rows, in a single round.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cases
import harness
import torch
from cases import AttentionInputs, Shape

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.key_lists.format import HostCounts, KeyLists
from gsa_kernels.limits import TILE_QUERIES
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import list_columns
from gsa_kernels.packed_mask import int32_words
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

CHECKED_LENGTH = 512
TOLERANCE = 1e-2
RECOMMENDED, WINDOW, HEADS = BudgetRule(1024, 1024, 1024, "off"), 64, 8
"""Budget, local window and indexer heads of the recommended configs."""
REUSE = 4
LIKENESS, RECOMMENDED_LIKENESS = 0.9, 0.96
"""Similarity of neighbouring queries' indexer inputs. LIKENESS gives a union ratio (see above) near 4 at 128K tokens
and k = 2048. RECOMMENDED_LIKENESS gives a ratio near 3 with the recommended indexer, as in training."""

PROMISES = (
    # Fields: attention, r, length, column, slower attention, promised ratio per shape.
    ("GSA token", 4, 131072, "forward_ms", "torch cuDNN", {"1.7B": 2.0, "7B": 3.0}),
    ("GSA token", 4, 131072, "forward_ms", "torch flash", {"1.7B": 3.5, "7B": 5.0}),
    ("GSA token", 4, 131072, "both_ms", "torch cuDNN", {"1.7B": 2.2, "7B": 2.6}),
)
REUSE_PROMISE = 4.0
"""Promised speed of forward_reuse_ms relative to cuDNN, at 131072 tokens, for the 1.7B shape."""
PEAK_LENGTH, PEAK_OVER_FLASH = 131072, 1.5
LONGEST_IN_FULL = 131072


@dataclass(frozen=True)
class Selector:
    """Makes the selections of one layer."""

    indexer: Indexer
    ema: torch.Tensor
    rule: BudgetRule
    window: int = 0
    """Number of latest keys that each query always selects."""

    def select(self) -> Selection:
        return select_key_lists(self.indexer, self.rule, self.ema, Geometry(local_window=self.window))


def union_ratio(selection: Selection, selector: Selector) -> float:
    """Return r: the keys that any query of a tile selects, divided by the keys that one query selects."""
    assert selection.key_lists is not None
    mean_k = selection.budget.float().mean().item()
    return selection.key_lists.counts.float().mean().item() / (mean_k + selector.window)


def random_selector(length: int, rule: BudgetRule) -> Selector:
    """Build a selector whose moving average is the mean variance of its own scores, as in a trained layer."""
    first = Selector(cases.random_indexer(length, LIKENESS), torch.ones((), device=cases.DEVICE), rule)
    return replace(first, ema=first.select().variance.mean())


def random_lists(length: int, k: int, ratio: float, seed: int) -> KeyLists:
    """Build random lists for a given union ratio, without a mask of all pairs. Every query selects k keys, and the
    queries of a tile together select ratio * k different keys.

    Each tile of neighbouring queries has a list of n random causal keys of the tile's first query, where n = ratio * k.
    If this query has fewer causal keys, the list has all of them. The ratio must be from 1 to the number of queries in
    a tile. Each query selects k evenly spaced keys of the list, or all keys of a shorter list. The queries begin at
    different offsets, so that together they select the whole list.
    """
    tiles = -(-length // TILE_QUERIES)
    generator = torch.Generator(device=cases.DEVICE).manual_seed(seed)
    visible = torch.arange(tiles, device=cases.DEVICE) * TILE_QUERIES + 1
    counts = visible.clamp(max=round(ratio * k))
    starts = counts.cumsum(0) - counts
    entry, tile = _entries(counts, starts)
    count = counts[tile]
    keys = _spread(entry, count, visible[tile], generator)
    chosen = count.clamp(max=k)
    words = torch.zeros_like(entry)
    offset = torch.randint(2**30, (tiles,), generator=generator, device=cases.DEVICE)[tile]
    for row in range(TILE_QUERIES):
        phase = row * count // TILE_QUERIES + offset
        words |= ((entry * chosen + phase) % count < chosen).long() << row
    return KeyLists(
        keys=keys,
        words=int32_words(words),
        starts=starts[None],
        counts=counts.int()[None],
        length=length,
        host_counts=HostCounts(counts.cpu()[None]),
    )


def _entries(counts: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for every entry its number within its list, and the number of the list."""
    owner = torch.repeat_interleave(counts)
    return torch.arange(len(owner), device=counts.device) - starts[owner], owner


def _spread(
    entry: torch.Tensor, count: torch.Tensor, visible: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw the keys of all lists, int32, ascending in each list. For a list of n keys, the causal keys are divided into
    n equal parts, and entry j of the list is a random key of part j."""
    low, high = entry * visible // count, (entry + 1) * visible // count
    chance = torch.rand(len(entry), generator=generator, device=entry.device)
    return torch.minimum(low + (chance * (high - low)).long(), high - 1).int()


@dataclass(frozen=True)
class Gathered:
    """Runs gated attention over given lists, or over a selection that each pass makes."""

    inputs: AttentionInputs
    lists: KeyLists | Selector
    layers: int = 1
    """Number of layers that attend to the same selection with the same inputs, in the forward pass only."""

    def forward(self) -> torch.Tensor:
        lists = self.lists.select().key_lists if isinstance(self.lists, Selector) else self.lists
        assert lists is not None
        for _ in range(self.layers):
            out, _ = attend(self.inputs, lists)
        return out

    def both(self) -> tuple[torch.Tensor, ...]:
        """Return output and gradients of q, k, v and the gates."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.inputs.leaves, self.inputs.grad)


def attend(x: AttentionInputs, lists: KeyLists) -> tuple[torch.Tensor, torch.Tensor]:
    v = fused_sigmoid_gate(x.v, x.value_gate)
    return gathered_attention(x.q, x.k, v, lists, x.output_gate)


def kl_backward(
    x: AttentionInputs, indexer: Indexer, lists: KeyLists, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return gradients of the indexer loss over the lists. `lse` is from attention over the same lists."""

    def target(rows: SampledRows) -> torch.Tensor:
        return head_sum_probs_lists(x.q, x.k, lse, lists, rows, list_columns(lists), torch.float16)

    attended = Attended(key_lists=lists)
    loss, _ = triton_indexer_loss(indexer, Target(target, float(x.q.shape[2])), attended)
    return torch.autograd.grad(loss, cases.leaves_of(indexer))


@dataclass(frozen=True)
class Case:
    attention: str
    run: cases.Dense | Gathered
    r: float | None = None
    select: str | None = None
    """Name of the selection that belongs to this attention."""
    kl: Callable[[], tuple[torch.Tensor, ...]] | None = None
    mean_k: float | None = None
    lists_bytes: int = 0
    """Size of the lists if a pass makes them."""
    reused: Gathered | None = None
    """For cases that select, REUSE layers that share one selection."""


def check(report: harness.Report, shape: Shape) -> None:
    """Check that GSA with a budget of all keys equals dense attention with both gates."""
    length = CHECKED_LENGTH
    inputs = cases.attention_inputs(shape, length)
    wanted = cases.gated_dense(inputs)
    got = Gathered(inputs, random_selector(length, BudgetRule(length, length, length))).both()
    error = max(map(harness.relative_error, got, wanted))
    report.row(check="GSA token of all keys = dense", shape=shape.name, length=length, relative_error=error)
    if not error < TOLERANCE:
        report.fail(f"GSA token of all keys differs from dense attention by {error:.1e}, {shape.name}")


def selected_case(name: str, inputs: AttentionInputs, selector: Selector) -> Case:
    selection = selector.select()
    lists = selection.key_lists
    assert lists is not None
    mean_k = selection.budget.float().mean().item()
    return Case(
        f"{name} selected",
        Gathered(inputs, selector),
        union_ratio(selection, selector),
        name,
        mean_k=mean_k,
        lists_bytes=sum(x.nbytes for x in (lists.keys, lists.words, lists.starts)),
        reused=Gathered(inputs, selector, REUSE),
    )


def make_cases(inputs: AttentionInputs, ratios: list[float]) -> tuple[list[Case], dict[str, harness.Run]]:
    """Build the rows, and the selections whose time some rows need."""
    length = inputs.q.shape[1]
    table = [Case("torch cuDNN", cases.cudnn(inputs))]
    if length <= LONGEST_IN_FULL:
        table.append(Case("torch flash", cases.flash(inputs)))
    token = random_selector(length, BudgetRule(cases.K_BASE, cases.K_MIN, cases.K_MAX))
    if length <= LONGEST_IN_FULL:
        for seed, ratio in enumerate(ratios):
            lists = random_lists(length, cases.K_BASE, ratio, seed)
            with torch.no_grad():
                lse = attend(inputs, lists)[1]
            kl = partial(kl_backward, inputs, token.indexer, lists, lse)
            table.append(Case("GSA token", Gathered(inputs, lists), ratio, "GSA token", kl))
    indexer = cases.without_biases(cases.random_indexer(length, RECOMMENDED_LIKENESS, HEADS), "relu")
    recommended = Selector(indexer, torch.ones((), device=cases.DEVICE), RECOMMENDED, WINDOW)
    selectors = {"GSA token": token, "GSA ReLU": recommended}
    table += [selected_case(name, inputs, selector) for name, selector in selectors.items()]
    return table, {name: selector.select for name, selector in selectors.items()}


def measure(report: harness.Report, shape: Shape, length: int, ratios: list[float]) -> None:
    """Measure all cases of one shape and length in turns."""
    table, runs = make_cases(cases.attention_inputs(shape, length), ratios)
    peaks = []
    for index, case in enumerate(table):
        both_of: Callable[[], tuple[torch.Tensor, ...]] = case.run.both
        peak, results = harness.peak_bytes(both_of)
        peaks.append(peak)
        harness.require_finite(f"{case.attention}, {shape.name} at {length}", results)
        del results
        runs |= {f"{index} forward": case.run.forward, f"{index} both": case.run.both}
        if case.kl is not None:
            harness.require_finite(f"KL of {case.attention}, {shape.name} at {length}", case.kl())
            runs[f"{index} kl"] = case.kl
        if case.reused is not None and length <= LONGEST_IN_FULL:
            runs[f"{index} reused"] = case.reused.forward
    # Runs of this length need no median.
    limits: dict[str, Any] = {"min_runs": 1, "rounds": 1} if length > LONGEST_IN_FULL else {}
    ms = harness.measure(runs, compiled=True, **limits)
    rows = []
    for index, case in enumerate(table):
        select = ms[case.select] if case.select else None
        added = 0 if case.lists_bytes or select is None else select
        forward, both = ms[f"{index} forward"], ms[f"{index} both"]
        kl, reused = ms.get(f"{index} kl"), ms.get(f"{index} reused")
        row: dict[str, Any] = {
            "shape": shape.name,
            "length": length,
            "attention": case.attention,
            "r": case.r,
            "mean_k": case.mean_k,
            "select_ms": select,
            "attend_forward_ms": forward if added else None,
            "attend_both_ms": both if added else None,
            "kl_ms": kl,
            "forward_ms": forward + added,
            "forward_reuse_ms": None if reused is None else reused / REUSE,
            "both_ms": both + added,
            "both_kl_ms": None if kl is None else both + added + kl,
            "peak_gib": peaks[index] / 2**30,
            "lists_gib": case.lists_bytes / 2**30,
        }
        report.row(**row)
        rows.append(row)
    judge(report, shape, length, rows)


def judge(report: harness.Report, shape: Shape, length: int, rows: list[dict[str, Any]]) -> None:
    found = {(row["attention"], r): row for row in rows for r in (None, row["r"])}
    for attention, r, at_length, column, slower, factors in PROMISES:
        if length == at_length and shape.name in factors and (attention, r) in found:
            factor = found[slower, None][column] / found[attention, r][column]
            what = (
                f"{attention} r={r}, {shape.name} at {length}: {slower} / GSA, {column.removesuffix('_ms')}"
            )
            report.bar(what, factor, at_least=factors[shape.name])
    if (length, shape.name) == (131072, "1.7B"):
        dense = found["torch cuDNN", None]["forward_ms"]
        for row in (row for row in rows if row["forward_reuse_ms"] is not None):
            what = f"{row['attention']}: cuDNN / GSA, forward_reuse"
            report.bar(what, dense / row["forward_reuse_ms"], at_least=REUSE_PROMISE)
    if length == PEAK_LENGTH:
        flash = found["torch flash", None]["peak_gib"]
        for row in rows:
            if row["lists_gib"]:
                what = (
                    f"{row['attention']}, {shape.name} at {length}: peak memory without lists / torch flash"
                )
                report.bar(what, (row["peak_gib"] - row["lists_gib"]) / flash, at_most=PEAK_OVER_FLASH)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=cases.USUAL)
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[1, 2, 4, 8],
        help="of random lists; none without numbers",
    )
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)

    report = harness.Report("bench_long", arguments)
    shapes = [cases.SHAPES[name] for name in arguments.shapes]
    for shape in shapes:
        check(report, shape)
    for length in arguments.lengths:
        for shape in shapes:
            measure(report, shape, length, arguments.ratios)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
