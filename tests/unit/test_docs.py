"""Tests that names in README and docs exist, and that the docs explain what users meet."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import get_type_hints

import pytest

from gsa_study.commands import config_reference as reference
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


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_settings_exist(page: Path) -> None:
    named = re.findall(rf"\b({'|'.join(SECTIONS)})\.(\w+)(?![\w/*]|\.\w)", page.read_text())
    unknown = [
        f"{section}.{name}"
        for section, name in named
        if name not in {field.name for field in fields(SECTIONS[section])} | {"py", "md"}
    ]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)) <= targets
    scripts = set(re.findall(r"(?<![\w/])((?:launch|data|kernels|tests)/[\w/]+\.(?:py|sh))", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).exists()] == []


def test_the_config_reference_matches_the_dataclasses() -> None:
    written = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    assert written == reference.page(), "the config's fields have changed; run `make docs`"


def test_the_config_reference_is_made_without_torch() -> None:
    script = "import sys, gsa_study.commands.config_reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_config_field_without_a_text_is_refused() -> None:
    @dataclass
    class Section:
        explained: int = 1
        """Its meaning."""
        bare: int = 2

    with pytest.raises(ValueError, match=r"Section\.bare: no text"):
        reference.field_texts(Section)


def test_the_code_tour_names_every_file_once_in_the_row_of_its_folder() -> None:
    """All sections of the config are one item of its row."""
    rooms = (ROOT / "docs/code.md").read_text().partition("## Rooms")[2]
    rows = dict(re.findall(r"^\| `([\w/]+)/` \| (.+) \|$", rooms, re.MULTILINE))
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


def test_files_that_comments_name_exist() -> None:
    ours = [
        path
        for folder in (
            "gsa_train",
            "gsa_eval",
            "gsa_study",
            "gsa_hf",
            "kernels",
            "data",
            "launch",
            "benchmarks",
        )
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = {"/" + path.relative_to(ROOT).as_posix() for path in (*ours, *(ROOT / "tests").rglob("*.py"))}
    megatrons = {
        "tensor_parallel/layers.py",
        "training/arguments.py",
    }  # files of megatron-core and Megatron-LM
    lost = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in ours
        for named in re.findall(r"\b(?:\w+/)+\w+\.py\b", path.read_text(encoding="utf-8"))
        if named not in megatrons and not any(name.endswith("/" + named) for name in names)
    ]
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
