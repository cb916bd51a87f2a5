"""Tests that `gsa_kernels` works alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gsa_kernels

PACKAGE = Path(gsa_kernels.__file__).parent
ALLOWED = {"torch", "triton", "gsa_kernels"} | sys.stdlib_module_names


def test_torch_triton_and_the_standard_library_are_all_it_imports() -> None:
    others = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            others += [f"{path}: {name}" for name in modules if name.split(".")[0] not in ALLOWED]
    assert others == []


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("gsa_kernels.limits", "torch triton numpy megatron gsa_train gsa_data"),
        ("gsa_kernels.reference, gsa_kernels.api, gsa_kernels.layer", "triton megatron gsa_train gsa_data"),
    ],
)
def test_what_an_import_leaves_out(module: str, left_out: str) -> None:
    """Planning a run needs no torch, and the reference needs no Triton."""
    code = f"import sys, {module}; print({set(left_out.split())} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
