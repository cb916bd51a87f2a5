"""What README and docs name exists, and what users meet is in them."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import get_type_hints

import pytest

from gsa_train.config import Config
from gsa_train.report.panels import PANELS
from gsa_train.run import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]
HINTS = get_type_hints(Config)
SECTIONS = {field.name: HINTS[field.name] for field in fields(Config) if is_dataclass(HINTS[field.name])}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_exist(page: Path) -> None:
    named = re.findall(rf"\b({'|'.join(SECTIONS)})\.(\w+)(?![\w/*]|\.\w)", page.read_text())
    unknown = [
        f"{section}.{name}"
        for section, name in named
        if name not in {field.name for field in fields(SECTIONS[section])} | {"py", "md"}
    ]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)) <= targets
    scripts = set(re.findall(r"\b((?:launch|data|kernels|tests)/[\w/]+\.(?:py|sh))", text))
    assert [script for script in sorted(scripts) if not (ROOT / script).exists()] == []


def test_the_code_tour_has_every_file() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs/code.md").read_text(), re.MULTILINE)
    named = set()
    for row in rows:
        paths = [Path(name) for name in re.findall(r"`([\w/.<>*]+)`", row)]
        named |= {path if len(path.parts) > 1 else paths[0].parent / path for path in paths}
    package = ROOT / "gsa_train"
    sections = {f"config/{name}.py" for name in SECTIONS} | {"config/phases.py"}
    files = {
        file for file in package.rglob("*.py") if file.name != "__init__.py" and file.parent.name != "bench"
    }
    expected = {
        file.relative_to(ROOT) for file in files if file.relative_to(package).as_posix() not in sections
    }
    assert sorted(map(str, expected - named)) == []
    ours = {path for path in named if path.parts[0] == "gsa_train"}
    assert [str(path) for path in sorted(ours) if not (ROOT / path).exists()] == []


def test_metrics_that_are_shown_are_explained() -> None:
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE)
    explained = set(re.findall(r"`([\w*]+)`", "\n".join(table)))
    shown = {key for panel in PANELS for key in (*panel.keys, panel.per_entry) if key}
    shown |= {f"validation_{panel.per_set}" for panel in PANELS if panel.per_set}
    assert sorted(key for key in shown if not any(fnmatch(key, name) for name in explained)) == []


def test_exit_codes_are_those_of_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [int(row) for row in rows] == [0, *codes]
    job = (ROOT / "launch" / "slurm" / "job.sh").read_text(encoding="utf-8")
    assert set(re.findall(r"\bexit (\d+)", job)) >= {str(exit_codes.STOPPED_BY_MONITOR)}
