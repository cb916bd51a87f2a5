"""Build the linear layers of attention and feed-forward layers.

A new precision is a function of the settings and a row of LINEAR_LAYERS; `train.linear_layers` chooses. The table does
not cover projections of gates and indexer, grouped experts (moe.experts_impl), embedding and output layer.
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


def megatron(train: TrainConfig) -> LinearLayers:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return LinearLayers(ColumnParallelLinear, RowParallelLinear)


def fp8(train: TrainConfig) -> LinearLayers:
    from gsa_train.model.mcore.fp8_linears import Fp8ColumnLinear, Fp8RowLinear

    return LinearLayers(Fp8ColumnLinear, Fp8RowLinear)


LINEAR_LAYERS: dict[str, Callable[[TrainConfig], LinearLayers]] = {"fp8": fp8, "megatron": megatron}

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products: Ada. Hopper has 9.0."""


def unsupported_by_device(train: TrainConfig, device: torch.device) -> list[str]:
    """Return a line if this device lacks products in FP8. The reference on CPUs is only for tests."""
    if train.linear_layers != "fp8":
        return []
    if device.type != "cuda":
        wrong = "there is no CUDA device"
    else:
        import torch

        capability = torch.cuda.get_device_capability(device)
        if capability >= FP8_CAPABILITY:
            return []
        name = torch.cuda.get_device_name(device)
        wrong = f"{name} has compute capability {capability[0]}.{capability[1]}, and FP8 needs 8.9 or more"
    return [problem_line("train.linear_layers", "fp8", wrong, "set it to megatron")]
