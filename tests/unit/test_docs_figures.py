"""Figures and options in pages and in headers of configs that the code can say itself."""

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
PEAK = re.compile(
    r"^# Peak memory of a GPU, by --dry-run, (\d+) GiB .*; (\d+) GiB with (\S+) for", re.MULTILINE
)
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if PEAK.search(path.read_text("utf-8"))]
STUDIES = ROOT / "docs/how_to/studies.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md"]
# The log names options as they were at the commit of the entry; pages of results are made by launch/results.py.
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"LOG.md", "results"} & {*page.parts}]


def peak_gib(path: Path, overrides: list[str]) -> float:
    config = load_config(path, overrides, world_size=8, need_data=False)
    stages = range(config.parallel.pipeline)
    estimates = [estimate_memory(config, phase, 8, stage) for phase in config.phases for stage in stages]
    return max(fields_of(estimate)["total"] for estimate in estimates) / GIB


def test_there_are_figures_to_check() -> None:
    assert len(CONFIGS) > 20


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_memory_in_the_header_of_a_config_is_that_of_the_dry_run(path: Path) -> None:
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


def at_128k(selection: str, key: str) -> list[float]:
    """Times as fast as dense attention, of the 1.7B and the 7B shape."""
    return [1 / EFFICIENCY[f"layer_{shape}_131072_{selection}", key] for shape in ("1.7B", "7B")]


TO_32K = (4096, 8192, 16384, 32768)


def step(length: int | str, model: str) -> float:
    """Times as fast as the standard model's."""
    return 1 / EFFICIENCY[f"step_1.7b_{length}_{model}", "time"]


def steps(model: str, *lengths: int) -> list[float]:
    return [step(length, model) for length in lengths]


def decoding(model: str) -> list[float]:
    return [1 / EFFICIENCY[f"decode_131072_{sequences}_{model}", "time"] for sequences in (1, 16)]


# Beginning of a row of README's tables, how many rows below it, and the numbers there in their order.
MEASURED: list[tuple[str, int, list[float]]] = [
    ("a selection for each query, as", 0, steps("gsa", *TO_32K, 65536, 131072)),
    ("a selection for each query, as", 1, [
        *steps("shared_rope", *TO_32K), step("65536_12_layers", "shared_rope"), step(131072, "shared")
    ]),
    ("a selection for each query, as", 2, [
        *steps("shared_rope_k1024", *TO_32K), step("65536_12_layers", "shared_rope_k1024")
    ]),
    ("a selection for each query, as", 3, steps("shared_rope_k512", *TO_32K)),
    ("a selection for each query, as", 4, steps("shared_rope_reuse_k512", *TO_32K)),
    ("a selection for each query\\*", 0, at_128k("token_r4", "forward")),
    ("a selection for each query\\*", 1, at_128k("token_r4", "forward_backward")),
    ("a selection for each query\\*", 2, at_128k("block_selected", "forward")),
    ("a selection for each query\\*", 3, at_128k("block_selected", "forward_backward")),
    ("a selection for each token", 0, decoding("GSA")),
    ("a selection for each token", 1, decoding("GSA_shared")),
]  # fmt: skip


@pytest.mark.parametrize(("start", "below", "numbers"), MEASURED)
def test_the_tables_of_readme_have_the_numbers_of_the_benches(
    start: str, below: int, numbers: list[float]
) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (first,) = (place for place, line in enumerate(lines) if line.startswith(f"| {start}"))
    written = re.findall(r"\d+\.\d+", lines[first + below])
    assert written == [
        f"{number:.{len(text.partition('.')[2])}f}" for number, text in zip(numbers, written, strict=True)
    ]


def test_readme_has_the_perplexities_and_the_speed_of_the_350m_study() -> None:
    found = values_of(ROOT / "docs/results/four_models_350m.csv")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    starts = ("- **The selection that we recommend**", "- **The paper's selection**")
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    perplexity = {arm: value for (arm, key), value in found.items() if key == "val_perplexity"}
    speed = {arm: value for (arm, key), value in found.items() if key == "tokens_per_second"}
    numbers = [
        perplexity["block_32"],
        perplexity["standard"],
        speed["standard"] / speed["block_32"],
        perplexity["gated_only"],
        speed["gated_only"] / speed["block_32"],
        perplexity["window_alone"],
        perplexity["gsa"],
        perplexity["sparse_only"],
        speed["sparse_only"] / speed["block_32"],
    ]
    assert re.findall(r"\d+\.\d+", " ".join(lines)) == [f"{number:.2f}" for number in numbers]
    (gates,) = (line for line in text.splitlines() if line.startswith("- **Gates**"))
    spikes = [found[arm, "spikes"] for arm in ("gated_only", "standard")]
    assert "spikes of the loss, {:.0f} for {:.0f}".format(*spikes) in gates


def test_no_number_of_a_page_stands_twice() -> None:
    """A text that refers to it would have one of them."""
    twice = []
    for table in sorted((ROOT / "docs/results").glob("*.csv")):
        with table.open(encoding="utf-8", newline="") as file:
            names = Counter((row["arm"], row["seed"], row["key"], row["at"]) for row in csv.DictReader(file))
        twice += [(table.name, *name) for name, count in names.items() if count > 1]
    assert twice == []
