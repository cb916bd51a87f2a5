"""Tests that commands, files, names and numbers in README and docs match the code."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gsa_train.cli import parse_arguments
from gsa_train.config import load_config
from gsa_train.model.flops import count_parameters

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# The log names commands and files as they were at the commit of the entry.
PAGES = [page for page in PAGES if page.name != "LOG.md"]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
RANKS_OF_MAKE = 2


@dataclass(frozen=True)
class Start:
    page: str
    words: str
    """The arguments after the script's name."""
    world_size: int

    def __str__(self) -> str:
        return f"{self.page}: {self.words}"


def starts(page: Path) -> Iterator[Start]:
    name = page.relative_to(ROOT).as_posix()
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"[^`\n]*launch/pretrain\.py --config [^`\n]*", text):
        before, _, words = line.partition("launch/pretrain.py ")
        ranks = re.search(r"--nproc_per_node=(\d+)", before)
        yield Start(name, words, int(ranks[1]) if ranks else 1)
    for words in re.findall(r'make pretrain ARGS="([^"]*)"', text):
        yield Start(name, f"--config configs/demo.yaml {words}", RANKS_OF_MAKE)


STARTS = [start for page in PAGES for start in starts(page) if "--config FILE" not in start.words]


def yaml_block(page: Path) -> str:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(block)


assert len(STARTS) > 12, "there are commands to check"


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_a_run_that_a_page_starts_is_accepted(start: Start, tmp_path: Path) -> None:
    words = shlex.split(start.words)
    if "--resume-from" in words:  # a folder that does not exist here
        place = words.index("--resume-from")
        del words[place : place + 2]
    arguments = parse_arguments(words)
    config_path = ROOT / arguments.config_path
    if arguments.config_path == "small.yaml":  # the reader has saved it
        config_path = tmp_path / "small.yaml"
        config_path.write_text(yaml_block(DOCS / "how_to/own_config.md"), encoding="utf-8")
    world_size = arguments.world_size if arguments.dry_run else start.world_size
    load_config(config_path, arguments.overrides, world_size, need_data=False)


def markdown_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(page: Path) -> set[str]:
    outside_code = re.sub(r"^```.*?^```", "", markdown_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, DOCS / "LOG.md", *NOTEBOOKS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_and_their_anchors_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", markdown_of(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", ["gsa_1.7b", "gsa_7b"])
def test_parameters_in_concepts_match_the_dry_run(name: str) -> None:
    config = load_config(ROOT / f"configs/{name}.yaml")
    count = count_parameters(config.model, config.gsa, config.moe)
    # The final norm belongs to no layer.
    layers = count.attention + count.mlp + count.norms - config.model.hidden_size
    added = count.gates + count.indexer
    plain = layers + config.model.hidden_size + count.embedding + count.output
    row = (
        f"| `{name}.yaml` | {count.gates:,} | {count.indexer:,} | {layers:,} | {added / layers:.1%} | "
        f"{added / plain:.2%} |"
    )
    assert row in (DOCS / "concepts.md").read_text(encoding="utf-8")


# ---- pages of results


def values_of(table: Path) -> dict[tuple[str, str], float]:
    with table.open(encoding="utf-8", newline="") as file:
        return {(row["arm"], row["key"]): float(row["value"]) for row in csv.DictReader(file)}


def test_readme_has_the_spikes_of_the_350m_study() -> None:
    found = values_of(ROOT / "docs/results/four_models_350m.csv")
    spikes = [found[arm, "spikes"] for arm in ("gated_only", "standard")]
    assert "{:.0f} with gates, {:.0f} without".format(*spikes) in (ROOT / "README.md").read_text("utf-8")
