"""Build the linear layers of attention and feed-forward layers.

To add a precision, add a function to LINEAR_LAYERS, from which `train.linear_layers` chooses. The choice does not
apply to projections of gates and indexer, grouped experts (moe.experts_impl), embedding and output layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gsa_train.config import TrainConfig


@dataclass(frozen=True)
class LinearLayers:
    column: type
    """Interface of megatron-core's ColumnParallelLinear: QKV, first layer of the feed-forward network."""
    row: type
    """Interface of megatron-core's RowParallelLinear: attention's output projection, second feed-forward layer."""


def megatron(train: TrainConfig) -> LinearLayers:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return LinearLayers(ColumnParallelLinear, RowParallelLinear)


LINEAR_LAYERS: dict[str, Callable[[TrainConfig], LinearLayers]] = {"megatron": megatron}
