"""Splits the projection and applies RoPE and gate G2, by one kernel forward and one backward."""

from typing import Any

import torch

from gsa_kernels.checks import check_differentiated_once, check_kernel_dtype, check_layout, check_shape
from gsa_kernels.fused.gates.rows import take_projection
from gsa_kernels.fused.split_rotate_gate.triton_heads import heads_backward_kernel, heads_kernel
from gsa_kernels.limits import HEAD_SIZES, ceil_div

# Tokens per program and warps, measured on an H200 with 4 x 4096 tokens, 16 / 4 heads of 128, in bf16.
ROWS, WARPS = 16, 4


def fused_split_rotate_gate(
    qkv: torch.Tensor,
    gate_logits: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    kv_heads: int,
    value_gate: bool,
    output_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rotated Q and K, V * sigmoid(G2), and the logits of G1. `split_rotate_gate` defines the result.

    Results are views [B, L, ...] of memory in the order [L, B, ...]. The logits of G1 are a view of gate_logits. cos
    and sin get no gradients.

    Args:
        qkv: [L, B, Hkv (G + 2) D] for G query heads per key-value head, contiguous, D one of limits.HEAD_SIZES; bf16 or
            fp32
        gate_logits: [L, B, Hkv rows], with the rows that `split_rotate_gate` names, contiguous, dtype of qkv; None
            without gates
        cos, sin: fp32 [L, D / 2], for the tokens' positions, contiguous
    """
    check_shape("qkv", qkv, "[L, B, Hkv (G + 2) D]", (None, None, None))
    length, batch, width = qkv.shape
    check_shape("cos", cos, "[L, D / 2]", (length, None))
    check_shape("sin", sin, "[L, D / 2]", tuple(cos.shape))
    size = 2 * cos.shape[1]
    if size not in HEAD_SIZES:
        raise ValueError(
            f"cos has {cos.shape[1]} columns, so heads of {size}; pass heads of one of {HEAD_SIZES}"
        )
    if kv_heads < 1 or width % (kv_heads * size) != 0 or width // (kv_heads * size) < 3:
        raise ValueError(
            f"qkv has {width} columns; pass Hkv (G + 2) D with Hkv = {kv_heads}, D = {size}, G >= 1"
        )
    check_kernel_dtype("qkv", qkv, "fused/split_rotate_gate/reference.py")
    group = width // (kv_heads * size) - 2
    rows = kv_heads * size * (value_gate + group * output_gate)
    if (gate_logits is None) != (rows == 0):
        raise ValueError(f"gate_logits is {gate_logits}; pass it exactly when there is a gate")
    check_layout("qkv", qkv, qkv.dtype, qkv.device)
    for name, table in (("cos", cos), ("sin", sin)):
        check_layout(name, table, torch.float32, qkv.device)
    if gate_logits is not None:
        check_shape("gate_logits", gate_logits, "[L, B, Hkv rows]", (length, batch, rows))
        check_layout("gate_logits", gate_logits, qkv.dtype, qkv.device)
    q, k, v, gates = _SplitRotateGate.apply(
        qkv, gate_logits, cos, sin, kv_heads, group, value_gate, output_gate
    )
    return q, k, v, gates


class _SplitRotateGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        gate_logits: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_heads: int,
        group: int,
        value_gate: bool,
        output_gate: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        length, batch, _ = qkv.shape
        size, heads = 2 * cos.shape[1], kv_heads * group
        q = qkv.new_empty(length, batch, heads, size)
        k, v = qkv.new_empty(2, length, batch, kv_heads, size)
        ctx.shape = (length, batch, kv_heads, group, size)
        ctx.value_gate, ctx.output_gate = value_gate, output_gate
        heads_kernel[_grid(ctx.shape)](
            qkv,
            gate_logits,
            cos,
            sin,
            q,
            k,
            v,
            length * batch,
            batch,
            **_constants(ctx),
            num_warps=WARPS,
        )
        # The gradient of the gate follows from the gated V, which attention saves as well: v = gated / sigmoid.
        ctx.save_for_backward(cos, sin, *((gate_logits, v) if value_gate else ()))
        gates = None
        if gate_logits is not None and output_gate:
            rows = gate_logits.view(length, batch, kv_heads, value_gate + group, size)
            gates = rows[..., value_gate:, :].transpose(0, 1)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), gates

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_differentiated_once()
        cos, sin, *gated = ctx.saved_tensors
        gate_logits, v = gated or (None, None)
        length, batch, kv_heads, group, size = ctx.shape
        grad_q, grad_k, grad_v, grad_gates = (
            grad if grad is None or grad.stride(-1) == 1 else grad.contiguous() for grad in grads
        )
        assert grad_q is not None
        grad_qkv = grad_q.new_empty(length, batch, kv_heads * (group + 2) * size)
        rows = ctx.value_gate + group * ctx.output_gate
        grad_logits = None if grad_gates is None else take_projection(grad_gates)
        copies_gates = grad_gates is not None and grad_logits is None
        if rows and grad_logits is None:
            grad_logits = grad_q.new_empty(length, batch, kv_heads, rows, size)
        strides = [
            stride
            for grad in (grad_q, grad_k, grad_v, grad_gates)
            for stride in (grad.stride()[:-1] if grad is not None else (0, 0, 0, 0))
        ]
        heads_backward_kernel[_grid(ctx.shape)](
            grad_q,
            grad_k,
            grad_v,
            grad_gates,
            gate_logits,
            v,
            cos,
            sin,
            grad_qkv,
            grad_logits,
            *strides,
            length * batch,
            batch,
            **_constants(ctx),
            COPY_GATES=copies_gates,
            num_warps=WARPS,
        )
        return (grad_qkv, None if grad_logits is None else grad_logits.flatten(2), *(None,) * 6)


def _grid(shape: tuple[int, int, int, int, int]) -> tuple[int, int]:
    length, batch, kv_heads, _, _ = shape
    return ceil_div(length * batch, ROWS), kv_heads


def _constants(ctx: Any) -> dict[str, Any]:
    _, _, kv_heads, group, size = ctx.shape
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": size,
        "ROWS": ROWS,
        "GATE_ROWS": ctx.value_gate + group * ctx.output_gate,
        "VALUE_GATE": ctx.value_gate,
    }
