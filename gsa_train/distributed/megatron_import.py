"""Import megatron-core without packages that a run never calls. This halves the import time of a start.

megatron-core imports W&B and TensorBoard for its own logging, which a run does not use. If a run logs to W&B or
TensorBoard, our sinks import the package themselves. megatron-core also imports torch's compiler, to decorate its fused
functions. A run never calls these functions, because `model/mcore/config.py` switches them off.
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
    r"full scope is deprecated",  # about CUDA graphs, which are off
    r"`torch\.distributed\.\w+_tensor` is deprecated",  # torch 2.13 deprecates it; 2.11 has no other
    r"The argument order of load has been changed",  # megatron-core passes the reader by position
    r"torch\.distributed is disabled, unavailable or uninitialized",  # megatron-core loads with no_dist=True
)
"""Warnings on every rank about normal conditions, which would hide useful warnings."""

LIBRARIES_LOGS = {
    # The other strategy of megatron-core 0.19 needs nvidia-resiliency-ext.
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not",
}
"""Maps a logger to the beginning of such a warning."""


def import_megatron() -> None:
    """Import megatron-core for all later imports. Call it before W&B is imported."""
    with _missing(UNUSED), _compiling_at_first_call():
        import megatron.core  # noqa: F401


def quiet_libraries() -> None:
    """Silence `LIBRARIES_WARNINGS`, `LIBRARIES_LOGS`, and all logs of megatron-core below level WARNING. Call it before
    megatron-core is imported."""
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it prints every parameter's name
    for message in LIBRARIES_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for logger, beginning in LIBRARIES_LOGS.items():
        logging.getLogger(logger).addFilter(functools.partial(_differs, beginning))


def _differs(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


@contextmanager
def _missing(names: tuple[str, ...]) -> Iterator[None]:
    """In this context, let the import of each of these packages fail unless the package is already loaded."""
    blocked = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # None: Python's way to say so
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


@contextmanager
def _compiling_at_first_call() -> Iterator[None]:
    """Defer `torch.compile` of functions decorated in this context to their first call."""
    import torch

    compile_now = torch.compile
    torch.compile = functools.partial(at_first_call, compile_now)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def at_first_call(decorate: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    """Returns `function`, which is decorated at its first call. Without a function, returns a decorator."""
    if function is None:
        return functools.partial(at_first_call, decorate, **options)

    @functools.lru_cache(maxsize=1)
    def decorated() -> Any:
        return decorate(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return decorated()(*arguments, **named)

    return call
