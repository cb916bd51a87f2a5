"""What the CPU backend leaves as it is."""

from __future__ import annotations

import torch

from helpers.single_rank import single_rank


def test_device_contexts_hold_where_torch_is_patched() -> None:
    """transformers loads models on the device `meta`; without, buffers that no file holds stay uninitialised."""
    single_rank()
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.tensor([1.0]).device.type == "meta"
