"""Computes cross-entropy over a vocabulary that may be split over ranks. The forward pass and the backward pass each
read the logits once, and allocate no temporary of the size of the logits. The backward pass can overwrite the logits
with their gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype, check_shape
from gsa_kernels.fused.cross_entropy.triton_rows import row_statistics, write_gradient


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Return -log softmax(logits)[target] of each row, in fp32. `cross_entropy` defines the result.

    The function is deterministic. Each rank of `group` gets the same losses and the gradient of its own columns.

    Args:
        logits: [N, V / ranks], this rank's part of the vocabulary in the order of the ranks; bf16 or fp32, rows
            contiguous
        targets: int64 [N] in 0 .. V - 1, the same on every rank
        group: ranks that hold the other parts; None: the vocabulary is whole
        overwrite_logits: the backward pass overwrites the logits with their gradient. No other operation and no second
            backward pass may then need the logits.

    Returns:
        fp32 [N]
    """
    _check(logits, targets)
    return _CrossEntropy.apply(logits, targets.contiguous(), group, overwrite_logits, False)[0]


def cross_entropy_and_log_sums(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of `vocab_parallel_cross_entropy`, and logsumexp(logits) of each row, fp32 [N]. Both are
    differentiable."""
    _check(logits, targets)
    losses, log_sums = _CrossEntropy.apply(logits, targets.contiguous(), group, overwrite_logits, True)
    return losses, log_sums


def _check(logits: torch.Tensor, targets: torch.Tensor) -> None:
    check_shape("logits", logits, "[N, V]", (None, None))
    check_shape("targets", targets, "[N]", (logits.shape[0],))
    check_kernel_dtype("logits", logits, "fused/cross_entropy/reference.py")
    if logits.stride(1) != 1:
        raise ValueError(f"the rows of logits have stride {logits.stride(1)}; make them contiguous")
    if targets.dtype != torch.int64 or targets.device != logits.device:
        raise ValueError(f"targets is {targets.dtype} on {targets.device}; pass int64 on {logits.device}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
        overwrite_logits: bool,
        with_log_sums: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        first_column = 0 if group is None else group.rank() * logits.shape[1]
        maximum, total, target_logit = row_statistics(logits, targets, first_column)
        if group is not None and group.size() > 1:
            maximum, total, target_logit = _over_ranks(maximum, total, target_logit, group)
        ctx.save_for_backward(logits, targets, maximum, total)
        ctx.set_materialize_grads(False)
        ctx.first_column, ctx.overwrite_logits = first_column, overwrite_logits
        logs = total.log()
        return logs + (maximum - target_logit), logs + maximum if with_log_sums else None

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_of_log_sums: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        check_differentiated_once()
        logits, targets, maximum, total = ctx.saved_tensors
        out = logits if ctx.overwrite_logits else torch.empty_like(logits)
        of_losses, of_log_sums = (
            None if each is None else each.float().contiguous() for each in (grad, grad_of_log_sums)
        )
        if of_losses is None:
            of_losses = torch.zeros_like(maximum)
        write_gradient(logits, targets, maximum, total, of_losses, ctx.first_column, out, of_log_sums)
        if ctx.overwrite_logits:
            increment_version(logits)  # so that a second backward pass raises an error
        return out, None, None, None, None


def _over_ranks(
    maximum: torch.Tensor, total: torch.Tensor, target_logit: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce the results of `row_statistics` over the ranks. A rank whose columns exclude a row's target passes 0 as
    the target's logit, so the sum over ranks is this logit."""
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (maximum - highest).exp(), target_logit])
    dist.all_reduce(sums, group=group)
    return highest, sums[0], sums[1]
