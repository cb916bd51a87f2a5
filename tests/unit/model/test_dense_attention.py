"""Tests which dense attention a config selects."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from gsa_train.model import dense_attention
from gsa_train.model.dense_attention import build_dense_attention, dense_attention_name
from helpers.single_rank import CONFIG


def config_with(name: str) -> Any:
    return dataclasses.replace(CONFIG, gsa=dataclasses.replace(CONFIG.gsa, dense_attention=name))


def test_names() -> None:
    for name in ("cudnn", "flash_sdpa", "triton"):
        assert dense_attention_name(config_with(name), torch.bfloat16) == name
    for dtype in (torch.bfloat16, torch.float32):  # cuDNN's gradients differ from run to run
        assert dense_attention_name(config_with("auto"), dtype) == "triton"
    assert build_dense_attention("triton") is None
    assert build_dense_attention("cudnn") is not None


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_attention.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"flash-attn is not installed; run pip install '\.\[flash\]'"):
        dense_attention_name(config_with("flash_attn"), torch.bfloat16)
    with pytest.raises(ValueError, match="cudnn: does not support fp32; set it to triton"):
        dense_attention_name(config_with("cudnn"), torch.float32)


def test_the_backward_pass_sees_one_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient has one memory order, whatever the next layer produces."""
    strides: list[tuple[int, ...]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone(memory_format=torch.preserve_format)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            strides.append(grad.stride())
            return grad

    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: Watched.apply(plain(*args, **kwargs))
    )
    monkeypatch.setitem(dense_attention._BACKENDS, "cudnn", SDPBackend.MATH)
    attend = build_dense_attention("cudnn")
    q, k, v = (torch.randn(2, 6, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    found = []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)):
        grad = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
        ordered = grad.permute(order).contiguous().permute(tuple(order.index(i) for i in range(4)))
        found.append(torch.autograd.grad(attend(q, k, v), (q, k, v), ordered))
    assert len(set(strides)) == 1
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
