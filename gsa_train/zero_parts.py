"""How DeepSpeed 0.19.8 cuts a model over the data-parallel ranks, and how to take off what it put on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

from gsa_train.parallel import Parallel


class Groups:
    """The process groups under the names that DeepSpeed asks for."""

    def __init__(self, parallel: Parallel) -> None:
        self._tensor, self._data = parallel.groups.tp, parallel.groups.dp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self._data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._data.size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


@dataclass
class Piece:
    """The part of one parameter that this rank updates."""

    parameter: torch.nn.Parameter
    group: int
    """Of DeepSpeed's flat groups."""
    number: int
    """In the group's list of gradients."""
    start: int
    """First element, in the flat parameter."""
    length: int
    offset: int
    """Of that element in the flat group."""

    @property
    def in_group(self) -> slice:
        return slice(self.offset, self.offset + self.length)

    @property
    def in_parameter(self) -> slice:
        return slice(self.start, self.start + self.length)


def whole_shape(parameter: Any) -> torch.Size:
    """The whole parameter's; with stage 3 its tensor is empty most of the time."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def pieces(zero: Any) -> Iterator[Piece]:
    """Stages 1 and 2: each flat group is cut into one part per rank, wherever that cuts a parameter."""
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
    """Stage 3: each parameter is cut into one part per rank, the last ones filled up."""
    for group, parameters in enumerate(zero.fp16_groups):
        offset = 0
        for number, parameter in enumerate(parameters):
            size = parameter.partition_numel()
            start = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
            yield Piece(parameter, group, number, start, min(size, parameter.ds_numel - start), offset)
            offset += size


def share_out(trained: dict[str, torch.nn.Parameter], ranks: int) -> dict[str, int]:
    """Parameter -> data-parallel rank, about as many elements on each."""
    held, owners = [0] * ranks, {}
    for name, parameter in trained.items():
        owner = held.index(min(held))
        held[owner] += whole_shape(parameter).numel()
        owners[name] = owner
    return owners


def take_off(module: torch.nn.Module) -> None:
    """Undo what ZeRO-3 made of a module, whose weights are gathered: DeepSpeed leaves it on."""
    for each in module.modules():
        each._parameters = each.__dict__.pop("_original_parameters")
        for attribute in _MODULE_ATTRIBUTES:
            each.__dict__.pop(attribute, None)
    plain = set(torch.nn.Parameter(torch.zeros(())).__dict__)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
        for attribute in [name for name in parameter.__dict__ if name not in plain]:
            if attribute.startswith("ds_") or attribute in _PARAMETER_ATTRIBUTES:
                delattr(parameter, attribute)
    parameter_offload.FWD_MODULE_STACK.clear()


_MODULE_ATTRIBUTES = (
    "_external_params",
    "ds_external_parameters",
    "all_parameters",
    "ds_id",
    "ds_recompute_parameters",
    "ds_grads_remaining",
    "applied_pre_backward_ref_cnt",
    "pre_bwd_fn",
    "post_bwd_fn",
    "ds_inflight_param_registry",
)
_PARAMETER_ATTRIBUTES = (
    "all_gather",
    "all_gather_coalesced",
    "partition",
    "reduce_gradients_at_owner",
    "partition_gradients",
    "aligned_size",
    "padding_size",
    "partition_numel",
    "item",
    "convert_to_zero_parameters",
    "is_external_param",
    "nvme_swapper",
)
