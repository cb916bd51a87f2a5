"""A checkpoint of any layout as a model of transformers in memory, without a folder in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gsa_hf import DENSE_LAYER, GSAForCausalLM
from gsa_hf import GSAConfig as HFConfig
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import Config
from gsa_train.convert.export_hf import check_tensors
from gsa_train.convert.names import pairs

EMBEDDING = "embedding.word_embeddings.weight"


def model_in_memory(
    checkpoint: Path,
    config: Config,
    hf_config: HFConfig,
    attn_implementation: str,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> GSAForCausalLM:
    """The weights that training calculates with, in evaluation mode.

    Args:
        config: the checkpoint's.
        hf_config: what `to_hf_config` makes of it, or that with other budgets, a dense one, ...: sizes are the same.
        dtype: of the weights; None: as they are.

    Raises:
        ValueError: the checkpoint is damaged, or of another model than its config says.
    """
    source = CheckpointTensors(checkpoint)
    found = pairs(config.model, config.gsa)
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
        attn_implementation=attn_implementation,
        output_loading_info=True,
    )
    model: GSAForCausalLM = loaded[0]
    report = loaded[1]
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise ValueError(f"{checkpoint}: {wrong[0]} is in the checkpoint or in the model alone")
    return to_device(model, device)


def to_device(model: GSAForCausalLM, device: torch.device | str) -> GSAForCausalLM:
    """For evaluation."""
    module: torch.nn.Module = model  # transformers' own `to` has another signature
    module.to(device).eval().requires_grad_(False)
    return model
