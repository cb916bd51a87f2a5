"""Computes the backward pass of attention over selected keys, deterministically.

One kernel computes the gradient of q, and another kernel computes the gradients of k and v.

Let O be the output before the gate, `out` the gated output, and U the gradient of `out`. Then
    dO = U sigmoid(gate)
    delta = sum_d dO O = sum_d U out
    dgate = U O sigmoid'(gate) = U out (1 - sigmoid(gate))
All three can be computed from `out` without O, so the forward pass saves only `out`.
"""

import torch
import triton
import triton.language as tl

from gsa_kernels.attention.inputs import AttentionInputs, GradientInputs
from gsa_kernels.attention.triton_backward_keys import backward_keys
from gsa_kernels.attention.triton_backward_queries import backward_queries
from gsa_kernels.fused.gates.rows import empty_gradient
from gsa_kernels.limits import ceil_div
from gsa_kernels.triton_constants import LOG2_E


def attention_backward(
    grad: torch.Tensor,
    inputs: AttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    packed_mask: torch.Tensor | None,
    document_starts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of q, k, v and the gate logits from `grad`, the gradient of `out`. `out` and `lse` are the
    results of the forward pass."""
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grad_attended, grad_gate, delta, lse2 = backward_rows(grad, out, lse, inputs.gate_logits)
    shared = GradientInputs(grad_attended, inputs.q, inputs.k, inputs.v, delta, lse2)
    grad_q = backward_queries(shared, packed_mask, document_starts)
    grad_k, grad_v = backward_keys(shared, packed_mask, document_starts)
    return grad_q, grad_k, grad_v, grad_gate


def backward_rows(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gate_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Compute what the backward kernels need once per query and head.

    Returns:
        gradient of the ungated output [B, L, H, D], gradient of gate_logits [B, L, Hkv, H / Hkv, D] or None,
        delta (the sum over channels of output times its gradient) and lse * log2(e), fp32 [B, H, L]
    """
    batch, length, heads, head_size = out.shape
    gated = gate_logits is not None
    grad_attended = torch.empty_like(out) if gated else grad
    grad_gate = empty_gradient(gate_logits) if gate_logits is not None else None
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = 8
    # The first axis of the grid takes all programs, because the other axes are limited to 65535 programs.
    _rows_kernel[(ceil_div(length, rows) * batch * heads,)](
        grad,
        out,
        gate_logits,
        lse,
        grad_attended,
        grad_gate,
        delta,
        lse2,
        *grad.stride()[:3],
        *out.stride()[:3],
        *(gate_logits.stride()[:4] if gate_logits is not None else (0, 0, 0, 0)),
        *grad_attended.stride()[:3],
        *(grad_gate.stride()[:4] if grad_gate is not None else (0, 0, 0, 0)),
        length,
        heads,
        GROUP=gate_logits.shape[3] if gate_logits is not None else 1,
        D=head_size,
        ROWS=rows,
        HAS_GATE=gated,
        num_warps=4,
    )
    return grad_attended, grad_gate, delta, lse2


@triton.jit
def _rows_kernel(
    grad, out, gate, lse, grad_attended, grad_gate, delta, lse2,
    stride_ub, stride_ul, stride_uh,
    stride_ob, stride_ol, stride_oh,
    stride_gb, stride_gl, stride_gg, stride_gh,
    stride_ab, stride_al, stride_ah,
    stride_sb, stride_sl, stride_sg, stride_sh,
    length, heads,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, ROWS)
    of_all = tl.program_id(0) // tiles
    batch, head = (of_all // heads).to(tl.int64), (of_all % heads).to(tl.int64)
    rows = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    dims = tl.arange(0, D)[None, :]
    valid = rows < length
    mask = valid[:, None]

    grad += batch * stride_ub + head * stride_uh
    out += batch * stride_ob + head * stride_oh
    u = tl.load(grad + rows[:, None] * stride_ul + dims, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(out + rows[:, None] * stride_ol + dims, mask=mask, other=0.0).to(tl.float32)
    product = u * o
    position = (batch * heads + head) * length + rows
    tl.store(delta + position, tl.sum(product, 1), mask=valid)
    tl.store(lse2 + position, tl.load(lse + position, mask=valid, other=0.0) * LOG2_E, mask=valid)
    if HAS_GATE:
        gate += batch * stride_gb + head // GROUP * stride_gg + head % GROUP * stride_gh
        grad_attended += batch * stride_ab + head * stride_ah
        grad_gate += batch * stride_sb + head // GROUP * stride_sg + head % GROUP * stride_sh
        logits = tl.load(gate + rows[:, None] * stride_gl + dims, mask=mask, other=0.0).to(tl.float32)
        attended = u * tl.sigmoid(logits)
        target = grad_attended + rows[:, None] * stride_al + dims
        tl.store(target, attended.to(grad_attended.dtype.element_ty), mask=mask)
        # 1 - sigmoid(x) = sigmoid(-x); the right side does not cancel where the gate is open.
        by_gate = product * tl.sigmoid(-logits)
        target = grad_gate + rows[:, None] * stride_sl + dims
        tl.store(target, by_gate.to(grad_gate.dtype.element_ty), mask=mask)
