"""Reads rows of an embedding in the first kernel of a chain (row_product/op.py explains chains)."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from gsa_kernels.checks import check_kernel_dtype, check_shape
from gsa_kernels.devices import can_chain, launching_on
from gsa_kernels.limits import ceil_div

_COLUMNS = 1024
"""Columns per program: each thread loads 16 bytes of bf16."""


@torch.no_grad()
def look_up(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return weight[tokens], [B, d], for tokens int64 [B] and weight [V, d] in bf16 or fp32.

    The kernel starts after all earlier kernels have ended. It lets the next kernel start early.
    """
    check_shape("tokens", tokens, "[B]", (None,))
    check_shape("weight", weight, "[V, d]", (None, None))
    check_kernel_dtype("weight", weight)
    if not (tokens.is_contiguous() and weight.is_contiguous() and tokens.dtype == torch.int64):
        raise ValueError(
            f"tokens is {tokens.dtype} with stride {tokens.stride()} and weight has stride {weight.stride()}; pass "
            "contiguous tensors, tokens of int64"
        )
    columns = weight.shape[1]
    out = weight.new_empty(len(tokens), columns)
    with launching_on(weight, "weight"):
        grid = (len(tokens), ceil_div(columns, _COLUMNS))
        _look_up_kernel[grid](
            tokens, weight, out, COLUMNS=columns, BLOCK=_COLUMNS, CHAINED=can_chain(weight), num_warps=4
        )
    return out


@triton.jit
def _look_up_kernel(
    tokens_ptr, weight_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    if CHAINED:
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(weight_ptr + tl.load(tokens_ptr + place) * COLUMNS + columns, mask=columns < COLUMNS)
    tl.store(out_ptr + place * COLUMNS + columns, row, mask=columns < COLUMNS)
