"""megatron-core without what it imports and a run of ours never calls: half of a start's import time.

W&B and TensorBoard, which it imports to log by itself (our sinks import them where a run wants them), and
torch's compiler, which decorating its fused functions imports: `model/mcore/config.py` switches those off.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

UNUSED = ("wandb", "torch.utils.tensorboard")
"""Optional packages of megatron-core."""

LIBRARIES_WARNINGS = (
    r"(Transformer Engine and )?Apex (are|is) not installed",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",  # whether there is one
    r"full scope is deprecated",  # of CUDA graphs, which are off
    r"`torch\.distributed\.\w+_tensor` is deprecated",  # from 2.13 on; 2.11 has no other
)
"""On every rank, about what is as it should be: they hid those that a user can act upon."""


def import_megatron() -> None:
    """Import megatron-core, which is then the same for who imports it later. Before W&B is imported by anyone."""
    with _missing(UNUSED), _compiling_at_first_call():
        import megatron.core  # noqa: F401


def quiet_libraries() -> None:
    """Without `LIBRARIES_WARNINGS` and what megatron-core logs, in this process. Before megatron-core is imported."""
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it prints every parameter's name
    for message in LIBRARIES_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _missing(names: tuple[str, ...]) -> Iterator[None]:
    """Packages that are not loaded yet cannot be imported meanwhile."""
    blocked = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # None: Python's way to say so
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


@contextmanager
def _compiling_at_first_call() -> Iterator[None]:
    """What is decorated by `torch.compile` meanwhile is compiled when it is called."""
    import torch

    compile_now = torch.compile
    torch.compile = functools.partial(at_first_call, compile_now)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def at_first_call(decorate: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """`function`, which `decorate` gets when it is called; without one, a decorator."""
    if function is None:
        return functools.partial(at_first_call, decorate, **options)

    @functools.lru_cache(maxsize=1)
    def decorated() -> Any:
        return decorate(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return decorated()(*arguments, **named)

    return call
