"""Read how DeepSpeed 0.19.8 shards a model over the data-parallel ranks, and undo its changes to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

from gsa_train.distributed.parallel import Parallel


def groups_as_named(parallel: Parallel) -> SimpleNamespace:
    """Return an object with the functions by which DeepSpeed asks for process groups."""
    data, tensor = parallel.groups.dp, parallel.groups.tp
    found = SimpleNamespace()
    for name, group in {"data": data, "model": tensor, "tensor_model": tensor}.items():
        setattr(found, f"get_{name}_parallel_group", lambda group=group: group)
        setattr(found, f"get_{name}_parallel_rank", group.rank)
        setattr(found, f"get_{name}_parallel_world_size", group.size)
    return found


@dataclass
class Piece:
    """Describes the part of one parameter that this rank updates."""

    parameter: torch.nn.Parameter
    group: int
    """Index of DeepSpeed's flat group."""
    number: int
    """Index in the group's list of gradients."""
    start: int
    """First element in the flat parameter."""
    length: int
    offset: int
    """Index of that element in the flat group."""

    @property
    def in_group(self) -> slice:
        return slice(self.offset, self.offset + self.length)


def pieces(zero: Any) -> Iterator[Piece]:
    """Yield this rank's pieces in stages 1 and 2. In these stages, each flat group is divided into one shard per rank,
    and a boundary between shards may split a parameter anywhere."""
    rank = dist.get_rank(zero.dp_process_group)
    for group, parameters in enumerate(zero.params_in_partition):
        size = zero.partition_size[group]
        for number, parameter in enumerate(parameters):
            number_in_model = zero.get_param_id(parameter)
            start = zero.grad_start_offset[group][rank][number_in_model]
            offset = zero.grad_partition_insertion_offset[group][rank][number_in_model]
            yield Piece(
                parameter, group, number, start, min(parameter.numel() - start, size - offset), offset
            )


def pieces_of_shards(zero: Any) -> Iterator[Piece]:
    """Yield the pieces of stage 3. Each parameter has one shard per rank; the last shards are padded."""
    for group, parameters in enumerate(zero.fp16_groups):
        offset = 0
        for number, parameter in enumerate(parameters):
            size = parameter.partition_numel()
            start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
            yield Piece(parameter, group, number, start, min(size, parameter.ds_numel - start), offset)
            offset += size


def remember(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that removes everything DeepSpeed adds to the module later. Call it while the weights are
    whole."""
    attributes = [(each, frozenset(vars(each))) for each in (*module.modules(), *module.parameters())]

    def take_off() -> None:
        for each in module.modules():
            each._parameters = vars(each).get("_original_parameters", each._parameters)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # not a view of DeepSpeed's buffers
        for owner, before in attributes:
            for name in vars(owner).keys() - before:
                vars(owner).pop(name)
        parameter_offload.FWD_MODULE_STACK.clear()

    return take_off
