"""A checkpoint of any layout, or an exported folder, as a model of transformers in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from gsa_data.tokenize import text_after
from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_train.checkpoint.load import read_run_state
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import config_from_yaml
from gsa_train.convert.export_hf import check_tensors, tokenizer_of
from gsa_train.convert.hf_config import to_hf_config
from gsa_train.convert.names import pairs


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer."""

    model: GSAForCausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    """Tokens of the tokenizer; the model may have more, which stand for nothing."""

    def text_after(self, prompt: list[int], new: list[int]) -> str:
        return text_after(self.decode, prompt, new)


def load_checkpoint_model(checkpoint: Path, device: torch.device, attention: str) -> TextModel:
    """
    Args:
        checkpoint: a step_* folder, or one that `import_hf` wrote
        attention: `attn_implementation`

    Raises:
        ValueError: the checkpoint is damaged or of another model than its config says, or its tokenizer is missing.
    """
    state = read_run_state(checkpoint)
    config = config_from_yaml(state.config_yaml, checkpoint / "common.pt")
    tokenizer = tokenizer_of(checkpoint, config, state)
    source = CheckpointTensors(checkpoint)
    found = pairs(config.model, config.gsa)
    check_tensors(checkpoint, source, found)
    tensors: dict[str, torch.Tensor] = {}
    for pair in found:
        tensors |= dict(zip(pair.theirs, pair.split(source.read(pair.ours)), strict=True))
    hf_config = to_hf_config(config)
    hf_config.eos_token_id = tokenizer.eos_id
    dtype = source.kinds["embedding.word_embeddings.weight"].dtype
    model: Any = GSAForCausalLM.from_pretrained(
        None, config=hf_config, state_dict=tensors, dtype=dtype, attn_implementation=attention
    )
    model.generation_config.eos_token_id = tokenizer.eos_id

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens)

    return TextModel(
        model.to(device), lambda text: tokenizer.encode(text).tolist(), decode, tokenizer.vocab_size
    )


def load_hf_model(folder: Path, device: torch.device, attention: str) -> TextModel:
    """
    Raises:
        ValueError: there is no GSA model in the folder.
        OSError: a file is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"--hf {folder}: no such folder; give one that export_hf.py wrote")
    kind = AutoConfig.from_pretrained(folder).model_type
    if kind != GSAConfig.model_type:
        raise ValueError(
            f"--hf {folder}: a model of type {kind}; give a GSA model, which import_hf.py makes of it"
        )
    model: Any = GSAForCausalLM.from_pretrained(folder, attn_implementation=attention)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return TextModel(model.to(device), encode, decode, len(tokenizer))
