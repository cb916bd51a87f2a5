"""Hand the fp32 main weights of a bf16 phase, or its whole optimizer state, to the next phase.

Each phase's optimizer has fp32 weights next to the model's bf16 weights. If the next phase made its fp32 weights from
the bf16 weights, all updates too small for bf16 would be lost.
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
    """Holds one rank's shard of the main weights (fp32) of a completed phase.

    The main weights take 4 bytes per parameter of the shard. If the next phase has `keep_optimizer`, the rest of the
    optimizer state is also held. With AdamW, main weights and state together take 12 bytes per parameter.
    """

    trained: list[torch.nn.Parameter]
    """Trained parameters of this rank's model."""
    parts: list[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]
    """(parameter, its first element on this rank, flat fp32 tensors by kind) of each shard that this rank keeps."""
    groups: list[dist.ProcessGroup | None]
    """`PhaseOptimizer.state_group_of` for each entry of `trained`."""
    kinds: list[tuple[str, ...]]
    """For each entry of `trained`, MAIN_WEIGHT and, if the next phase keeps the optimizer, `OptimizerKind.state_of`."""
    updates: float | None
    """The step count, if the next phase keeps the optimizer."""


def keep_main_weights(
    model: Model, phase_optimizer: PhaseOptimizer, whole_state: bool = False
) -> MainWeights:
    """Copy the main weights, or the whole state. Call it before the optimizer is closed."""
    parameters = (parameter for chunk in model.chunks for parameter in chunk.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def tensors_of(part: StatePart) -> dict[str, torch.Tensor]:
        kinds = part.tensors.keys() if whole_state else part.tensors.keys() & {MAIN_WEIGHT}
        return {kind: part.tensors[kind].clone() for kind in kinds}

    return MainWeights(
        trained,
        [(part.parameter, part.start, tensors_of(part)) for part in phase_optimizer.state_parts()],
        [phase_optimizer.state_group_of(parameter) for parameter in trained],
        [(MAIN_WEIGHT, *(phase_optimizer.kind.state_of(each) if whole_state else ())) for each in trained],
        float(phase_optimizer.updates) if whole_state else None,
    )


@torch.no_grad()
def carry_over(kept: MainWeights, phase_optimizer: PhaseOptimizer) -> None:
    """Write what was kept into the next phase's optimizer, which shards its parameters differently. Collective."""
    before: dict[int, list[tuple[int, dict[str, torch.Tensor]]]] = defaultdict(list)
    for parameter, start, tensors in kept.parts:
        before[id(parameter)].append((start, tensors))
    after: dict[int, list[StatePart]] = defaultdict(list)
    for part in phase_optimizer.state_parts():
        after[id(part.parameter)].append(part)
    for parameter, group, kinds in zip(kept.trained, kept.groups, kept.kinds, strict=True):
        if not parameter.requires_grad:
            continue
        elements = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3's tensor is empty
        for kind in kinds:
            if kind == MAIN_WEIGHT and parameter.dtype == torch.float32:
                continue
            whole = torch.zeros(elements, device=parameter.device)
            for start, tensors in before[id(parameter)]:
                whole[start : start + tensors[kind].numel()] = tensors[kind]
            if group is not None:
                dist.all_reduce(whole.view(torch.int32), group=group)  # all ranks except one have 0
            for part in after[id(parameter)]:
                part.tensors[kind].copy_(whole[part.in_parameter])
    if kept.updates is not None:
        phase_optimizer.set_updates(kept.updates)
