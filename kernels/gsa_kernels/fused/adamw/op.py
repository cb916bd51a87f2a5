"""Computes `squared_update` of many parameters, each in one pass over weight and moments, without large temporaries."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gsa_kernels.devices import launching_on
from gsa_kernels.limits import ceil_div

# Each thread makes two loads of 16 bytes from an fp32 tensor. An H200 runs MAX_PROGRAMS at once (not measured).
ELEMENTS, WARPS, MAX_PROGRAMS = 2048, 8, 1056


def squared_updates(
    weights: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rate: torch.Tensor,
    eps: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """Sum `squared_update` over the parameters: 0-d fp64, deterministic; fp32 sums within a program.

    Args:
        weights, exp_avgs, exp_avg_sqs: at least one of each; contiguous, any floats, on one device
        rate, eps: 0-d fp32, on the same device
    """
    for name, tensors in (("weights", weights), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        for tensor, weight in zip(tensors, weights, strict=True):
            if not tensor.is_contiguous() or tensor.shape != weight.shape:
                raise ValueError(
                    f"{name} has {tuple(tensor.shape)} for a weight {tuple(weight.shape)}, or has gaps"
                )
    programs = [min(ceil_div(weight.numel(), ELEMENTS), MAX_PROGRAMS) for weight in weights]
    partials = torch.empty(sum(programs), dtype=torch.float32, device=rate.device)
    parts = partials.split(programs)
    with launching_on(rate, "rate"):
        for weight, average, square, part in zip(weights, exp_avgs, exp_avg_sqs, parts, strict=True):
            if len(part) > 0:
                _update_kernel[(len(part),)](
                    weight, average, square, rate, eps, part, weight.numel(), decay,
                    ELEMENTS=ELEMENTS, num_warps=WARPS,
                )  # fmt: skip
    return partials.sum(dtype=torch.float64)


@triton.jit(do_not_specialize=["decay"])
def _update_kernel(
    weights, exp_avgs, exp_avg_sqs, rate, eps, partials, count, decay, ELEMENTS: tl.constexpr
):  # fmt: skip
    """One program sums stretches of ELEMENTS at a fixed stride."""
    rate_value, eps_value = tl.load(rate), tl.load(eps)
    total = tl.zeros([ELEMENTS], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ELEMENTS
    stride = tl.num_programs(0).to(tl.int64) * ELEMENTS
    for start in range(first, count, stride):
        index = start + tl.arange(0, ELEMENTS)
        exists = index < count
        weight = tl.load(weights + index, mask=exists, other=0.0).to(tl.float32)
        average = tl.load(exp_avgs + index, mask=exists, other=0.0).to(tl.float32)
        square = tl.load(exp_avg_sqs + index, mask=exists, other=1.0).to(tl.float32)
        update = average / (tl.sqrt(square) + eps_value) * rate_value + weight * decay
        total += update * update
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))
