"""Hand the fp32 main weights of a bf16 phase to the next phase.

Each phase's optimizer has fp32 weights next to the model's bf16 weights. Rebuilding them from bf16 would lose the
updates that are smaller than a bf16 step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer, StatePart


@dataclass(frozen=True)
class MainWeights:
    """Holds the main weights of a completed phase on one rank: 4 bytes per parameter in the rank's optimizer shard."""

    trained: list[torch.nn.Parameter]
    """Trained parameters of this rank's model."""
    parts: list[tuple[torch.nn.Parameter, int, torch.Tensor]]
    """Parameter, first element, flat fp32 weight."""
    groups: list[dist.ProcessGroup | None]
    """`PhaseOptimizer.state_group_of` for each entry of `trained`."""


def keep_main_weights(model: Model, phase_optimizer: PhaseOptimizer) -> MainWeights:
    """Copy the main weights. Call it before the optimizer is closed."""
    parameters = (parameter for chunk in model.chunks for parameter in chunk.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return MainWeights(
        trained,
        [
            (part.parameter, part.start, part.tensors[MAIN_WEIGHT].clone())
            for part in phase_optimizer.state_parts()
            if MAIN_WEIGHT in part.tensors
        ],
        [phase_optimizer.state_group_of(parameter) for parameter in trained],
    )


@torch.no_grad()
def carry_over(kept: MainWeights, phase_optimizer: PhaseOptimizer) -> None:
    """Write the main weights into the next phase's optimizer, which shards its parameters differently. Collective."""
    before: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for parameter, start, weight in kept.parts:
        before[id(parameter)].append((start, weight))
    after: dict[int, list[StatePart]] = defaultdict(list)
    for part in phase_optimizer.state_parts():
        after[id(part.parameter)].append(part)
    for parameter, group in zip(kept.trained, kept.groups, strict=True):
        if parameter.dtype == torch.float32 or not parameter.requires_grad:
            continue
        elements = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3's tensor is empty
        whole = torch.zeros(elements, device=parameter.device)
        for start, weight in before[id(parameter)]:
            whole[start : start + weight.numel()] = weight
        if group is not None:
            dist.all_reduce(whole.view(torch.int32), group=group)  # all ranks except one have 0
        for part in after[id(parameter)]:
            part.tensors[MAIN_WEIGHT].copy_(whole[part.in_parameter])
