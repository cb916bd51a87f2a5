"""Replacing torch's functions leaves the rest of torch, and transformers, as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import torch
from gsa_train import cpu_backend

cpu_backend.install()
with torch.device("meta"):
    made = [torch.arange(3), torch.empty(2), torch.full((2,), 1.0), torch.ones(2), torch.rand(2), torch.randn(2),
            torch.tensor([1.0]), torch.zeros(2)]
assert {tensor.device.type for tensor in made} == {"meta"}, made
assert torch.ones(2, device="cuda").device.type == "cpu"
"""


def test_a_device_context_reaches_what_is_replaced() -> None:
    """In a process that has had no such context before, where torch would first meet the replacements."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], cwd=ROOT, check=True)
