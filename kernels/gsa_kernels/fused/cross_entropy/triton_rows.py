"""Implements the kernels of the cross-entropy: statistics of each row of logits, and the gradient."""

import torch
import triton
import triton.language as tl

from gsa_kernels.limits import ceil_div, next_power_of_2
from gsa_kernels.triton_constants import LOG2_E

# Columns per step and warps, measured on an H200 with [16384, 128256] in bf16.
STATISTICS_COLUMNS, STATISTICS_WARPS = 8192, 8
GRADIENT_COLUMNS, GRADIENT_WARPS = 4096, 4


def row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, first_column: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return maximum, sum of exp(logit - maximum), and the target's logit (0 if another rank holds it): fp32 [N] each.

    Args:
        logits: [N, V]
        targets: int64 [N]
        first_column: token id of the first column
    """
    rows, columns = logits.shape
    maximum, total, target_logit = logits.new_empty(3, rows, dtype=torch.float32)
    if rows:
        _vocabulary_statistics_kernel[(rows,)](
            logits,
            targets,
            maximum,
            total,
            target_logit,
            logits.stride(0),
            first_column,
            columns,
            BLOCK=min(STATISTICS_COLUMNS, next_power_of_2(columns)),
            num_warps=STATISTICS_WARPS,
        )
    return maximum, total, target_logit


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    grad: torch.Tensor,
    first_column: int,
    out: torch.Tensor,
    grad_of_log_sums: torch.Tensor | None = None,
) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`.

    With p = exp(logits - maximum) / total, the gradient is p * (grad + grad_of_log_sums), minus grad in the column of
    the target.

    Args:
        maximum, total, grad, grad_of_log_sums: fp32 [N]
        out: dtype and shape of logits, rows contiguous
    """
    rows, columns = logits.shape
    if rows:
        block = min(GRADIENT_COLUMNS, next_power_of_2(columns))
        _vocabulary_gradient_kernel[(rows, ceil_div(columns, block))](
            logits,
            targets,
            maximum,
            total,
            grad,
            grad if grad_of_log_sums is None else grad_of_log_sums,
            out,
            logits.stride(0),
            out.stride(0),
            first_column,
            columns,
            LOG_SUMS=grad_of_log_sums is not None,
            BLOCK=block,
            num_warps=GRADIENT_WARPS,
        )


@triton.jit
def _vocabulary_statistics_kernel(
    logits, targets, maximum, total, target_logit, stride, first_column, columns, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest = -float("inf")
    weight = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(logits + offsets, mask=offsets < columns, other=-float("inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(x, 0))
        weight *= tl.exp2((highest - new_highest) * LOG2_E)
        weight += tl.sum(tl.exp2((x - new_highest) * LOG2_E), 0)
        highest = new_highest
    tl.store(maximum + row, highest)
    tl.store(total + row, weight)
    target = tl.load(targets + row) - first_column
    held = (target >= 0) & (target < columns)
    tl.store(target_logit + row, tl.load(logits + target, mask=held, other=0.0).to(tl.float32))


@triton.jit
def _vocabulary_gradient_kernel(
    logits, targets, maximum, total, grad, grad_of_log_sums, out, stride, stride_out, first_column, columns,
    LOG_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(logits + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    probability = tl.exp2((x - tl.load(maximum + row)) * LOG2_E) / tl.load(total + row)
    target = tl.load(targets + row) - first_column
    result = tl.where(offsets == target, probability - 1.0, probability) * tl.load(grad + row)
    if LOG_SUMS:
        result += probability * tl.load(grad_of_log_sums + row)
    tl.store(out + row * stride_out + offsets, result.to(out.dtype.element_ty), mask=inside)
