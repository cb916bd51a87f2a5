"""Packed mask or key lists: which of them a selection is made in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsa_kernels import api, limits, operations_triton
from gsa_kernels.key_lists.format import mask_from_key_lists
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection


def select(length: int, kernel: limits.Kernel = "auto", **geometry: Any) -> Selection:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, length, 2, 16), (1, length, 16), (1, length, 2)
    indexer = Indexer(*(torch.randn(shape, generator=generator) for shape in shapes))
    rule, variance_ema = BudgetRule(k_base=3, k_min=2, k_max=4), torch.tensor(0.01)
    return api.select(
        indexer, rule, variance_ema, Geometry(**geometry), implementation="triton", kernel=kernel
    )


def test_short_sequences_take_a_packed_mask_uncounted() -> None:
    selection = select(40)
    assert selection.format == "packed_mask"
    assert selection.density is None


def test_density_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEASURED_FROM_TOKENS", 40)
    thin, full = select(200), select(40, local_window=40)
    assert thin.density is not None
    assert full.density is not None
    assert thin.density < limits.GATHERED_BELOW_DENSITY <= full.density
    assert (thin.format, full.format) == ("key_lists", "packed_mask")
    # counted by hand: keys that any query of a tile of 32 selects, over the keys that its last query sees
    assert thin.key_lists is not None
    mask = mask_from_key_lists(thin.key_lists)[0]
    tiles = [mask[start : start + 32].any(0).sum().item() for start in range(0, 200, 32)]
    assert thin.density == pytest.approx(sum(tiles) / (32 + 64 + 96 + 128 + 160 + 192 + 200))


def test_a_named_kernel_is_taken_whatever_the_density(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(40, "gathered").format == "key_lists"
    monkeypatch.setattr(limits, "MEASURED_FROM_TOKENS", 40)
    assert select(200, "masked").format == "packed_mask"


def test_long_sequences_never_hold_a_bit_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = select(80, "masked")
    assert masked.packed_mask is not None
    monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", 64)
    monkeypatch.setattr(operations_triton, "select_keys", None)
    listed = select(80)
    assert listed.key_lists is not None
    assert torch.equal(mask_from_key_lists(listed.key_lists), unpack_mask(masked.packed_mask, 80))
