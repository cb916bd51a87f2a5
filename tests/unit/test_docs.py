"""Tests that names in README and docs exist, and that the docs explain what users meet."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import get_type_hints

import pytest

from gsa_study.commands import config_reference as reference
from gsa_study.commands import frontier
from gsa_study.figure import plots
from gsa_train.config import Config
from gsa_train.metrics.panels import PANELS
from gsa_train.model.probes.stats import EXTREMES, MEANS, VECTORS
from gsa_train.process import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The log names commands and settings as they were at the commit of the entry.
PAGES = [page for page in PAGES if page.name != "LOG.md"]


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


HINTS = get_type_hints(Config)
SECTIONS = {field.name: HINTS[field.name] for field in fields(Config) if is_dataclass(HINTS[field.name])}


def unknown_settings(text: str) -> list[str]:
    named = re.findall(rf"\b({'|'.join(SECTIONS)})\.(\w+)(?![\w/*]|\.\w)", text)
    fields_of = {
        name: {field.name for field in fields(section)} | {"py", "md"} for name, section in SECTIONS.items()
    }
    return [f"{section}.{name}" for section, name in named if name not in fields_of[section]]


def missing_commands(text: str) -> list[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = set(re.findall(r"(?<![\w/])((?:launch|data|kernels|tests)/[\w/]+\.(?:py|sh))", text))
    missing = [script for script in scripts if not (ROOT / script).exists()]
    return missing + sorted(set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)) - targets)


def repository_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    files = (path for path in ROOT.rglob("*") if ".venv" not in path.parts)
    return listed.stdout.splitlines() or [path.relative_to(ROOT).as_posix() for path in files]


FILES = ["/" + name for name in repository_files()]
MADE_BY_READERS = {"small.yaml", "config.yaml", "0.jsonl", "tokenizer.json", "sample.json"}


def missing_files(text: str) -> list[str]:
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh|ipynb|yaml))`", text)) - MADE_BY_READERS
    return [name for name in named if not any(file.endswith("/" + name.removeprefix("./")) for file in FILES)]


def unknown_options_of_benches(text: str) -> list[str]:
    shared = [ROOT / "benchmarks/harness.py", *(ROOT / "benchmarks/whole_steps").glob("*.py")]
    missing = []
    for words in map("".join, re.findall(r"`([^`\n]+)`|^(python .+)$", text, re.MULTILINE)):
        if bench := re.search(r"\b(bench_\w+)\b", words):
            files = (ROOT / "benchmarks" / f"{bench[1]}.py", *shared)
            source = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
            missing += [option for option in re.findall(r"--[a-z-]+", words) if f'"{option}"' not in source]
    return missing


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/README.md"], ids=_id)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown_settings(text) + missing_commands(text) + missing_files(text) == []
    if page.parent.name != "results":  # launch/results.py writes these pages
        assert unknown_options_of_benches(text) == []


def test_the_config_reference_matches_the_dataclasses() -> None:
    written = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    assert written == reference.page(), "the config's fields have changed; run `make docs`"


def test_each_row_of_the_frontier_has_numbers_and_their_commits() -> None:
    rows = frontier.table((ROOT / frontier.PAGE).read_text(encoding="utf-8"))
    for row in rows:
        assert re.findall(r"\b[0-9a-f]{8}\b|\b[0-9a-f]{7}\b", list(row.values())[-1]), row
        assert any(row[column] for column in (*frontier.RETRIEVAL, *frontier.LENGTHS)), row
        frontier.draw(plots(1, 1)[1][0], row)


def test_the_code_tour_names_every_file_once_in_the_row_of_its_folder() -> None:
    """All sections of the config are one item of its row."""
    folders = (ROOT / "docs/code.md").read_text().partition("## Folders")[2]
    rows = dict(re.findall(r"^\| `([\w/]+)/` \| (.+) \|$", folders, re.MULTILINE))
    sections = {"sections.py", *(f"{field.name}.py" for field in fields(Config))}
    named, there = {}, {}
    for package in ("gsa_train", "gsa_eval", "gsa_study", "gsa_hf"):
        for file in (ROOT / package).rglob("*.py"):
            folder = file.parent.relative_to(ROOT).as_posix()
            if file.name != "__init__.py" and (folder != "gsa_train/config" or file.name not in sections):
                there.setdefault(folder, []).append(file.name)
    for folder in there:
        named[folder] = sorted(re.findall(r"`(\w+\.py)`", rows.get(folder, "")))
    assert named == {folder: sorted(files) for folder, files in there.items()}


def test_files_and_sections_that_comments_name_exist() -> None:
    folders = ("gsa_train", "gsa_eval", "gsa_study", "gsa_hf", "kernels", "data", "launch", "benchmarks")
    ours = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    names = {"/" + path.relative_to(ROOT).as_posix() for path in (*ours, *(ROOT / "tests").rglob("*.py"))}
    megatrons = {"tensor_parallel/layers.py", "training/arguments.py"}  # of megatron-core and Megatron-LM
    lost = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in ours
        for named in re.findall(r"\b(?:\w+/)+\w+\.py\b", path.read_text(encoding="utf-8"))
        if named not in megatrons and not any(name.endswith("/" + named) for name in names)
    ]
    for path in (*ours, *(ROOT / "configs").glob("*.yaml"), *(ROOT / "studies").glob("*.yaml")):
        text = re.sub(r"\n[#\s]*", " ", path.read_text(encoding="utf-8"))
        for page, section in re.findall(r"\b(docs/[\w/]+\.md), \"([^\"]+)\"", text):
            headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
            lost += [] if section in headings else [f"{path.relative_to(ROOT)}: {page}, {section}"]
    assert lost == []


def test_metrics_of_the_layers_and_all_that_are_shown_are_explained() -> None:
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/reference/monitoring.md").read_text(), re.MULTILINE)
    explained = set(re.findall(r"`([\w*]+)`", "\n".join(table)))
    shown = {key for panel in PANELS for key in (*panel.keys, panel.per_entry) if key}
    shown |= {f"validation_{panel.per_set}" for panel in PANELS if panel.per_set}
    shown |= {*MEANS, *EXTREMES, *VECTORS}
    assert sorted(key for key in shown if not any(fnmatch(key, name) for name in explained)) == []


def test_exit_codes_match_the_table() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [int(row) for row in rows] == [0, *codes]
    job = (ROOT / "launch" / "slurm" / "job.sh").read_text(encoding="utf-8")
    assert set(re.findall(r"\bexit (\d+)", job)) >= {str(exit_codes.STOPPED_BY_MONITOR)}
