"""Compute the loss of a training step: the objective over the scored tokens, plus lambda times the indexer loss.

To add an objective, add a function to OBJECTIVES, from which `train.objective` chooses. `train.z_loss_coeff` adds a
z-loss. Validation uses cross-entropy alone. Each layer injects its indexer loss into the backward pass
(distributed/loss_injection.py), scaled by `indexer_kl_grad_scale`.

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
"""Returns the tokens' losses [B, L], fp32, the same on all ranks that split the vocabulary. Arguments: this rank's
logits [L, B, V / tp], labels [B, L], the group of these ranks, whether `train.fused_ops` asks for kernels, and the
settings. The logits are consumed, because `cross_entropy` overwrites them in its forward or backward pass. Compute
other terms first. If autograd saves the logits for the backward pass of such a term, compute it from `logits.clone()`
(`logits.float()` does not copy fp32 logits)."""


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
    """Return the loss to differentiate, which the schedule divides in place, and separate sums for the log.

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
    """Return the factor of a micro-batch's summed loss that makes the global loss a mean over scored tokens.

    megatron-core's schedule divides the loss by the number of micro-batches (`count`), and multiplies it by the
    context-parallel size. The schedule also averages gradients over context- and data-parallel ranks. The factor
    undoes these three operations.
    """
    return count * data_parallel_size / loss_tokens


def indexer_kl_grad_scale(
    kl_coeff: float, num_indexers: int, rows_per_step: torch.Tensor, data_parallel_size: int
) -> torch.Tensor:
    """Return the factor of a layer's KL sum in the loss: fp32, 0-d.

    Each layer's KL sum is multiplied by this factor. Over all ranks and layers, the products add up to lambda
    (`kl_coeff`) times the mean KL over tokens and layers. The mean excludes queries with one causal key, whose KL is
    always 0. The factor contains `data_parallel_size`, because gradients are averaged over the ranks.

    Args:
        kl_coeff: lambda of eq. 15.
        num_indexers: layers of the whole model that have an indexer.
        rows_per_step: number of the global batch's queries in the mean KL, 0-d, at least 1.
        data_parallel_size: ranks over which gradients are averaged, data x context.
    """
    return (kl_coeff * data_parallel_size / num_indexers) / rows_per_step.float()
