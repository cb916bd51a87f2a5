"""Load a checkpoint of any layout, or an exported folder, as a transformers model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from gsa_data.tokenize import SENTENCEPIECE_MODEL, TOKENIZER_JSON, text_after
from gsa_eval.convert.export_hf import check_tensors, tokenizer_of
from gsa_eval.convert.hf_config import to_hf_config
from gsa_eval.convert.names import pairs
from gsa_eval.convert.read_hf import read_gsa_model, read_hf_config
from gsa_eval.convert.tokenizer import folder_tokenizer
from gsa_hf import DENSE_LAYER, GSAConfig, GSAForCausalLM
from gsa_train.checkpoint.load import read_run_state
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import Config, config_from_yaml

EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class TextModel:
    model: GSAForCausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    """Number of the tokenizer's tokens. The model may have more, which are unused."""

    def text_after(self, prompt: list[int], new: list[int]) -> str:
        return text_after(self.decode, prompt, new)


def chosen_attention(asked: str, device: torch.device) -> str:
    """Returns the given `attn_implementation`. If empty, returns the kernels on CUDA devices, plain torch on others."""
    return asked or ("gsa" if device.type == "cuda" else "sdpa")


def load_checkpoint_model(checkpoint: Path, device: torch.device, attention: str) -> TextModel:
    """
    Args:
        checkpoint: a step_* folder, or a folder that `import_hf` wrote
        attention: result of `chosen_attention`

    Raises:
        ValueError: the model cannot run with this attention, the checkpoint is damaged or does not fit its config, or
            its tokenizer is missing.
    """
    state = read_run_state(checkpoint)
    config = config_from_yaml(state.config_yaml, checkpoint / "common.pt")
    tokenizer = tokenizer_of(checkpoint, config, state)
    attention = chosen_attention(attention, device)
    hf_config = to_hf_config(config)
    hf_config.eos_token_id = tokenizer.eos_id
    model: Any = model_in_memory(checkpoint, config, hf_config, attention, device)
    model.generation_config.eos_token_id = list(tokenizer.stop_ids)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, without_special=True)

    return TextModel(model, lambda text: tokenizer.encode_prompt(text).tolist(), decode, tokenizer.vocab_size)


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


def load_hf_model(folder: Path, device: torch.device, attention: str) -> TextModel:
    """
    Args:
        attention: result of `chosen_attention`

    Raises:
        ValueError: the model cannot run with this attention, the folder has no GSA model, or its files do not fit.
    """
    if not folder.is_dir():
        raise ValueError(f"--hf {folder}: no such folder; give one that export_hf.py wrote")
    found: GSAConfig = read_hf_config(folder, [GSAConfig.model_type])
    if not any((folder / name).is_file() for name in (TOKENIZER_JSON, SENTENCEPIECE_MODEL)):
        raise ValueError(
            f"--hf {folder}: neither {SENTENCEPIECE_MODEL} nor {TOKENIZER_JSON} there; copy it there"
        )
    attention = chosen_attention(attention, device)
    model = read_gsa_model(folder, found, found, attention)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises this class for damaged files
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:  # transformers asks for it
            raise ValueError(
                f"--hf {folder}: its tokenizer is code of the folder, which is never run here; give a folder with a "
                f"tokenizer of transformers' own, as {TOKENIZER_JSON}"
            ) from error
        raise ValueError(
            f"--hf {folder}: its tokenizer's files cannot be read ({reason}); copy the folder from its source again"
        ) from error

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    # Ids may have gaps, so their number may differ from the largest + 1.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    named: Any = model
    named.generation_config.eos_token_id = list(folder_tokenizer(folder, found).stop_ids)
    return TextModel(to_device(model, device), encode, decode, vocab_size)
