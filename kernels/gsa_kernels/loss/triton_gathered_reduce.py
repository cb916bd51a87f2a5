"""Adds segments of key lists in a fixed order, so that the loss repeats bit for bit."""

import triton
import triton.language as tl

from gsa_kernels.loss.triton_scores import head_weight, head_weight_slope


@triton.jit(do_not_specialize=["num_segments"])
def gathered_reduce_kernel(
    weight_logits,  # [B, R, HI]
    weight_bias,  # [HI]
    beta,  # [1] fp32
    counts,  # [B, N] int32, of the chunk's tiles
    tiles,  # [N] int32: their numbers
    kl_parts,  # [B, N, segments, ROWS] fp32
    grad_a_parts,  # [B, N, segments * SEGMENT / ENTRIES, HP, ROWS] fp32
    grad_z_parts,  # [B, N, segments, HP] fp32
    dq_parts,  # [B, N, segments, HP, ROWS, BLOCK_D] fp32
    row_results,  # out: [B, R, 1 + 2 HI] fp32: KL; then by head d/d beta (to be summed), d/d w_j
    tile_results,  # out: [B, T, HI] fp32: d/d b_j of a tile's rows
    dq,  # out: [B, R, HI, DI]
    dw,  # out: [B, R, HI]
    R,
    T,
    num_segments,
    HI: tl.constexpr,
    HP: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEPS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT_BIAS: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
):
    """One program reduces one tile and one head. Grid: (N, HI, B); HI is 1 without gradients."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * tl.num_programs(0) + tl.program_id(0)
    tile = tl.load(tiles + tl.program_id(0))
    count = tl.load(counts + unit)
    segments = tl.cdiv(count, SEGMENT)
    first_part = unit * num_segments
    row = tl.arange(0, ROWS)
    valid = tile * ROWS + row < R
    row_index = batch * R + tile * ROWS + row
    results = row_results + row_index * (1 + 2 * HI)

    if head == 0:
        kl = tl.zeros([ROWS], tl.float32)
        for segment in range(segments):
            kl += tl.load(kl_parts + (first_part + segment) * ROWS + row)
        tl.store(results, kl, mask=valid)

    if WITH_GRADIENTS:
        d = tl.arange(0, BLOCK_D)
        step_sums = tl.zeros([STEPS, ROWS], tl.float32)
        first_step = unit * num_segments * (SEGMENT // ENTRIES)
        for first in range(0, tl.cdiv(count, ENTRIES), STEPS):
            step = first + tl.arange(0, STEPS)
            parts = grad_a_parts + ((first_step + step) * HP + head)[:, None] * ROWS + row[None, :]
            step_sums += tl.load(parts, mask=(step * ENTRIES < count)[:, None], other=0.0)
        grad_a = tl.sum(step_sums, 0)
        grad_z = tl.full([], 0.0, tl.float32)
        dq_head = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for segment in range(segments):
            part = (first_part + segment) * HP + head
            grad_z += tl.load(grad_z_parts + part)
            dq_head += tl.load(dq_parts + (part * ROWS + row)[:, None] * BLOCK_D + d[None, :])

        logit = tl.load(weight_logits + row_index * HI + head, mask=valid, other=0.0).to(tl.float32)
        if WEIGHT_BIAS:
            logit += tl.load(weight_bias + head).to(tl.float32)
        weight = head_weight(logit, KIND)
        grad_w = tl.load(beta) * grad_a * head_weight_slope(weight, KIND)
        tl.store(results + 1 + head, weight * grad_a, mask=valid)
        tl.store(results + 1 + HI + head, grad_w, mask=valid)
        tl.store(tile_results + (batch * T + tile) * HI + head, grad_z)
        tl.store(dw + row_index * HI + head, grad_w.to(dw.dtype.element_ty), mask=valid)
        tl.store(
            dq + (row_index * HI + head)[:, None] * DI + d[None, :],
            dq_head.to(dq.dtype.element_ty),
            mask=valid[:, None] & (d < DI)[None, :],
        )
