"""Tests that figures in pages match the tables of results."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def values_of(table: Path) -> dict[tuple[str, str], float]:
    with table.open(encoding="utf-8", newline="") as file:
        return {(row["arm"], row["key"]): float(row["value"]) for row in csv.DictReader(file)}


EFFICIENCY = values_of(ROOT / "docs/results/efficiency.csv")


def attention(tokens: int, selection: str) -> list[float]:
    """Return the speed relative to dense attention: forward, forward + backward; 1.7B and 7B shape in turn."""
    keys = ("forward", "forward_backward")
    cells = [(f"layer_{shape}_{tokens}_{selection}", key) for key in keys for shape in ("1.7B", "7B")]
    return [1 / EFFICIENCY[cell] for cell in cells]


def step(length: str, model: str) -> float:
    return 1 / EFFICIENCY[f"step_1.7b_{length}_{model}", "time"]


SHARED = {2048: "shared_rope", 1024: "shared_rope_k1024", 512: "shared_rope_k512"}
LENGTHS = ("4096", "8192", "16384", "32768")
# A text in performance.md, the beginning of a row after it, and numbers of the row by the number of their cell.
MEASURED: list[tuple[str, str, dict[int, float]]] = [
    ("### Attention at long", "| 128K, a selection for each", dict(enumerate(attention(131072, "token_r4"), 1))),
    ("### Attention at long", "| 128K, a selection for 32", dict(enumerate(attention(131072, "block_selected"), 1))),
    *(("With 2048 keys", f"| {n} |", {1: step(n, "gsa")}) for n in (*LENGTHS, "65536", "131072")),
    *((f"With {keys} keys", f"| {n} |", {3 if keys == 2048 else 1: step(n, model)})
      for keys, model in SHARED.items() for n in LENGTHS),
    ("With 2048 keys", "| 65536 |", {3: step("65536_12_layers", "shared_rope")}),
    ("With 2048 keys", "| 131072 |", {3: step("131072", "shared")}),
    ("With 1024 keys", "| 65536 |", {1: step("65536_12_layers", "shared_rope_k1024")}),
    *(("With 512 keys", f"| {n} |", {3: step(n, "shared_rope_reuse_k512")}) for n in LENGTHS),
    *(("### Decoding", f"| 128K, {n} seq", {cell: 1 / EFFICIENCY[f"decode_131072_{n}_{model}", "time"]
      for cell, model in ((2, "GSA"), (3, "GSA_shared"))}) for n in (1, 16)),
]  # fmt: skip


@pytest.mark.parametrize(("after", "start", "numbers"), MEASURED)
def test_the_tables_of_performance_have_the_numbers_of_the_benches(
    after: str, start: str, numbers: dict[int, float]
) -> None:
    text = (ROOT / "docs/reference/performance.md").read_text(encoding="utf-8").partition(after)[2]
    line = next(line for line in text.splitlines() if line.startswith(start))
    for cell, number in numbers.items():
        found = re.findall(r"\d+\.\d+", line.split("|")[cell + 1])
        assert found == [f"{number:.{len(found[0].partition('.')[2])}f}"], line


def test_readme_has_the_perplexities_and_the_speed_of_the_350m_study() -> None:
    found = values_of(ROOT / "docs/results/four_models_350m.csv")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\(`(\w+)`\) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    standard = found["standard", "tokens_per_second"]
    for arm, perplexity, speed in rows:
        assert perplexity == f"{found[arm, 'val_perplexity']:.2f}", arm
        assert speed == f"{found[arm, 'tokens_per_second'] / standard:.2f}", arm
    spikes = [found[arm, "spikes"] for arm in ("gated_only", "standard")]
    assert "{:.0f} with gates, {:.0f} without".format(*spikes) in text


def test_no_number_of_a_page_stands_twice() -> None:
    """A text that refers to a repeated number would match only one of its places."""
    twice = []
    for table in sorted((ROOT / "docs/results").glob("*.csv")):
        with table.open(encoding="utf-8", newline="") as file:
            names = Counter((row["arm"], row["seed"], row["key"], row["at"]) for row in csv.DictReader(file))
        twice += [(table.name, *name) for name, count in names.items() if count > 1]
    assert twice == []
