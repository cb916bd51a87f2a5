"""Which dense attention a config means."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

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
    with pytest.raises(ValueError, match="flash_attn: not installed; install flash-attn"):
        dense_attention_name(config_with("flash_attn"), torch.bfloat16)
    with pytest.raises(ValueError, match="cudnn: has no fp32; set it to triton"):
        dense_attention_name(config_with("cudnn"), torch.float32)
