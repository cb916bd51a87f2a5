"""Update V̄, the moving average of the score variance, which scales each query's key budget (eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class PreciseBuffers(torch.nn.Module):
    """Keeps its buffers' precision in a bf16 model, where megatron-core would cast buffers to bf16."""

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class VarianceTracker(PreciseBuffers):
    """Holds the moving average V̄ of one layer's score variance, and the sum of the variances in the current step.

    The average V̄ changes only in `update_variance_emas`, after the optimizer step. All micro-batches of a step, and
    their recomputation, therefore use the same V̄, and no token influences an earlier token through V̄. A query with
    one causal key has variance 0 and is not counted in the mean.
    """

    ema: torch.Tensor
    step_sum: torch.Tensor

    def __init__(self, device: torch.device | str, fused: bool = False) -> None:
        """
        Args:
            fused: add in one Triton kernel launch.
        """
        super().__init__()
        self._fused = fused
        self.register_buffer("ema", torch.zeros((), dtype=torch.float32, device=device))
        # sum of this step's variances on this rank
        self.register_buffer(
            "step_sum", torch.zeros((), dtype=torch.float64, device=device), persistent=False
        )

    def record(self, variance: torch.Tensor) -> None:
        if self._fused:
            from gsa_kernels.fused.sums.op import add_total  # imports Triton

            add_total(variance, self.step_sum)
        else:
            self.step_sum.add_(variance.sum(dtype=torch.float64))


@torch.no_grad()
def update_variance_emas(
    trackers: Sequence[VarianceTracker],
    decay: float,
    data_parallel_group: dist.ProcessGroup,
    applied: torch.Tensor,
    counted_rows: torch.Tensor,
) -> None:
    """Update the average V̄ <- decay * V̄ + (1 - decay) * the step's mean variance over all data-parallel ranks.

    Call this after each step that ran the indexers. To spare the host a wait, the device handles these cases:
    - V̄ is 0, as in the first step: V̄ becomes the step's mean.
    - A layer's mean is not finite: the layer keeps its V̄.
    - `applied` (0-d bool) is False, or `counted_rows` is 0: all layers keep their V̄.

    Args:
        data_parallel_group: data- and context-parallel ranks, over which the global batch is sharded.
        counted_rows: 0-d, number of queries in the global batch with at least two causal keys.
    """
    if not trackers:
        return
    sums = torch.stack([tracker.step_sum for tracker in trackers])
    dist.all_reduce(sums, group=data_parallel_group)
    mean = (sums / counted_rows.clamp(min=1)).float()
    emas = torch.stack([tracker.ema for tracker in trackers])
    moved = torch.where(emas == 0, mean, decay * emas + (1 - decay) * mean)
    emas = torch.where((counted_rows > 0) & mean.isfinite() & applied, moved, emas)
    torch._foreach_copy_([tracker.ema for tracker in trackers], list(emas.unbind()))
    torch._foreach_zero_([tracker.step_sum for tracker in trackers])
