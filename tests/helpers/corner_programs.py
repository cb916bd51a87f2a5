"""Runs only the first and last programs along each axis of a grid, for tensors too large to compute in full.

The tensors' memory is reserved, but most of it is never used. A launch fails if a GPU would reject its grid. It also
fails if a product of two int32 values overflows, because an address that is computed from this product would be wrong.
"""

import inspect
from itertools import product
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter

MOST_PROGRAMS = 2**31 - 1, 65535, 65535
"""Largest grid along its axes (CUDA C++ Programming Guide, Compute Capabilities)."""


def run_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", _launch)


def _launch(self: Any, *given: Any, **named: Any) -> None:
    """Replace `GridExecutor.__call__`, which copies its arguments and so touches all of their memory."""
    names = inspect.getfullargspec(self.fn).args
    scope = interpreter._patch_lang(self.fn)
    for operator in ("__mul__", "__rmul__"):
        scope.set_attr(core.tensor, operator, _checked(getattr(core.tensor, operator)))
    try:
        bound = inspect.getcallargs(self.fn, *given, **{n: x for n, x in named.items() if n in names})
        bound = {n: x if n in self.constexprs else interpreter._implicit_cvt(x) for n, x in bound.items()}
        grid = self.grid(bound) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3]
        name = self.fn.__name__
        assert all(0 < n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=True)), f"{name}: {grid}"
        interpreter.interpreter_builder.set_grid_dim(*grid)
        for place in product(*(sorted({0, n - 1}) for n in grid)):
            interpreter.interpreter_builder.set_grid_idx(*place)
            self.fn(**bound)
    finally:
        scope.restore()


def _checked(multiply: Any) -> Any:
    """Wrap the multiplication of tensors such that it fails if a product of two int32 overflows."""

    def call(self: Any, other: Any, **kwargs: Any) -> Any:
        product = multiply(self, other, **kwargs)
        number = other.value if isinstance(other, core.constexpr) else other
        doubled = isinstance(number, int) and number == 2  # bits of a mask, not an offset
        if product.dtype.scalar == core.int32 and not doubled:
            factor = number.handle.data if isinstance(number, core.tensor) else number
            exact = self.handle.data.astype(np.int64) * factor
            assert (exact == product.handle.data).all(), f"{exact.max()} does not fit int32"
        return product

    return call
