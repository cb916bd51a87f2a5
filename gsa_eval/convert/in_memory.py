"""Load a checkpoint of any layout as a transformers model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gsa_eval.convert.export_hf import check_tensors
from gsa_eval.convert.names import pairs
from gsa_hf import DENSE_LAYER, GSAConfig, GSAForCausalLM
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import Config

EMBEDDING = "embedding.word_embeddings.weight"


def model_in_memory(
    checkpoint: Path,
    config: Config,
    hf_config: GSAConfig,
    attention: str,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> GSAForCausalLM:
    """Load the weights that training computes with, in evaluation mode.

    Args:
        hf_config: result of `to_hf_config`, perhaps with other budgets or dense attention, but the same sizes.
        dtype: dtype of the weights; None: unchanged.

    Raises:
        ValueError: the checkpoint is damaged, or does not fit its config.
    """
    source = CheckpointTensors(checkpoint)
    found = pairs(config)
    check_tensors(checkpoint, source, found)
    has_indexer = set(hf_config.layer_types or ()) != {DENSE_LAYER}
    state: dict[str, Any] = {}
    for pair in found:
        parts = pair.split(source.read(pair.ours))
        for name, part in zip(pair.theirs, parts, strict=True):
            if has_indexer or ".indexer." not in name:
                state[name] = part
    loaded: Any = GSAForCausalLM.from_pretrained(
        None,
        config=hf_config,
        state_dict=state,
        dtype=dtype or source.kinds[EMBEDDING].dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    model: GSAForCausalLM = loaded[0]
    if wrong := sorted({*loaded[1]["missing_keys"], *loaded[1]["unexpected_keys"]}):
        raise ValueError(f"{checkpoint}: {wrong[0]} is only in the checkpoint or only in the model")
    return to_device(model, device)


def to_device(model: GSAForCausalLM, device: torch.device | str) -> GSAForCausalLM:
    module: torch.nn.Module = model  # transformers' own `to` has another signature
    module.to(device).eval().requires_grad_(False)
    return model
