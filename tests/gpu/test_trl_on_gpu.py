"""Compares steps of TRL's trainers with the kernels and with eager attention on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from helpers.hf import tiny_model
from helpers.hf_trl import save, trained


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("method", "packed"), [("sft", False), ("sft", True), ("dpo", False)])
def test_losses_equal_eager(tmp_path: Path, method: str, packed: bool, lora: bool) -> None:
    """Answers have about 120 tokens, and a query selects 32 keys."""
    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "index_head_dim": 32,
    }  # fmt: skip
    model = tiny_model(**sizes, index_topk=32, adaptive_k="off", indexer_activation="relu", indexer_rope=True)
    save(model, tmp_path)
    losses = {}
    for attention in ("eager", "gsa"):
        losses[attention], _ = trained(
            str(tmp_path), method, 0.5, lora, repeats=40, use_cpu=False, padding_free=packed, learning_rate=1e-5,
            model_init_kwargs={"indexer_loss_coef": 0.5, "attn_implementation": attention},
        )  # fmt: skip
    torch.testing.assert_close(
        torch.tensor(losses["gsa"]), torch.tensor(losses["eager"]), rtol=1e-3, atol=1e-4
    )
