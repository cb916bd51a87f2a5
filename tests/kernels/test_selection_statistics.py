"""Tests that statistics of packed masks equal the same statistics of masks."""

import pytest
import torch

pytest.importorskip("triton")


from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.reference import adjacent_overlap, causal_mask, union_ratio
from gsa_kernels.selection import triton_statistics
from gsa_kernels.selection.causal_packed_mask import causal_packed_mask
from gsa_kernels.selection.triton_statistics import statistics_of_packed_mask


def random_mask(length: int, keys: int, density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.rand(2, length, keys, generator=generator) < density


@pytest.mark.parametrize(
    ("length", "density", "group", "columns"),
    [
        (1, 1.0, 3, 2),
        (2, 0.5, 32, 1024),
        (33, 0.0, 3, 1024),
        (33, 0.5, 32, 2),
        (33, 0.5, 33, 1),
        (70, 0.02, 3, 2),
    ],
)
def test_packed_masks_and_masks_give_the_same(
    device: str, length: int, density: float, group: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = random_mask(length, 100, density)
    words = pack_mask(mask).to(device)
    monkeypatch.setattr(triton_statistics, "_COLUMNS", columns)
    neighbours = torch.arange(0, length - 1, 2)
    grouped = torch.arange(length % group, length)
    found = statistics_of_packed_mask(words, neighbours.to(device), grouped.to(device), group)
    assert torch.equal(found.sizes.cpu().long(), mask.sum(-1))
    assert torch.equal(found.overlaps.cpu(), adjacent_overlap(mask)[:, neighbours])
    if len(grouped) == 0:
        assert found.union_ratios.shape == (2, 0)
    else:
        assert torch.equal(found.union_ratios.cpu(), union_ratio(mask[:, grouped], group))


def test_of_no_queries() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    found = statistics_of_packed_mask(torch.empty(2, 0, 4, dtype=torch.int32), nothing, nothing, 32)
    assert found.sizes.shape == found.overlaps.shape == found.union_ratios.shape == (2, 0)


@pytest.mark.parametrize("documents", [False, True])
def test_the_causal_packed_mask_matches_the_mask(documents: bool) -> None:
    length, positions = 100, torch.tensor([0, 1, 31, 32, 63, 64, 70, 99])
    ids = starts = None
    if documents:
        ids = torch.tensor([[0] * 32 + [1] * 33 + [2] * 35, [0] * 99 + [1]])
        starts = torch.searchsorted(ids, ids[:, positions].contiguous()).int()
    wanted = causal_mask(length, query_positions=positions)
    if ids is not None:
        wanted = wanted & (ids[:, positions, None] == ids[:, None])
    assert torch.equal(causal_packed_mask(positions, length, starts), pack_mask(wanted))
