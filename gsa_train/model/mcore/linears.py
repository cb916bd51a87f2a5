"""Build the linear layers of attention and feed-forward network.

`train.linear_layers` chooses one of the functions in LINEAR_LAYERS. To add a precision, add a function there. Four
kinds of layers do not depend on this choice: the projections of gates and indexer, grouped experts (moe.experts_impl),
the embedding, and the output layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gsa_train.config import TrainConfig
from gsa_train.config.load import problem_line

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LinearLayers:
    column: type
    """Interface of megatron-core's ColumnParallelLinear: QKV, first layer of the feed-forward network."""
    row: type
    """Interface of megatron-core's RowParallelLinear: attention's output projection, second feed-forward layer."""
    in_fp8: bool = False
    """SwiGLU then finds the largest magnitudes of its result and its input's gradient."""


def megatron(train: TrainConfig) -> LinearLayers:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return LinearLayers(ColumnParallelLinear, RowParallelLinear)


def fp8(train: TrainConfig) -> LinearLayers:
    from gsa_train.model.mcore.fp8_linears import Fp8ColumnLinear, Fp8RowLinear

    return LinearLayers(Fp8ColumnLinear, Fp8RowLinear, in_fp8=True)


LINEAR_LAYERS: dict[str, Callable[[TrainConfig], LinearLayers]] = {"fp8": fp8, "megatron": megatron}

FP8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first GPUs with FP8 products."""


def unsupported_by_device(train: TrainConfig, device: torch.device) -> list[str]:
    """Return a line if this device lacks FP8 products. The CPU reference is only for tests."""
    import torch

    if train.linear_layers != "fp8":
        return []
    wrong = "there is no CUDA device"
    if device.type == "cuda":
        if (capability := torch.cuda.get_device_capability(device)) >= FP8_CAPABILITY:
            return []
        has = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        wrong = f"{has}, and FP8 needs 8.9 or more"
    return [problem_line("train.linear_layers", "fp8", wrong, "set it to megatron")]
