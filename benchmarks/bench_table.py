"""Measures the attention kernels on the grid of cudnn-frontend's sparse-attention benchmark; writes CSV and a page.

    python benchmarks/bench_table.py [--variants qwen3.8 minimax] [--lengths 4096 8192 16384 32768 65536]

The grid is benchmark/sparse_attention_training of github.com/NVIDIA/cudnn-frontend. A case of the grid has
one sequence in bf16, a given selection and no indexer. The grid draws a random selection for each query. We
add dense attention by cuDNN.

The first columns of the table are the columns of cudnn-frontend's grid. `flops` and `tflops` count two matrix
products over the selected entries, as the grid does. `r` is the number of keys that any of 32 neighbouring
queries selects, divided by the number of keys that one query selects.

Two things differ from the grid. gsa_kernels does not support the grid's shapes with latent keys of 512 and
576. The variant `minimax` has one selection for all key-value heads here, but one per head in the grid.

The results go to bench_table.json and bench_table.csv in --out, and with --page FILE to a page of Markdown.
"""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import harness
import torch
from cases import AttentionInputs, Shape

from gsa_kernels import limits
from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.key_lists.format import KeyLists, mask_from_key_lists, union_density
from gsa_kernels.key_lists.triton_build import FilledLists, count_keys, fill_lists, join_lists
from gsa_kernels.packed_mask import pack_mask, unpack_mask

LENGTHS = (4096, 8192, 16384, 32768, 65536)
CHECKED_LENGTH = 1024
TOLERANCE = 1e-2
CHUNK_NUMBERS = 2**24
"""Random numbers drawn at a time, one for each row and entry."""
COLUMNS = (
    *("variant", "seqlen", "h_q", "h_kv", "d_k", "d_v", "granularity", "topk", "group_scope", "dtype"),
    *("backend", "ms", "tflops", "flops", "note", "selection", "r", "both_ms"),
)


@dataclass(frozen=True)
class Variant:
    shape: Shape
    granularity: int
    """Tokens per entry."""
    entries: int
    """Largest number of entries per query."""
    forced_tail: bool
    """Whether the query's own entry, up to the query, is always selected."""
    note: str = ""


VARIANTS = {
    "qwen3.8": Variant(Shape("qwen3.8", 24, 2, 256), 4, 512, True),
    "minimax": Variant(Shape("minimax", 64, 4, 128), 128, 16, False, "one selection for all key-value heads"),
}


def random_rows(variant: Variant, rows: range, generator: torch.Generator) -> torch.Tensor:
    """Draw packed masks [1, rows, ceil(rows.stop / 32)] of random entries that begin at or before the query."""
    size, device = variant.granularity, generator.device
    positions = torch.arange(rows.start, rows.stop, device=device)
    entries = torch.arange(-(-rows.stop // size), device=device)
    chance = torch.rand(len(rows), len(entries), generator=generator, device=device)
    chance = chance.masked_fill(entries > (positions // size)[:, None], -1.0)
    if variant.forced_tail:
        chance[torch.arange(len(rows), device=device), positions // size] = 2.0
    best = chance.topk(min(variant.entries, len(entries)), -1)
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, best.indices, best.values >= 0)
    keys = torch.arange(rows.stop, device=device)
    selected = chosen.repeat_interleave(size, 1)[:, : rows.stop]
    return pack_mask(selected[None] & (keys <= positions[:, None]))


@dataclass(frozen=True)
class Selected:
    """Holds the selection of all queries, in the format that `select` would choose at this length."""

    packed_mask: torch.Tensor | None
    lists: KeyLists | None
    r: float

    def attend(self, x: AttentionInputs) -> torch.Tensor:
        if self.lists is not None:
            return gathered_attention(x.q, x.k, x.v, self.lists)[0]
        return masked_attention(x.q, x.k, x.v, self.packed_mask)[0]

    def mask(self, length: int) -> torch.Tensor:
        """Return bool [1, L, L]."""
        if self.packed_mask is not None:
            return unpack_mask(self.packed_mask, length)
        assert self.lists is not None
        return mask_from_key_lists(self.lists)

    @property
    def backend(self) -> str:
        return "gsa masked" if self.lists is None else "gsa lists"


def select(variant: Variant, length: int, seed: int = 0) -> Selected:
    generator = torch.Generator(device=cases.DEVICE).manual_seed(seed)
    step = max(CHUNK_NUMBERS // -(-length // variant.granularity) // 32, 1) * 32
    masks: list[torch.Tensor] = []
    filled: list[FilledLists] = []
    selected = 0
    for start in range(0, length, step):
        rows = range(start, min(start + step, length))
        mask = random_rows(variant, rows, generator)
        selected += int(sum(((mask >> bit) & 1).sum() for bit in range(32)))
        filled.append(fill_lists(count_keys(mask, rows).wait()))
        if length <= limits.PACKED_MASK_MAX_TOKENS:
            masks.append(torch.nn.functional.pad(mask, (0, -(-length // 32) - mask.shape[2])))
    lists = join_lists(filled, length)
    r = lists.keys.numel() / lists.counts.numel() / (selected / length)
    measured = length >= limits.MEASURED_FROM_TOKENS
    if masks and not (measured and union_density(lists) < limits.GATHERED_BELOW_DENSITY):
        return Selected(torch.cat(masks, 1), None, r)
    return Selected(None, lists, r)


def count_flops(variant: Variant, length: int) -> int:
    """Count the operations of the forward pass as the grid does: whole entries, 2 products."""
    begun = (torch.arange(length) // variant.granularity + 1).clamp(max=variant.entries)
    tokens = int(begun.sum()) * variant.granularity
    return 2 * tokens * variant.shape.heads * 2 * variant.shape.head_size


def check(report: harness.Report, name: str) -> None:
    variant = VARIANTS[name]
    chosen = select(variant, CHECKED_LENGTH)
    x = cases.attention_inputs(variant.shape, 1, CHECKED_LENGTH)
    mask = chosen.mask(CHECKED_LENGTH)
    exact = [each.detach().double().requires_grad_() for each in (x.q, x.k, x.v)]
    q, k, v = exact
    wanted = sparse_attention(q, k, v, mask).out
    out = chosen.attend(x)
    got = [out, *torch.autograd.grad(out, [x.q, x.k, x.v], x.grad)]
    wanted_all = [wanted, *torch.autograd.grad(wanted, exact, x.grad.double())]
    error = max(map(harness.relative_error, got, wanted_all))
    report.row(check=name, length=CHECKED_LENGTH, relative_error=error)
    if not error < TOLERANCE:
        report.fail(f"{name}: relative error {error:.1e}")


def measure(report: harness.Report, name: str, length: int) -> None:
    variant = VARIANTS[name]
    shape = variant.shape
    x = cases.attention_inputs(shape, 1, length)
    chosen, dense = select(variant, length), cases.cudnn(x)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return chosen.attend(x)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(chosen.attend(x), [x.q, x.k, x.v], x.grad)

    runs: dict[str, harness.Run] = {"random forward": forward, "random both": both}
    refused = {}
    for part, run in (("forward", dense.forward), ("both", dense.both)):
        try:
            run()
            runs[f"dense {part}"] = run
        except RuntimeError as refusal:  # on some devices cuDNN has no gradients for heads of 256
            refused[part] = str(refusal).splitlines()[0]
    times = {key: timing.ms for key, timing in harness.measure(runs).items()}
    flops = count_flops(variant, length)
    for kind, found in (("random", chosen), ("dense", None)):
        ms = times.get(f"{kind} forward")
        cells: dict[str, Any] = {
            "variant": name,
            "seqlen": length,
            "h_q": shape.heads,
            "h_kv": shape.kv_heads,
            "d_k": shape.head_size,
            "d_v": shape.head_size,
            "granularity": variant.granularity,
            "topk": variant.entries,
            "group_scope": 1,
            "dtype": "bfloat16",
            "backend": "cudnn dense" if found is None else found.backend,
            "ms": ms,
            "tflops": None if ms is None or found is None else flops / ms / 1e9,
            "flops": flops,
            "note": variant.note if found is not None else "; ".join(refused.values()),
            "selection": kind,
            "r": None if found is None else found.r,
            "both_ms": times.get(f"{kind} both"),
        }
        report.row(**cells)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(row[name]) for name in COLUMNS} for row in rows)
    return text.getvalue()


def as_page(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, str]) -> str:
    """Format Markdown: a table for each variant, with hardware and commit."""
    lines = [
        "# Sparse attention on cudnn-frontend's grid",
        "",
        "The table has times in ms of attention over given selections, without indexer and selection.",
        f"`make bench-table` writes this page. {harness.describe(environment)}.",
        "",
        "An entry is a group of neighbouring keys. `random` means that each query has its own random entries.",
        "`dense` is cuDNN with all keys.",
        "r is the number of keys that any of 32 neighbouring queries selects, divided by the keys of one query.",
        "The number in parentheses is the dense time divided by this time.",
        "",
        "Random selections are the worst case of these kernels. 32 neighbouring queries read a tile of keys together,",
        "and random selections have keys in common only by chance. Selections of trained layers have a smaller r",
        "([performance.md](performance.md#measured)).",
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        first = mine[0]
        lines += [
            "",
            f"## {variant}: {first['h_q']} query heads, {first['h_kv']} key-value heads of {first['d_k']}, "
            f"{first['topk']} entries of {first['granularity']}",
            "",
            "| tokens | selection | kernel | r | forward | TFLOP/s | forward + backward | note |",
            "|---|---|---|---|---|---|---|---|",
        ]
        dense = {row["seqlen"]: row for row in mine if row["selection"] == "dense"}
        for row in mine:
            cells = [
                _cell(row[name])
                for name in ("seqlen", "selection", "backend", "r", "ms", "tflops", "both_ms", "note")
            ]
            for place, key in ((4, "ms"), (6, "both_ms")):
                beside = dense[row["seqlen"]][key]
                if row["selection"] != "dense" and row[key] and beside:
                    cells[place] += f" ({beside / row[key]:.2f}x)"
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--page", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    report = harness.Report("bench_table", arguments)
    for name in arguments.variants:
        check(report, name)
    for name in arguments.variants:
        for length in arguments.lengths:
            measure(report, name, length)
    rows = [row for row in report.rows if "variant" in row]
    report.path.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    if arguments.page is not None:
        arguments.page.write_text(as_page(rows, report.environment), encoding="utf-8")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
