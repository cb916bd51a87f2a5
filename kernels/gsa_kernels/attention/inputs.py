"""Defines and checks the inputs of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gsa_kernels.checks import (
    check_at_least,
    check_dtype_and_device,
    check_head_counts,
    check_head_size,
    check_kernel_dtype,
    check_shape,
    check_unit_strides,
)
from gsa_kernels.devices import interpreted, shared_memory
from gsa_kernels.fused.gates.rows import grouped
from gsa_kernels.limits import ADA_SHARED_BYTES, HOPPER_SHARED_BYTES
from gsa_kernels.types import Geometry

ALL_OF_ONE_SEQUENCE = Geometry()


@dataclass(frozen=True)
class AttentionInputs:
    """Holds the inputs that both passes of attention read."""

    q: torch.Tensor
    """[B, L, H, D]"""
    k: torch.Tensor
    """[B, Lk, Hkv, D]"""
    v: torch.Tensor
    """[B, Lk, Hkv, D]"""
    gate_logits: torch.Tensor | None
    """[B, L, Hkv, H / Hkv, D], G1 before its sigmoid."""

    @property
    def scale(self) -> float:
        """Return the scale of the logits: 1 / sqrt(D)."""
        return float(self.q.shape[3] ** -0.5)


@dataclass(frozen=True)
class GradientInputs:
    """Holds the inputs of both backward kernels, for the queries and for the keys."""

    grad: torch.Tensor
    """[B, L, H, D], gradient of the output before the gate."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    delta: torch.Tensor
    """fp32 [B, H, L], sum_d grad * output."""
    lse2: torch.Tensor
    """fp32 [B, H, L], log-sum-exp of the logits, times log2(e)."""

    @property
    def scale(self) -> float:
        """Return the scale of the logits: 1 / sqrt(D)."""
        return float(self.q.shape[3] ** -0.5)


def checked_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_logits: torch.Tensor | None,
    query_start: int | None,
    **integers: torch.Tensor | None,
) -> AttentionInputs:
    """Return the inputs if the kernels support them.

    Args:
        query_start: None if the queries may be at any positions
        integers: integer tensors by argument name (packed mask, document starts); each may be None

    Raises:
        ValueError: the kernels do not support an input; the message names the argument and the remedy.
    """
    check_shape("q", q, "[B, L, H, D]", (None, None, None, None))
    batch, length, heads, dim = q.shape
    if query_start is None:
        check_shape("k", k, "[B, Lk, Hkv, D]", (batch, None, None, dim))
        query_start = k.shape[1] - length
    else:
        check_at_least("query_start", query_start, 0)
    num_keys = query_start + length
    check_shape("k", k, "[B, query_start + L, Hkv, D]", (batch, num_keys, None, dim))
    kv_heads = k.shape[2]
    check_shape("v", v, "[B, query_start + L, Hkv, D]", (batch, num_keys, kv_heads, dim))
    if 0 in (batch, length, heads):
        raise ValueError(f"q has shape {tuple(q.shape)}; pass at least one sequence, token and head")
    check_head_counts(heads, kv_heads)
    check_head_size(dim)
    check_kernel_dtype("q", q)
    floats = {"q": q, "k": k, "v": v}
    if gate_logits is not None:
        if gate_logits.ndim == 5:
            shape = (batch, length, kv_heads, heads // kv_heads, dim)
            check_shape("gate_logits", gate_logits, "[B, L, Hkv, H / Hkv, D]", shape)
        else:
            check_shape("gate_logits", gate_logits, "[B, L, H, D]", tuple(q.shape))
        floats["gate_logits"] = gate_logits
    given = {name: tensor for name, tensor in integers.items() if tensor is not None}
    if "packed_mask" in given:
        of_mask = (batch, length, -(-num_keys // 32))
        check_shape("packed_mask", given["packed_mask"], "[B, L, ceil(Lk / 32)]", of_mask)
    if "document_starts" in given:
        check_shape("document_starts", given["document_starts"], "[B, L]", (batch, length))
    check_dtype_and_device("q", q, floats)
    for name, tensor in given.items():
        if tensor.dtype != torch.int32 or tensor.device != q.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; pass int32 on {q.device}")
    check_unit_strides(floats | given)
    if q.device.type != "cuda" and not interpreted():
        raise ValueError(f"q is on {q.device}; pass CUDA tensors (or set TRITON_INTERPRET=1 to test on CPU)")
    needed, found = HOPPER_SHARED_BYTES if dim > 128 else ADA_SHARED_BYTES, shared_memory(q.device)
    if found < needed:
        major, minor = torch.cuda.get_device_capability(q.device)
        raise ValueError(
            f"heads of {dim} need {needed // 1024} KiB of shared memory, and sm_{major}{minor} has "
            f"{found // 1024} KiB; pass implementation='reference' (training: gsa.attention_impl=reference)"
        )
    return AttentionInputs(q, k, v, grouped(gate_logits, kv_heads))
