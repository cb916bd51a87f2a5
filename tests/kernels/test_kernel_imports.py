"""Tests that `gsa_kernels` works alone, and exports nine names: the functions and types that a model calls."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gsa_kernels
from gsa_kernels import reference

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


def test_the_nine_names_are_the_real_ones() -> None:
    """The test imports all modules in one process, because a folder with a function's name would replace the
    function."""
    functions, types = (
        "select sparse_attention indexer_loss decode_step",
        "Selection Geometry Indexer BudgetRule",
    )
    assert gsa_kernels.__all__ == [*functions.split(), *types.split(), "GatedSparseAttention"]
    assert gsa_kernels.indexer_loss.__module__ == gsa_kernels.select.__module__ == "gsa_kernels.api"
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 40, 4, 32), torch.randn(1, 40, 2, 32), torch.randn(1, 40, 2, 32)
    indexer = gsa_kernels.Indexer(torch.randn(1, 40, 2, 16), torch.randn(1, 40, 16), torch.randn(1, 40, 2))
    rule, ema = gsa_kernels.BudgetRule(8, 4, 16, "off"), torch.tensor(0.1)
    chosen = gsa_kernels.select(indexer, rule, ema, implementation="reference")
    out, lse = gsa_kernels.sparse_attention(q, k, v, chosen, implementation="reference")
    causal = reference.causal_mask(40)
    scores = reference.indexer_scores(indexer.queries, indexer.keys, indexer.head_weight_logits)
    mask = reference.select_top_k(scores, causal, torch.full((1, 40), 8).minimum(causal.sum(-1)))
    assert torch.equal(out, reference.sparse_attention(q, k, v, mask).out)
    loss, rows = gsa_kernels.indexer_loss(indexer, q, k, lse, chosen, implementation="reference")
    assert loss > 0
    assert torch.equal(loss, rows.sum())
    with pytest.raises(AttributeError, match="no attribute 'adaptive_budget'"):
        _ = gsa_kernels.adaptive_budget
