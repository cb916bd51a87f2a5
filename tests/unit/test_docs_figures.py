"""Tests figures and options in pages and in headers of configs that the code can compute."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from gsa_train.config import load_config
from gsa_train.planning.memory.estimate import estimate_memory, fields_of

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
PEAK = re.compile(r"^# Peak memory by --dry-run is (\d+) GiB .* or (\d+) GiB with (\S+) \(", re.MULTILINE)
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if PEAK.search(path.read_text("utf-8"))]
STUDIES = ROOT / "docs/how_to/studies.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md"]
# The log names options as they were at the commit of the entry; launch/results.py writes pages of results.
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"LOG.md", "results"} & {*page.parts}]


def peak_gib(path: Path, overrides: list[str]) -> float:
    config = load_config(path, overrides, world_size=8, need_data=False)
    stages = range(config.parallel.pipeline)
    estimates = [estimate_memory(config, phase, 8, stage) for phase in config.phases for stage in stages]
    return max(fields_of(estimate)["total"] for estimate in estimates) / GIB


def test_there_are_figures_to_check() -> None:
    assert len(CONFIGS) == 20


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_memory_in_the_header_of_a_config_matches_the_dry_run(path: Path) -> None:
    found = PEAK.search(path.read_text(encoding="utf-8"))
    assert found
    of_80_gb, of_141_gb, override = found.groups()
    assert peak_gib(path, []) == pytest.approx(int(of_80_gb), abs=0.51)
    assert peak_gib(path, [override]) == pytest.approx(int(of_141_gb), abs=0.51)


def arms_in_words(study: Path) -> str:
    content = yaml.safe_load(study.read_text(encoding="utf-8"))
    seeds = [len(arm.get("seeds", content.get("seeds", [1]))) for arm in content["arms"]]
    (most, count), *others = sorted(Counter(seeds).items(), key=lambda item: -item[1])
    if not others:
        return f"{count} arms"
    ((other, its_count),) = others
    if most == 1:
        return f"{len(seeds)} arms, {its_count} of them with {other} seeds"
    return f"{count} arms with {most} seeds, {its_count} with one"


def test_the_table_of_studies_has_their_numbers_of_arms() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+\.yaml)` \| .* \| (.+) \|$", STUDIES.read_text(encoding="utf-8"), re.MULTILINE)
    )
    files = [
        path for path in (ROOT / "studies").glob("*.yaml") if "question:" in path.read_text(encoding="utf-8")
    ]
    assert rows == {path.name: arms_in_words(path) for path in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_of_benches_that_a_page_names_exist(page: Path) -> None:
    shared = [ROOT / "benchmarks/harness.py", *(ROOT / "benchmarks/whole_steps").glob("*.py")]
    missing = []
    for span in re.findall(r"`([^`\n]+)`|^(python .+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = "".join(span)
        bench = re.search(r"\b(bench_\w+|spikes\.py|data_wait\.py)", words)
        if not bench:
            continue
        path = ROOT / "benchmarks" / (bench[1].removesuffix(".py") + ".py")
        source = "".join(file.read_text(encoding="utf-8") for file in (path, *shared))
        missing += [
            f"{path.name} {option}"
            for option in re.findall(r"--[a-z-]+", words)
            if f'"{option}"' not in source
        ]
    assert missing == []


# ---- pages of results


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


LENGTHS = ("4096", "8192", "16384", "32768")
# A text in performance.md, the beginning of a row after it, and numbers of the row by the number of their cell.
MEASURED: list[tuple[str, str, dict[int, float]]] = [
    ("### Attention at long", "| 128K, r = 4", dict(enumerate(attention(131072, "token_r4"), 1))),
    *(("With 2048 keys", f"| {n} |", {1: step(n, "gsa")}) for n in (*LENGTHS, "65536", "131072")),
    *(("With a rotary indexer", f"| {n} |", {cell: step(n, f"gsa_rope_reuse_k{keys}")})
      for cell, keys in ((1, 1024), (3, 512)) for n in LENGTHS),
    ("With a rotary indexer", "| 65536 |", {1: step("65536_12_layers", "gsa_rope_reuse_k1024")}),
    *(("### Decoding", f"| 128K, {n} seq", {2: 1 / EFFICIENCY[f"decode_131072_{n}_GSA", "time"]}) for n in (1, 16)),
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
    assert len(rows) == 4
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
