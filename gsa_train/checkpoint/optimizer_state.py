"""Save and load optimizer state for any parallel layout, as `optimizer.state.KIND.NAME` in the parameter's whole shape.

Each rank writes and reads only its own shards (`StatePart`), without additional memory. In megatron-core 0.16.1,
the format `fully_reshardable` gathers all shards in the host memory of every data-parallel rank. The other formats
cannot be loaded after a change of the tensor-parallel or pipeline-parallel size.

megatron-core's planner describes a rank's shard of a tensor as a box (an offset and a shape). The optimizer's shard of
a matrix is a range of the flattened matrix, and this range may begin and end within a row. The range is therefore saved
as up to three boxes: the end of one row, whole rows, and the beginning of another row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from gsa_train.optimizer.build import WEIGHT_AVERAGE
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer, StatePart

PREFIX = "optimizer.state"
SAVED_MAIN_WEIGHT = "fp32_param"
"""Name of the fp32 weights in checkpoints"""

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory
Saved: TypeAlias = Mapping[str, ShardedTensor]
"""Maps names to the tensors of a checkpoint, without data."""


def main_weight_key(name: str, saved: Collection[str]) -> str | None:
    """Returns the name of the fp32 weight in a checkpoint for the model's weight `name`, or None."""
    key = f"{PREFIX}.{SAVED_MAIN_WEIGHT}.{name}"
    return key if key in saved else None


def has_state(saved: Collection[str], kind: str) -> bool:
    return any(key.startswith(f"{PREFIX}.{kind}.") for key in saved)


def by_parameter(model_state: dict[str, Any]) -> dict[int, Sharded]:
    """Returns a dict from the id of each parameter to its entry in the model's sharded state dict."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(each.data): each for each in nested_values(sharded)}


def saved_state(phase_optimizer: PhaseOptimizer, model_state: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Returns the tensors of the state that this rank writes, under arbitrary names.

    Args:
        model_state: the model's sharded state dict.
    """
    entries = by_parameter(model_state)
    state: dict[str, ShardedTensor] = {}
    for part in phase_optimizer.state_parts():
        like = entries[id(part.parameter)]
        for kind, tensor in part.tensors.items():
            key = f"{PREFIX}.{SAVED_MAIN_WEIGHT if kind == MAIN_WEIGHT else kind}.{like.key}"
            for box in _boxes_of(part, tensor, like, key, phase_optimizer.state_copy):
                state[f"{len(state)}"] = box
    return state


def wanted_state(
    phase_optimizer: PhaseOptimizer, model_state: dict[str, Any], saved: Saved, moments: bool
) -> dict[str, ShardedTensor]:
    """Returns entries of a checkpoint that this rank reads, each with the tensor of this rank to fill.

    Args:
        model_state: the model's sharded state dict.
        moments: False: only the fp32 weights in the checkpoint.

    Raises:
        KeyError: the checkpoint lacks the moments of a parameter.
    """
    entries, averaged = by_parameter(model_state), has_state(saved, WEIGHT_AVERAGE)
    wanted: dict[str, ShardedTensor] = {}
    for part in phase_optimizer.state_parts():
        like = entries[id(part.parameter)]
        names = phase_optimizer.kind.state_of(part.parameter) if moments else ()
        keys = {kind: f"{PREFIX}.{kind}.{like.key}" for kind in names}
        if not averaged:  # an average may begin within a run
            keys.pop(WEIGHT_AVERAGE, None)
        missing = [key for key in keys.values() if key not in saved]
        if missing:
            raise KeyError(f"the checkpoint has no {', '.join(missing)}")
        if MAIN_WEIGHT in part.tensors:
            # If the checkpoint has no separate fp32 weight, its model weight is read, in whatever precision it has.
            main = main_weight_key(like.key, saved)
            if main is not None or moments:
                keys[MAIN_WEIGHT] = main or like.key
        for kind, key in keys.items():
            for box in _boxes_of(part, part.tensors[kind], like, key, phase_optimizer.state_copy):
                wanted[f"{len(wanted)}"] = box
    return wanted


def from_main_weights(model_state: dict[str, Any], saved: Saved) -> dict[str, Any]:
    """Returns those entries of the model's sharded state dict for which the checkpoint has fp32 weights. Their keys are
    changed so that a load reads the fp32 weights."""
    return {
        chunk: {
            name: replace(entry, key=main)
            for name, entry in state.items()
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
            and (main := main_weight_key(entry.key, saved)) is not None
        }
        for chunk, state in model_state.items()
    }


def parts_with_main_weights(
    phase_optimizer: PhaseOptimizer, model_state: dict[str, Any], saved: Saved
) -> list[tuple[str, StatePart]]:
    """Returns (parameter name, part) for each part with separate fp32 weights in both checkpoint and optimizer."""
    entries = by_parameter(model_state)
    kept = (part for part in phase_optimizer.state_parts() if MAIN_WEIGHT in part.tensors)
    named = ((entries[id(part.parameter)].key, part) for part in kept)
    return [(name, part) for name, part in named if main_weight_key(name, saved) is not None]


def names_of_others(
    names: Sequence[str], mains: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], saved: Saved
) -> list[str]:
    """Returns the parameters whose fp32 weights differ from the model's weights after rounding to the checkpoint's
    dtype and then to the model's dtype.

    Args:
        weights: the model's weights of the same elements.
    """
    found = []
    for name, main, weight in zip(names, mains, weights, strict=True):
        rounded = main.to(weight.device).to(saved[name].dtype).to(weight.dtype)
        if torch.equal(rounded, weight):
            continue
        finite = rounded.isfinite() & weight.isfinite()  # finite.py reports weights that are not finite
        if ((rounded != weight) & finite).any():
            found.append(name)
    return found


def _boxes_of(
    part: StatePart, tensor: torch.Tensor, like: Sharded, key: str, copy: int | None
) -> Iterator[ShardedTensor]:
    """Yields one tensor of a part, as boxes of the whole tensor `key`.

    Args:
        copy: `PhaseOptimizer.state_copy`.
    """
    # The two halves of a SwiGLU layer's first product are separate on disk.
    shards = nested_values({"": like.build()}) if isinstance(like, ShardedTensorFactory) else [like]
    end, covered = part.start + tensor.numel(), 0
    for shard in shards:
        assert shard.data.is_contiguous()
        numbers = shard.prepend_axis_num  # axes that the shard itself lacks: the number of an expert
        first = shard.data.storage_offset() - like.data.storage_offset()  # in the flat parameter
        low, high = max(part.start, first), min(end, first + shard.data.numel())
        at = low - part.start
        for offset, of_data in boxes(tuple(shard.local_shape), low - first, high - first):
            offset, shape = (0,) * numbers + offset, (1,) * numbers + of_data
            size = math.prod(shape)
            yield replace(
                shard,
                key=key,
                data=tensor[at : at + size].view(shape),
                dtype=tensor.dtype,
                local_shape=shape,
                global_offset=tuple(map(sum, zip(shard.global_offset, offset, strict=True))),
                axis_fragmentations=None,  # The boxes form no grid.
                prepend_axis_num=0,
                # The last entry of a replica_id is the data-parallel rank.
                replica_id=shard.replica_id if copy is None else (*shard.replica_id[:-1], copy),
            )
            at += size
            covered += size
    assert covered == tensor.numel()


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts elements `start` to `end` of a row-major tensor into boxes. Yields each box's offset and shape, in order."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    whole, after = -(-start // row), end // row  # rows `whole` to `after` - 1 are whole
    if whole > after:  # within one row
        yield from _in_row(rest, after, start - after * row, end - after * row)
        return
    if start < whole * row:
        yield from _in_row(rest, whole - 1, start - (whole - 1) * row, row)
    if whole < after:
        yield (whole, *(0 for _ in rest)), (after - whole, *rest)
    yield from _in_row(rest, after, 0, end - after * row)


def _in_row(
    rest: tuple[int, ...], row: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, shape in boxes(rest, start, end):
        yield (row, *offset), (1, *shape)
