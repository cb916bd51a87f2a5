"""Replaces what the benches of training steps need from a CUDA device on machines without one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(harness, "require_cuda", lambda: None)
