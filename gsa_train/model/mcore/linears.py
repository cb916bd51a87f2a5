"""Build the linear layers of attention and feed-forward layers.

`train.linear_layers` chooses one of the functions in LINEAR_LAYERS. To add a precision, add a function there. Four
kinds of layers do not depend on this choice: the projections of gates and indexer, grouped experts (moe.experts_impl),
the embedding, and the output layer.
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
