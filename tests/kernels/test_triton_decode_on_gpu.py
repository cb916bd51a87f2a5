"""Decoding at lengths that only a CUDA device can take, and in a graph."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import (
    CUDA,
    check,
    make_case,
    poisoned_buffers,  # noqa: F401 - pytest finds it here
    run,
    selected_mask,
)

from gsa_kernels.decode import op

pytestmark = pytest.mark.usefixtures("poisoned_buffers")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [
        (torch.bfloat16, (32, 8), 128),
        (torch.bfloat16, (5, 1), 64),
        (torch.bfloat16, (32, 1), 128),
        (torch.float16, (4, 4), 128),
        (torch.float32, (8, 2), 64),
    ],
    ids=str,
)
def test_sweep(dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    lengths = [1, 257, 1024, 5001, 8192, 0, 2049]
    rule = {"k_base": 512, "k_min": 64, "k_max": 1000}
    for mode, activation, window, splits in (
        ("inverse", "sigmoid", 64, None),
        ("direct", "sigmoid", 0, 1),
        ("off", "relu", 130, 16),
    ):
        sizes: dict[str, Any] = {"heads": heads, "dim": dim, "indexer": (4, 64), "dtype": dtype}
        sigmoid = activation == "sigmoid"
        case = make_case("cuda", lengths, 8192, **sizes, activation=activation, biases=sigmoid, gate=sigmoid)
        check(case, window, splits, **rule, mode=mode)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[131072], [131001, 70000, 4097]], ids=str)
def test_long(lengths: list[int]) -> None:
    rule = {"k_base": 2048, "k_min": 256, "k_max": 4096}
    sizes: dict[str, Any] = {"heads": (8, 2), "dim": 128, "indexer": (4, 64), "dtype": torch.bfloat16}
    case = make_case("cuda", lengths, 131072, **sizes, biases=True, gate=True)
    for mode in ("inverse", "off"):
        check(case, 64, **rule, mode=mode)
    case.k_idx[:, : lengths[-1]] = 0.25  # every score of the shortest sequence is equal
    check(case, 64, **rule, mode="inverse")


@pytest.mark.gpu
@needs_gpu
def test_graph_follows_the_lengths() -> None:
    """One capture, replayed with lengths that grow on the device and with other queries: eager's bits."""
    block, window, rule = 4, 8, {"k_base": 100, "k_min": 16, "k_max": 128}
    case = make_case(
        "cuda", [3000, 1021], 3072, heads=(8, 2), indexer=(4, 64), dtype=torch.bfloat16, gate=True
    )
    for cache in (case.k, case.v, case.k_idx):
        cache.nan_to_num_(0.5)
    selection, workspace = case.state(128)
    out = torch.empty_like(case.q)

    def step(selection: op.DecodeSelection, out: torch.Tensor | None) -> torch.Tensor:
        return run(case, selection, workspace, window, **rule, selection_block=block, out=out)

    step(selection, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(selection, out)
    eager, _ = case.state(128)
    for row in (selection, eager):
        row.counts.zero_()
    for _ in range(2 * block + 1):
        case.lengths.add_(1)
        case.q.normal_()
        case.q_idx.normal_()
        graph.replay()
        wanted = step(eager, None)
        assert torch.equal(out, wanted)
        assert torch.equal(selection.counts, eager.counts)
        assert torch.equal(selected_mask(selection, 3072), selected_mask(eager, 3072))
    assert bool((selection.counts > 0).all())
