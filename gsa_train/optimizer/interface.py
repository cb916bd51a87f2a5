"""Define the interface of a phase's optimizer for step, trainer and checkpoint, independent of `parallel.strategy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from gsa_train.config import PhaseConfig
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.expert_mark import is_of_expert
from gsa_train.optimizer.build import WEIGHT_AVERAGE, OptimizerKind

MAIN_WEIGHT = "param"


@dataclass(frozen=True)
class StatePart:
    """Describes this rank's optimizer state of one parameter: all of it, or a contiguous shard of the flat
    parameter."""

    parameter: torch.nn.Parameter
    start: int
    """First element."""
    length: int
    tensors: dict[str, torch.Tensor]
    """The optimizer's own flat fp32 tensors by name: those in `OptimizerKind.state_of` and, if the model's weight is
    not fp32, MAIN_WEIGHT."""

    @property
    def in_parameter(self) -> slice:
        return slice(self.start, self.start + self.length)

    def weight(self) -> torch.Tensor:
        """Copy this part of the model's weight, flat. The model must hold whole weights."""
        return self.parameter.detach().flatten()[self.in_parameter].clone()


class PhaseOptimizer(ABC):
    """Holds gradients and optimizer of the parameters that one phase of a run trains. `mcore.build_optimizer` builds
    it, and `close` releases it."""

    phase: PhaseConfig
    kind: OptimizerKind
    updates: torch.Tensor
    """0-d, on the device: number of applied updates, shared by all parameters."""
    updaters: Sequence[torch.optim.Optimizer]
    """The optimizers that `kind` built for this rank's parameters."""
    modules: Sequence[torch.nn.Module]
    """The model's chunks, wrapped for the schedule."""
    local_backward: bool
    """True in the indexer warm-up, where each layer runs its own backward pass. Otherwise the schedule runs it."""
    state_group: dist.ProcessGroup | None
    """Ranks over which dense parameters' state is sharded; None: every data-parallel rank has all state."""
    expert_state_group: dist.ProcessGroup | None = None
    """Ranks over which expert parameters' state is sharded, or None."""
    state_copy: int | None
    """Index of this rank's group among the groups with replicas of the same state; None without a group."""
    weights_stay: bool = True
    """Whether weights inside `whole_weights` are the model's own and stay valid until the next update."""

    def state_group_of(self, parameter: torch.Tensor) -> dist.ProcessGroup | None:
        return self.expert_state_group if is_of_expert(parameter) else self.state_group

    # --- a step ------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Zero the gradients and set the modules to training mode."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Reduce the gradients over the ranks, if the schedule does not (`local_backward`). Collective."""

    def set_learning_rate(self, lr: float, weight_decay: float) -> None:
        """Set each group's learning rate and weight decay for the next step."""
        for group in (group for each in self.updaters for group in each.param_groups):
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = weight_decay * group["wd_mult"]

    @abstractmethod
    def reduce_grad_norm(self, loss_share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient norm, and the sum of `loss_share` over the ranks. Both are equal on all ranks.
        Collective.

        The norm is 0-d fp32, and the sum is 0-d fp64. The norm is computed after the gradients are reduced and before
        they are clipped. It counts each parameter once.
        """

    @abstractmethod
    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        """Clip the reduced gradients and update. If `applied` is False, weights, state and step count are unchanged.

        Args:
            norm: 0-d, from `reduce_grad_norm`.
            max_norm: largest global norm; 0 disables clipping.
            applied: 0-d bool, equal on all ranks.
        """

    @torch.no_grad()
    def start_average(self) -> None:
        """Set the moving average of the weights, if there is one, to the weights."""
        for weight, state in self._states():
            if WEIGHT_AVERAGE in state:
                state[WEIGHT_AVERAGE].copy_(weight.detach())

    @torch.no_grad()
    def average_weights(self, decay: float, applied: torch.Tensor) -> None:
        """Move the average towards the updated weights, if `applied`.

        The rate depends on the number of updates, so that the average's initial value has no influence. After n
        updates, the average is a weighted mean of the parameters after updates 1 to n. The parameters after update i
        have a weight proportional to decay^(n - i).
        """
        rate = (1 - decay) / (1 - decay ** self.updates.double())
        rate = torch.where(applied, rate, 0).float()
        for weight, state in self._states():
            state[WEIGHT_AVERAGE].lerp_(weight.detach(), rate.to(weight.device))

    @abstractmethod
    def update_norm(self, applied: torch.Tensor) -> torch.Tensor:
        """Return the norm of the weights' change in the last step: 0-d fp32. Collective. The change includes weight
        decay, but not QK-clip. If the step was skipped, the norm is 0."""

    @abstractmethod
    def close(self, model: Model) -> None:
        """Release gradients, hooks and optimizer state before the next phase builds its own. Collective."""

    # --- a checkpoint ------------------------------------------------------------------------------------

    @abstractmethod
    def whole_weights(self, changes: bool) -> AbstractContextManager[None]:
        """Gather whole weights into every rank's model for the duration of the context. Collective.

        Args:
            changes: the caller changes the weights, equally on all data-parallel ranks.
        """

    @abstractmethod
    def state_parts(self) -> Iterator[StatePart]:
        """Yield this rank's optimizer state by parameter."""

    def set_updates(self, count: float) -> None:
        """Set the number of updates."""
        self.updates.fill_(count)
        for _, state in self._states():
            if self.kind.counter in state:  # not in the state of a matrix
                state[self.kind.counter].fill_(count)

    def _states(self) -> Iterator[tuple[torch.Tensor, dict[Any, torch.Tensor]]]:
        """Yield the weights that `updaters` update, and their states."""
        return chain.from_iterable(updater.state.items() for updater in self.updaters)

    @abstractmethod
    def start_from_weights(self) -> None:
        """Copy changed model weights into the optimizer's fp32 copies. Collective."""
