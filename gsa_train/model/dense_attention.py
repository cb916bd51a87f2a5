"""Run dense causal attention from other libraries in passes that do not need the probabilities."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gsa_train.config import Config
from gsa_train.distributed.parallel import DeviceError

DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps q [B, L, n_h, d_k], and k and v [B, L, n_kv, d_k], to the output [B, L, n_h, d_k]. Each sequence is one
document."""

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash_sdpa": SDPBackend.FLASH_ATTENTION}


def dense_attention_name(config: Config, dtype: torch.dtype) -> str:
    """Resolve `gsa.dense_attention` on a GPU to `cudnn`, `flash_sdpa`, `flash_attn` or `triton`.

    Raises:
        DeviceError: the library is not installed or does not support this precision.
    """
    chosen = config.gsa.dense_attention
    if chosen in ("triton", "auto"):
        return "triton"
    if dtype == torch.float32:
        raise DeviceError(
            f"gsa.dense_attention = {chosen}: does not support fp32; set it to triton or train.precision to bf16"
        )
    if chosen == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        raise DeviceError(
            "gsa.dense_attention = flash_attn: flash-attn is not installed; "
            "run pip install '.[flash]' in the checkout, or set it to auto"
        )
    return chosen


def build_dense_attention(name: str) -> DenseAttention | None:
    """Return the function with this name; None for `triton`, the sparse-attention kernels."""
    if name == "triton":
        return None
    if name == "flash_attn":
        return _flash_attn()
    backend = _BACKENDS[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):  # raises if this backend cannot run; no fallback
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        if out.requires_grad:
            # torch 2.11 caches cuDNN's backward plans by the strides of q, k and v alone. A cached plan would misread a
            # gradient that has other strides.
            out.register_hook(partial(_in_order_of, out.stride()))
        return out.transpose(1, 2)

    return attend


def _in_order_of(stride: tuple[int, ...], grad: torch.Tensor) -> torch.Tensor:
    if grad.stride() == stride:
        return grad
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def _flash_attn() -> DenseAttention:
    from flash_attn import flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True, deterministic=True)

    return attend
