"""The loss of a training step: the objective over the scored tokens + lambda * the indexer loss.

A new objective is a function and a row of OBJECTIVES; `train.objective` chooses. Validation scores the cross-entropy
whatever was trained. The indexer loss does not pass through here: each layer adds its own to the backward pass
(distributed/loss_injection.py), scaled by `indexer_kl_grad_scale`.

Loads no torch by itself: the name in a config is checked before torch is loaded.
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
"""This rank's logits [L, B, V / tp], labels [B, L], the ranks that split the vocabulary, whether `train.fused_ops`
asks for kernels, the settings -> losses of the tokens [B, L], fp32, the same on all these ranks.

The logits are consumed: `cross_entropy` overwrites them in its forward or backward pass. An objective computes other
terms of them before, from `logits.clone()` (`logits.float()` copies nothing where they are fp32)."""


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, fused: bool, train: TrainConfig
) -> torch.Tensor:
    """-log p(label). The fused one overwrites the logits with their gradient in the backward pass. megatron-core's
    overwrites fp32 logits with their softmax in the forward pass, and takes an fp32 copy of bf16 logits."""
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


def masked_loss(
    loss_mask: torch.Tensor, loss_scale: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss to differentiate and, apart from it, the sum to log: the schedule divides the first in place."""
    loss_sum = (token_losses.float() * loss_mask).sum()
    return loss_sum * loss_scale, {"loss_sum": loss_sum.detach().clone()}


def loss_scale(count: int, loss_tokens: torch.Tensor, data_parallel_size: int) -> torch.Tensor:
    """Factor of the summed loss of one of `count` micro-batches, before megatron-core's schedule.

    This divides it by their number, multiplies it by the context-parallel ranks, and averages gradients over these and
    the replicas; undoing all this gives the mean over the scored tokens of the global batch, however they are spread.
    """
    return count * data_parallel_size / loss_tokens


def indexer_kl_grad_scale(
    kl_coeff: float, num_indexers: int, rows_per_step: torch.Tensor, data_parallel_size: int
) -> torch.Tensor:
    """Factor that turns a layer's sum of KL over rows into lambda times the mean over tokens and layers: fp32, 0-d.

    Rows whose query sees one key are not in the mean: their KL is 0 whatever the indexer says. Data-parallel gradients
    are averaged afterwards, which the last factor undoes.

    Args:
        kl_coeff: lambda of eq. 15.
        num_indexers: layers of the whole model that have an indexer.
        rows_per_step: 0-d, at least 1: rows that count, of the whole global batch.
        data_parallel_size: ranks over which gradients are averaged, data x context.
    """
    return (kl_coeff * data_parallel_size / num_indexers) / rows_per_step.float()
