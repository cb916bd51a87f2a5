"""Decoding over pages gives the bits of decoding over contiguous caches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import RULE, Case, make_case, poisoned_buffers  # noqa: F401 - pytest finds it here

from gsa_kernels import api
from gsa_kernels.types import Geometry

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

LENGTHS, MAX_LENGTH, WINDOW = [321, 132, 0, 17], 384, 9
"""The windows of the first two sequences cross the boundary of a page."""


def paged(case: Case, size: int) -> Case:
    """Move the caches to pages, in random order and in vLLM's layout. Unused rows of a page are NaN, and unused entries
    of the page table point outside the cache. The test therefore notices if a kernel reads them."""
    batch, width = len(case.q), MAX_LENGTH // size
    order = torch.randperm(batch * width + 3, generator=torch.Generator().manual_seed(size))
    table = order[: batch * width].view(batch, width).to(case.q.device)

    def in_pages(x: torch.Tensor) -> torch.Tensor:
        """Return [pages, heads, N, width] for [B, L_max, heads, width]."""
        pages = x.new_full((len(order), x.shape[2], size, x.shape[3]), float("nan"))
        pages[table] = x.unflatten(1, (width, size)).transpose(2, 3)
        return pages

    rows = in_pages(torch.cat((case.cache.k, case.cache.v), -1)).transpose(1, 2)
    k, v = rows.chunk(2, -1)
    indexer = replace(case.indexer, keys=in_pages(case.indexer.keys[:, :, None])[:, 0])
    used = torch.arange(width, device=table.device) * size < case.lengths[:, None]
    table = torch.where(
        used, table, torch.tensor([2**30, -(2**30)], device=table.device).repeat(width // 2 + 1)[:width]
    )
    cache = replace(case.cache, k=k, v=v, block_table=table.int())
    return replace(case, indexer=indexer, cache=cache)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(
    ("options", "mode", "settled"),
    [
        ({"activation": "relu", "indexer": (8, 16)}, "off", False),
        ({"biases": True, "dtype": torch.bfloat16, "splits": 1}, "inverse", True),
        ({"biases": True, "heads": (3, 1)}, "direct", False),
    ],
)
def test_pages(device: str, size: int, options: dict[str, Any], mode: Any, settled: bool) -> None:
    rule, geometry = replace(RULE, adaptive_k=mode), Geometry(local_window=WINDOW)
    case, other = (
        make_case(device, LENGTHS, MAX_LENGTH, gate=True, **options).with_new(settled=settled)
        for _ in range(2)
    )
    other = paged(other, size)
    wanted = case.step(rule, WINDOW)
    assert torch.equal(other.step(rule, WINDOW), wanted)
    scores, of_pages = (x.workspace.scores[:, :MAX_LENGTH][case.causal()] for x in (case, other))
    assert torch.equal(of_pages, scores)
    assert torch.equal(other.cache.selection.variance, case.cache.selection.variance)
    for row, count in enumerate(case.cache.selection.counts.tolist()):
        indices = (x.cache.selection.indices[row, :count] for x in (case, other))
        assert torch.equal(*indices)
    assert torch.equal(other.cache.selection.counts, case.cache.selection.counts)
    if size == 64 and wanted.dtype == torch.float32:
        inputs = (other.q, other.indexer, other.cache, rule, case.ema, geometry, case.gate)
        torch.testing.assert_close(api.decode_step(*inputs, implementation="reference"), wanted)
