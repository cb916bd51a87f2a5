"""Tests rules of the sources that import-linter and ruff (pyproject.toml) cannot express."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("gsa_train", "gsa_eval", "gsa_study", "gsa_hf", "kernels/gsa_kernels", "data/gsa_data")
PACKAGES = tuple(ROOT / name for name in NAMES)
PLANNING_MODULES = ("config", "cli", "planning.dry_run", "planning.choices")
LONGEST_FILE_LINES = 450


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    files = [path for folder in (*PACKAGES, ROOT / "tests") for path in folder.rglob("*.py")]
    assert {path.name for path in files} >= {"train.py", "gsa_attention.py", "stream.py", "reference.py"}
    lines = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lines.items() if length >= LONGEST_FILE_LINES} == {}


def test_no_code_of_a_folder_of_transformers_is_run() -> None:
    """If unset, `trust_remote_code` asks on the standard input."""
    calls = [
        (path.name, call.lineno, {word.arg: ast.unparse(word.value) for word in call.keywords})
        for package in PACKAGES
        for path in package.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and re.match(r"Auto\w+\.from_", ast.unparse(call.func))
    ]
    assert {name for name, _, _ in calls} >= {"read_hf.py", "text_model.py"}
    assert [call for call in calls if call[2].get("trust_remote_code") != "False"] == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    paths = sorted({str(package.parent) for package in PACKAGES})
    words = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)


def test_planning_loads_neither_torch_nor_megatron() -> None:
    """A wrong config is reported at once, also on a machine without accelerators."""
    names = ", ".join(f"gsa_train.{module}" for module in PLANNING_MODULES)
    result = run_python(f"import {names}; print({{'torch', 'megatron', 'numpy'}} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


def test_checkpoint_refuses_to_load_without_psutil() -> None:
    """Without psutil megatron-core's writer fails in every save, which the start should report."""
    result = run_python("sys.modules['psutil'] = None; import gsa_train.checkpoint.load")
    assert result.returncode != 0
    assert "psutil" in result.stderr.splitlines()[-1]


def test_what_make_starts_outside_pytest_finds_every_package_that_tests_find() -> None:
    (listed,) = re.findall(r"^pythonpath = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (given,) = re.findall(r"^WITH_PACKAGES = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = {each or "." for each in re.findall(r"\$\(CURDIR\)/?([^:]*)", given)}
    only_for_test_files = {"tests/kernels"}
    assert found == set(re.findall(r'"([^"]+)"', listed)) - only_for_test_files
