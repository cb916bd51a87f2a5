"""Build the linear layers of attention and feed-forward layers.

For a new precision, add a function of the settings to LINEAR_LAYERS. `train.linear_layers` names it.
Projections of gates and indexer, grouped experts (moe.experts_impl), embedding and output layer do not use it.
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
