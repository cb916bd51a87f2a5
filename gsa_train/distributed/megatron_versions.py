"""Hold the differences between megatron-core 0.16.1 and 0.19.2, the two supported versions.

megatron-core 0.19 needs Python 3.12. `NEW` is true from 0.19 on. In other files, our overrides of megatron-core's
methods accept the arguments that 0.19 adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import __version__, dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

NEW = tuple(map(int, re.findall(r"\d+", __version__)[:2])) >= (0, 19)

SAVE_OPTIONS: dict[str, Any] = {"async_strategy": "mcore"} if NEW else {}
"""Options of `async_save`. The default of 0.19 needs nvidia-resiliency-ext."""


def backward_step(loss: torch.Tensor, module: torch.nn.Module, config: Any) -> None:
    """Run the backward pass of a pipeline's only stage."""
    if NEW:
        schedules.backward_step(None, loss, None, config)
    else:
        schedules.backward_step(None, loss, None, get_model_type(module), config)


def main_grads(optimizer: Any) -> list[torch.Tensor]:
    """Return the fp32 gradients of this rank's shard that count in the gradient norm."""
    found: list[torch.Tensor] = (
        optimizer.get_grads_for_grad_norm() if NEW else optimizer.get_main_grads_for_grad_norm()
    )
    return found


def replace_readers(
    reader: Callable[..., Any], planner: type, read_common: Callable[[Path], dict[str, Any]]
) -> None:
    """Replace megatron-core's functions that unpickle checkpoint files.

    The common file (state that is not sharded) is an exception in megatron-core 0.16: `load_sharded` passes the file's
    reader as an argument.
    """
    patched: Any = torch_strategies
    patched._get_filesystem_reader, patched.MCoreLoadPlanner = reader, planner
    if NEW:
        serializer: Any = serialization
        serializer._get_filesystem_reader = reader
        serializer.load_common = lambda folder: read_common(Path(folder))


def load_sharded(
    wanted: dict[str, Any],
    checkpoint: Path,
    strategy: Any,
    read_common: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """Load a checkpoint and raise an error for tensors that it lacks. `replace_readers` must have been called.

    In 0.16, the fourth argument of megatron-core's `load` is the strategy for the common file. In 0.19, this argument
    is a flag, and a strategy would count as True.
    """
    strict = dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED
    content: dict[str, Any]
    if NEW:
        content = dist_checkpointing.load(wanted, str(checkpoint), strategy, strict=strict)
    else:
        content = dist_checkpointing.load(
            wanted, str(checkpoint), strategy, _common_strategy(read_common), strict=strict
        )
    return content


def _common_strategy(read_common: Callable[[Path], dict[str, Any]]) -> Any:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy  # gone in 0.19

    class Guarded(TorchCommonLoadStrategy):  # type: ignore[misc, unused-ignore]  # untyped in 0.16, absent in 0.19
        def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
            return read_common(Path(checkpoint_dir))

    return Guarded()
