"""What trains one phase, as step, trainer and checkpoint see it, whichever `parallel.strategy` shards it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gsa_train.config import PhaseConfig
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.expert_mark import is_of_expert
from gsa_train.optimizer.build import OptimizerKind

MAIN_WEIGHT = "param"


@dataclass(frozen=True)
class StatePart:
    """What a rank keeps of one parameter's optimizer state: all of it, or a stretch of the flat parameter."""

    parameter: torch.nn.Parameter
    start: int
    """First element."""
    length: int
    tensors: dict[str, torch.Tensor]
    """What the optimizer declares (`OptimizerKind.state`) and, where the model's weight is not in fp32, MAIN_WEIGHT: in
    fp32, flat, the optimizer's own."""

    @property
    def in_parameter(self) -> slice:
        return slice(self.start, self.start + self.length)

    def weight(self) -> torch.Tensor:
        """A copy of this part of the model's weight, flat, where that is whole."""
        return self.parameter.detach().flatten()[self.in_parameter].clone()


class PhaseOptimizer(ABC):
    """Gradients and optimizer of what a phase trains. Built by `mcore.build_optimizer`, ended by `close`."""

    phase: PhaseConfig
    kind: OptimizerKind
    updates: torch.Tensor
    """0-d, on the device: updates made, which all parameters share."""
    updaters: Sequence[torch.optim.Optimizer]
    """What `kind` has built for the parameters of this rank."""
    modules: Sequence[torch.nn.Module]
    """The model's chunks as the schedule is to call them."""
    local_backward: bool
    """In the indexer warm-up layers differentiate the indexer loss on the spot; else the schedule runs a backward
    pass."""
    state_group: dist.ProcessGroup | None
    """The ranks over which each parameter's state is cut, but for those of experts; None: every data-parallel rank has
    all of it."""
    expert_state_group: dist.ProcessGroup | None = None
    """The same of experts."""
    state_copy: int | None
    """Number of this rank's group among those that hold the same; None without a group."""
    weights_stay: bool = True
    """What the model holds in `whole_weights` is its own, and stays behind its end as it is until the next update."""

    def state_group_of(self, parameter: torch.Tensor) -> dist.ProcessGroup | None:
        return self.expert_state_group if is_of_expert(parameter) else self.state_group

    # --- a step ------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Gradients are zero, the modules in training mode."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Add up the gradients over the ranks where no schedule has done so (`local_backward`). Collective."""

    def set_learning_rate(self, lr: float, weight_decay: float) -> None:
        """Give each group its learning rate and weight decay for the next step; both follow from the config."""
        for group in (group for each in self.updaters for group in each.param_groups):
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = weight_decay * group["wd_mult"]

    @abstractmethod
    def reduce_grad_norm(
        self, loss_share: torch.Tensor, parallel: Parallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """0-d fp32 norm of the reduced gradients before clipping, each parameter once, and 0-d fp64 sum of the ranks'
        `loss_share`; the same on all ranks. Collective."""

    @abstractmethod
    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        """Clip the reduced gradients and update; without `applied` no weight, no state and no step count changes.

        Args:
            norm: 0-d: their norm, of `reduce_grad_norm`.
            max_norm: largest global norm; 0 does not clip.
            applied: 0-d bool, the same on all ranks.
        """

    @abstractmethod
    def update_norm(self, applied: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        """0-d fp32: norm of the change that the last step made to the weights, weight decay included; 0 where it made
        none. Collective."""

    @abstractmethod
    def close(self, model: Model) -> None:
        """Release gradients, hooks and optimizer state before the next phase builds its own. Collective."""

    # --- a checkpoint ------------------------------------------------------------------------------------

    @abstractmethod
    def whole_weights(self, changes: bool) -> AbstractContextManager[None]:
        """While it is open, every rank's model holds whole weights. Collective.

        Args:
            changes: they will be other ones at its end, the same on all data-parallel ranks.
        """

    @abstractmethod
    def state_parts(self) -> Iterator[StatePart]:
        """All that this rank keeps, by parameter."""

    def set_updates(self, count: float) -> None:
        """Go on from there."""
        self.updates.fill_(count)
        if self.kind.counter is not None:
            for state in (state for each in self.updaters for state in each.state.values()):
                state[self.kind.counter].fill_(count)

    @abstractmethod
    def start_from_weights(self) -> None:
        """The model has other weights: the optimizer's own copies follow. Collective."""
