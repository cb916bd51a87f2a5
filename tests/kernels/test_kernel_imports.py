"""`gsa_kernels` is of use alone: torch, triton and the standard library are all it may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gsa_kernels

PACKAGE = Path(gsa_kernels.__file__).parent
ALLOWED = {"torch", "triton", "gsa_kernels"} | sys.stdlib_module_names


def test_imports() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            for module in modules:
                assert module.split(".")[0] in ALLOWED, f"{path.name}:{node.lineno} imports {module}"


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("gsa_kernels.limits", "torch triton numpy megatron gsa_train gsa_data"),
        (
            "gsa_kernels.operations_reference, gsa_kernels.reference, gsa_kernels.api, gsa_kernels.layer",
            "triton megatron gsa_train gsa_data",
        ),
    ],
)
def test_what_an_import_leaves_out(module: str, left_out: str) -> None:
    """Planning a run needs no torch, the reference no Triton."""
    code = f"import sys, {module}; print({set(left_out.split())} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
