"""Build the optimizer that `train.optimizer` chooses. To add one, write two functions and add a row to OPTIMIZERS.

A row of OPTIMIZERS lists the state tensors that the optimizer keeps per parameter. Checkpoints, resharding, corruption
checks, the handover between phases and the dry run read this list.

Dry runs and config checks use this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gsa_train.config import TrainConfig
from gsa_train.config.load import chosen

if TYPE_CHECKING:
    import torch

WEIGHT_AVERAGE = "weight_average"
"""Name of the state tensor with the moving average of the weights (`train.weight_average_decay`)."""

Group = dict[str, Any]
"""A parameter group of torch: `params`, `lr`, `weight_decay` and the optimizer's own settings."""


@dataclass(frozen=True)
class OptimizerKind:
    build: Callable[[list[Group], TrainConfig, bool], torch.optim.Optimizer]
    """Builds the optimizer. Arguments: fp32 parameter groups (parameters may be flat shards), settings, and whether to
    use torch's fused kernels. With fused kernels, the device skips a rejected update; otherwise the host waits for the
    verdict."""
    squared_change: Callable[[list[dict[str, torch.Tensor]], Group, list[torch.Tensor]], torch.Tensor]
    """Returns the sum of squares of what the step changed, including weight decay: 0-d fp64. Arguments: states after a
    step, their group and their parameters, all on one device. The gradients are no longer available. If the arguments
    do not determine the change, the optimizer's step must store it in each parameter's state, as Muon's does. DeepSpeed
    does not pass stored changes on, so refuse `parallel.strategy: deepspeed` (`check_muon`)."""
    state: tuple[str, ...]
    """Names of the optimizer's state tensors per parameter: fp32, in the parameter's shape, initially 0."""
    counter: str | None = None
    """Name of the 0-d tensor in each parameter's state that counts updates."""
    matrix_state: tuple[str, ...] | None = None
    """State tensors of hidden layers' matrices (gsa_train.model.mcore.matrices), if the optimizer updates whole
    matrices. Groups of matrices have the key `matrices` (`muon.Matrices`). States of matrices have no counter."""

    def state_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter of the model."""
        if self.matrix_state is not None and hasattr(parameter, "matrix_rows"):
            return self.matrix_state
        return self.state

    def new_state(self, parameter: torch.Tensor, is_matrix: bool = False) -> dict[str, torch.Tensor]:
        names = self.matrix_state if is_matrix and self.matrix_state is not None else self.state
        zeros = {name: parameter.new_zeros(parameter.shape) for name in names}
        if not is_matrix and self.counter is not None:
            zeros[self.counter] = parameter.new_zeros(())
        return zeros


def adamw(groups: list[Group], train: TrainConfig, fused: bool) -> torch.optim.Optimizer:
    import torch

    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=train.adam_epsilon, fused=fused)


def adamw_change(
    states: list[dict[str, torch.Tensor]], group: Group, parameters: list[torch.Tensor]
) -> torch.Tensor:
    """Return the sum of squares of w' - w, where w are the weights before the step and w' are the weights after it.

    AdamW sets w' = (1 - lr decay) w - lr u, where u is Adam's update. This equation is solved for w, so that the old
    weights are not needed:

        w' - w = -lr (u + decay w') / (1 - lr decay)
    """
    import torch

    step, (beta1, beta2) = states[0]["step"], group["betas"]  # equal in all states
    correction = (1 - beta2**step).sqrt()
    rate, eps = correction / (1 - beta1**step), group["eps"] * correction
    lr, decay = group["lr"], group["weight_decay"]
    averages, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    if parameters[0].is_cuda:
        from gsa_kernels.fused.adamw.op import squared_updates  # imports Triton

        total = squared_updates(parameters, averages, squares, rate, eps, decay)
    else:
        from gsa_kernels.fused.adamw.reference import squared_update

        parts = zip(parameters, averages, squares, strict=True)
        total = torch.stack([squared_update(*part, rate, eps, decay) for part in parts]).sum()
    return total * (lr / (1 - lr * decay)) ** 2


def muon(groups: list[Group], train: TrainConfig, fused: bool) -> torch.optim.Optimizer:
    from gsa_train.optimizer.muon import Muon

    return Muon(groups, train, fused, lambda others: adamw(others, train, fused))


def muon_change(
    states: list[dict[str, torch.Tensor]], group: Group, parameters: list[torch.Tensor]
) -> torch.Tensor:
    import torch

    if "matrices" not in group:
        return adamw_change(states, group, parameters)
    # Before the first applied update of a process there is no change.
    none = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    return torch.stack([state.get("squared_change", none) for state in states]).sum()


ADAMW_STATE = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(adamw, adamw_change, ADAMW_STATE, "step"),
    "muon": OptimizerKind(muon, muon_change, ADAMW_STATE, "step", matrix_state=("momentum_buffer",)),
}


def optimizer_kind(train: TrainConfig) -> OptimizerKind:
    kind = chosen(OPTIMIZERS, "train.optimizer", train.optimizer)
    if train.weight_average_decay == 0:
        return kind
    matrix_state = None if kind.matrix_state is None else (*kind.matrix_state, WEIGHT_AVERAGE)
    return replace(kind, state=(*kind.state, WEIGHT_AVERAGE), matrix_state=matrix_state)
