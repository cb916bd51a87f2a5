"""Compute the training loss: an objective over the scored tokens, plus lambda times the indexer loss.

To add an objective, add a function to OBJECTIVES, and choose it by `train.objective`. `train.z_loss_coeff` adds a
z-loss. Validation uses cross-entropy alone. The indexer (which selects the keys of a query) has a loss in each layer.
This loss enters the backward pass (distributed/loss_injection.py) with the factor `indexer_kl_grad_scale`.

This module does not import torch, so a config's objective is checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from gsa_train.config import TrainConfig

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Objective: TypeAlias = (
    "Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool, TrainConfig], torch.Tensor]"
)
"""Returns the loss of each token: fp32 [B, L], equal on all tensor-parallel ranks. Arguments: logits [L, B, V / tp] of
this rank, labels [B, L], the tensor-parallel group, whether to use fused kernels (`train.fused_ops`), and the section
`train`. `cross_entropy` overwrites the logits in its forward or backward pass, so compute other terms first. If
autograd saves the logits for such a term, give it `logits.clone()` (`logits.float()` does not copy fp32 logits)."""


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, fused: bool, train: TrainConfig
) -> torch.Tensor:
    """Compute -log p(label) of each token. The fused kernel overwrites the logits with their gradient in the backward
    pass. megatron-core's version overwrites fp32 logits with their softmax in the forward pass, and copies bf16 logits
    to fp32."""
    if not fused:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()
    from gsa_kernels.fused.cross_entropy import op  # imports Triton

    losses = op.vocab_parallel_cross_entropy(
        logits.flatten(0, 1), labels.t().reshape(-1), group=group, overwrite_logits=True
    )
    return losses.view(logits.shape[:2]).t().contiguous()


OBJECTIVES: dict[str, Objective] = {"cross_entropy": cross_entropy}


def training_losses(
    objective: Objective,
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    fused: bool,
    train: TrainConfig,
) -> torch.Tensor:
    """Return the objective's losses [B, L] or, with `train.z_loss_coeff`, objective and z-loss [2, B, L]."""
    if train.z_loss_coeff == 0:
        return objective(logits, labels, group, fused, train)
    import torch

    if fused and objective is cross_entropy:
        from gsa_kernels.fused.cross_entropy import op  # imports Triton

        rows, targets = logits.flatten(0, 1), labels.t().reshape(-1)
        found = op.cross_entropy_and_log_sums(rows, targets, group=group, overwrite_logits=True)
        losses, log_sums = (each.view(logits.shape[:2]).t() for each in found)
    else:
        log_sums = log_sum_exp(logits, group).t()  # before the objective consumes the logits
        losses = objective(logits, labels, group, fused, train)
    return torch.stack([losses, train.z_loss_coeff * log_sums.square()])


def log_sum_exp(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the log of the softmax's denominator, fp32 [L, B], of this rank's logits [L, B, V / tp]."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    wide = logits.float()
    maximum = wide.detach().amax(-1)
    if group.size() > 1:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    total = reduce_from_tensor_model_parallel_region((wide - maximum[..., None]).exp().sum(-1), group)
    return total.log() + maximum


def masked_loss(
    loss_mask: torch.Tensor, loss_scale: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss to differentiate and the sums for the log. The sums are copies, because megatron-core's schedule
    divides the loss in place.

    Args:
        token_losses: result of `training_losses`.
    """
    parts = token_losses.unbind() if token_losses.dim() == 3 else (token_losses,)
    sums = [(part.float() * loss_mask).sum() for part in parts]
    logged = {
        name: each.detach().clone() for name, each in zip(("loss_sum", "z_loss_sum"), sums, strict=False)
    }
    return (sums[0] if len(sums) == 1 else sums[0] + sums[1]) * loss_scale, logged


def loss_scale(count: int, loss_tokens: torch.Tensor, data_parallel_size: int) -> torch.Tensor:
    """Return the factor on a micro-batch's summed loss that makes the step's loss a mean over scored tokens.

    megatron-core's schedule divides the loss by the number of micro-batches (`count`), and multiplies it by the
    context-parallel size. The schedule also averages gradients over context- and data-parallel ranks. The factor
    undoes these three operations.
    """
    return count * data_parallel_size / loss_tokens


def indexer_kl_grad_scale(
    kl_coeff: float, num_indexers: int, rows_per_step: torch.Tensor, data_parallel_size: int
) -> torch.Tensor:
    """Return the factor for a layer's indexer loss, which is a sum of KL divergences: fp32, 0-d.

    With this factor, the indexer losses of all ranks and layers add up to lambda (`kl_coeff`) times the mean KL over
    queries and layers. The mean excludes queries with one causal key, whose KL is always 0. The factor contains
    `data_parallel_size`, because gradients are averaged over the ranks.

    Args:
        kl_coeff: lambda of eq. 15.
        num_indexers: layers of the whole model that have an indexer.
        rows_per_step: number of the global batch's queries in the mean KL, 0-d, at least 1.
        data_parallel_size: ranks over which gradients are averaged, data x context.
    """
    return (kl_coeff * data_parallel_size / num_indexers) / rows_per_step.float()
