"""What trains one phase, as step, trainer and checkpoint see it, whichever `parallel.strategy` shards it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gsa_train.config import PhaseConfig
from gsa_train.model.build import Model
from gsa_train.parallel import Parallel


class PhaseOptimizer(ABC):
    """Gradients and optimizer of what a phase trains. Built by `optim.build_optimizer`, ended by `close`."""

    phase: PhaseConfig
    modules: Sequence[torch.nn.Module]
    """The model's chunks as the schedule is to call them."""
    local_backward: bool
    """The warm-up's layers differentiate the indexer loss on the spot; else the schedule runs a backward pass."""
    state_format: str
    """How its state lies in a checkpoint: `distributed`, `plain`, `plain_bf16` (with fp32 weights beside the model's
    bf16 ones) or `zero`."""

    # --- a step ------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Gradients are zero, the modules in training mode."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Add up the gradients over the ranks where no schedule has done so (`local_backward`). Collective."""

    @abstractmethod
    def set_learning_rate(self, lr: float, weight_decay: float) -> None:
        """Give each group its learning rate and weight decay for the next step; both follow from the config, so
        nothing that a checkpoint brought along can change them."""

    @abstractmethod
    def reduce_grad_norm(
        self, loss_share: torch.Tensor, parallel: Parallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """0-d fp32 norm of the reduced gradients before clipping, each parameter once, and 0-d fp64 sum of the ranks'
        `loss_share`; the same on all ranks. Collective."""

    @abstractmethod
    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        """Clip the reduced gradients and update; without `applied` no weight, no moment and no step count changes.

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
    def sharded_state(
        self, model_state: dict[str, Any], is_loading: bool, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """megatron-core's sharded state dict of the optimizer, given that of the model. Collective."""

    @abstractmethod
    def load_sharded_state(self, loaded: dict[str, Any]) -> None:
        """Go on from what `sharded_state` asked for; of the same `state_format`."""

    @abstractmethod
    def loaded_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of the states that this rank is to load whole for `fill`."""

    @abstractmethod
    def fill(self, loaded: dict[str, dict[str, torch.Tensor]], step_count: float) -> None:
        """Go on from states of another `state_format`, after the model has its weights. Collective.

        Args:
            loaded: name -> fp32 `exp_avg`, `exp_avg_sq` and, where the checkpoint has it, `param`, in the parameter's
                tensor-parallel shape.
        """

    @abstractmethod
    def start_from_weights(self) -> None:
        """The model has other weights: the optimizer's own copies follow."""
