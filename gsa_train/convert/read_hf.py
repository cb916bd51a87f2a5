"""A Hugging Face folder read as a model of transformers: whole, or refused.

transformers itself starts a model whose weights and config.json do not fit together, with random weights in the
places of the missing ones.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_train.convert.safetensors_folder import SafetensorsFolder


def read_hf_config(folder: Path, known: Collection[str]) -> Any:
    """
    Args:
        known: architectures, as `model_type` names them.

    Raises:
        ValueError: there is none, it is damaged, or of an architecture that is not known.
    """
    path = folder / "config.json"
    kind = _read_json(path).get("model_type")
    if kind not in known:
        raise ValueError(
            f"{path}: model_type = {kind}: unknown architecture; give a model of {', '.join(known)}"
        )
    try:
        return AutoConfig.from_pretrained(folder)
    # Of a StrictDataclassError's lines the cause names field and value. KeyError: a field of YaRN is missing.
    except (StrictDataclassError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error.__cause__ or error}") from error


def read_gsa_model(
    folder: Path, found: GSAConfig, config: GSAConfig, attention: str, dtype: torch.dtype | str = "auto"
) -> GSAForCausalLM:
    """
    Args:
        found: the folder's configuration, which its weights must fit.
        config: that, or the same with other budgets, a dense one, ...: sizes are the same.
        attention: `attn_implementation`

    Raises:
        ValueError: the weights are missing or damaged, or not those of a model of this configuration.
    """
    stored = SafetensorsFolder(folder).shapes
    with torch.device("meta"):
        empty: Any = GSAForCausalLM(found)
    expected = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    if found.tie_word_embeddings:  # it may be there, or not
        expected.pop("lm_head.weight")
        stored = {name: shape for name, shape in stored.items() if name != "lm_head.weight"}
    if wrong := sorted({name for name, _ in expected.items() ^ stored.items()}):
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise ValueError(
            f"{folder}: {name}{more} has the shape {_shape(stored.get(name))} in the weights, and "
            f"{_shape(expected.get(name))} by config.json; copy the folder from its source again"
        )
    model: GSAForCausalLM = GSAForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=attention
    )
    return model


def named_eos(folder: Path) -> str | None:
    """The token that ends a document, by the folder's tokenizer_config.json.

    Raises:
        ValueError: that is damaged.
    """
    path = folder / "tokenizer_config.json"
    token = _read_json(path).get("eos_token") if path.is_file() else None
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the folder of a model") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it from its source again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no fields; copy it from its source again")
    return content


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
