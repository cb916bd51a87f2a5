"""The direction of the imports, and the few rules that a reader of this repository relies on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN, KERNELS, DATA = ROOT / "gsa_train", ROOT / "kernels" / "gsa_kernels", ROOT / "data" / "gsa_data"
PACKAGES = (TRAIN, KERNELS, DATA)
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

MAY_IMPORT_MEGATRON = ("parallel.py", "cpu_backend.py", "model/", "step.py", "bench/megatron_peer.py")
MAY_IMPORT_MEGATRON += ("optimizer/mcore.py", "optimizer/norms.py", "optimizer/adamw_state.py")
MAY_IMPORT_MEGATRON += tuple(f"checkpoint/{name}.py" for name in ("load", "save", "write", "optimizer_state"))
MAY_IMPORT_DEEPSPEED = ("optimizer/zero.py", "optimizer/zero_parts.py")
PLANNING_MODULES = ("config", "cli", "dry_run")
LONGEST_FILE_LINES = 450


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


EACH_FILE = pytest.mark.parametrize("path", FILES, ids=name_of)


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement of a syntax tree with the full name of each module or member that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported_names(path: Path) -> frozenset[str]:
    return frozenset(name for _, name in imports(tree_of(path)))


def names_within(path: Path, *modules: str) -> set[str]:
    """What `path` imports of these modules."""
    return {
        name
        for name in imported_names(path)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def test_there_are_files_to_check() -> None:
    assert {path.name for path in FILES} >= {"train.py", "gsa_attention.py", "stream.py", "reference.py"}


@EACH_FILE
def test_imports_point_one_way(path: Path) -> None:
    if path.is_relative_to(KERNELS):
        assert not names_within(path, "gsa_train", "gsa_data", "megatron")
    elif path.is_relative_to(DATA):
        assert not names_within(path, "gsa_train", "gsa_kernels", "megatron", "torch.distributed")
    else:
        assert not names_within(path, "tests", "helpers", "launch")


@pytest.mark.parametrize("path", sorted(TRAIN.rglob("*.py")), ids=name_of)
def test_only_a_few_rooms_of_gsa_train_know_megatron(path: Path) -> None:
    room = path.relative_to(TRAIN).as_posix()
    if not room.startswith(MAY_IMPORT_MEGATRON):
        assert not names_within(path, "megatron")


@EACH_FILE
def test_only_two_rooms_know_deepspeed(path: Path) -> None:
    if path not in [TRAIN / name for name in MAY_IMPORT_DEEPSPEED]:
        assert not names_within(path, "deepspeed")


def test_only_parallel_imports_the_cpu_backend_and_only_when_it_needs_it() -> None:
    importers = []
    for path in FILES:
        tree = tree_of(path)
        at_module_level = {node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        for node, name in imports(tree):
            if name.startswith("gsa_train.cpu_backend"):
                importers.append((name_of(path), node in at_module_level))
    assert importers == [("gsa_train/parallel.py", False)]


@EACH_FILE
def test_no_handler_catches_everything(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {kind.id for kind in caught if isinstance(kind, ast.Name)}
        assert not names & {"Exception", "BaseException"}, f"line {node.lineno}: catches everything"


def test_no_two_test_files_have_one_name() -> None:
    """`make test-gpu` collects all folders in one process, where pytest imports them by name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@EACH_FILE
def test_no_file_is_longer_than_a_reader_can_hold(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_FILE_LINES


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    paths = [str(package.parent) for package in PACKAGES]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_planning_loads_neither_torch_nor_megatron() -> None:
    """A wrong config is reported at once, also on a machine without accelerators."""
    names = ", ".join(f"gsa_train.{module}" for module in PLANNING_MODULES)
    result = run_python(f"import {names}; print({{'torch', 'megatron', 'numpy'}} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


def test_checkpoint_refuses_to_load_without_psutil() -> None:
    """Without it megatron-core's writer fails, in every save; the start is the better time to say so."""
    result = run_python("sys.modules['psutil'] = None; import gsa_train.checkpoint.load")
    assert result.returncode != 0
    assert "psutil" in result.stderr.splitlines()[-1]
