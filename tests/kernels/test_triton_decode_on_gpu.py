"""Tests decoding at lengths that only a CUDA device can handle, and in a graph."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import (
    CUDA,
    check,
    make_case,
    poisoned_buffers,  # noqa: F401 - pytest finds it here
)

from gsa_kernels.types import BudgetRule

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [
        (torch.bfloat16, (32, 8), 128),
        (torch.bfloat16, (5, 1), 64),
        (torch.bfloat16, (32, 1), 128),
        (torch.bfloat16, (4, 4), 128),
        (torch.bfloat16, (16, 2), 256),
        (torch.bfloat16, (24, 2), 256),
        (torch.float32, (8, 2), 64),
    ],
    ids=str,
)
def test_sweep(dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    lengths = [1, 257, 1024, 5001, 8192, 0, 2049]
    rule = BudgetRule(k_base=512, k_min=64, k_max=1000)
    for mode, activation, window, splits in (
        ("inverse", "sigmoid", 64, None),
        ("direct", "sigmoid", 0, 1),
        ("off", "relu", 130, 16),
    ):
        sigmoid = activation == "sigmoid"
        indexer = (4 if sigmoid else 8, 64)
        sizes: dict[str, Any] = {"heads": heads, "dim": dim, "indexer": indexer, "dtype": dtype}
        sizes |= {"biases": sigmoid, "gate": sigmoid, "k_max": rule.k_max, "splits": splits}
        case = make_case("cuda", lengths, 8192, **sizes, activation=activation)
        check(case, replace(rule, adaptive_k=mode), window)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[131072], [131001, 70000, 4097]], ids=str)
def test_long(lengths: list[int]) -> None:
    rule = BudgetRule(k_base=2048, k_min=256, k_max=4096)
    sizes: dict[str, Any] = {"heads": (8, 2), "dim": 128, "indexer": (4, 64), "dtype": torch.bfloat16}
    case = make_case("cuda", lengths, 131072, **sizes, biases=True, gate=True, k_max=rule.k_max)
    check(case, rule, 64)
    check(case, replace(rule, adaptive_k="off"), 64)
    case.indexer.keys[:, : lengths[-1]] = 0.25  # every score of the shortest sequence is equal
    check(case, rule, 64)


def test_graph_follows_the_lengths() -> None:
    """One captured graph gives the bits of eager steps, for growing lengths and other queries."""
    window, rule = 8, BudgetRule(k_base=96, k_min=16, k_max=128)
    sizes: dict[str, Any] = {
        "heads": (8, 2), "indexer": (4, 64), "dtype": torch.bfloat16, "k_max": rule.k_max,
    }  # fmt: skip
    case, other = (make_case("cuda", [3000, 1021], 3072, **sizes, gate=True) for _ in range(2))
    for cache in (case.cache.k, case.cache.v, case.indexer.keys):
        cache.nan_to_num_(0.5)
    eager = case.with_new(selection=other.cache.selection)
    out = torch.empty_like(case.q)
    case.step(rule, window, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.step(rule, window, out)
    for each in (case, eager):
        each.cache.selection.counts.zero_()
    for _ in range(3):
        case.lengths.add_(1)
        case.q.normal_()
        case.indexer.queries.normal_()
        graph.replay()
        assert torch.equal(out, eager.step(rule, window))
        assert torch.equal(case.cache.selection.counts, eager.cache.selection.counts)
        assert torch.equal(case.selected(), eager.selected())
    assert bool((case.cache.selection.counts > 0).all())
