"""Fills kernels' buffers with NaN or a large integer, which reveals elements that are never written."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def poisoned(create: Any) -> Any:
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = create(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30 + 7)

    return created


def poison_buffers(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, make: tuple[str, ...] = ("empty",)
) -> None:
    """Replace `torch.empty`, or the torch functions in `make`, in these modules."""
    fake = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    for name in make:
        setattr(fake, name, poisoned(getattr(torch, name)))
    for module in modules:
        monkeypatch.setattr(module, "torch", fake)
