"""Read a Hugging Face folder as a complete transformers model, or refuse the folder. No code in the folder runs.

This module reads and checks the weights itself, because transformers fills missing weights with random values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig

from gsa_data.whole_files import MODEL_FILES, check_kind, parse_json, read_json_object, read_whole
from gsa_eval.convert.safetensors_folder import INDEX, SINGLE, SafetensorsFolder
from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_hf.configuration_gsa import LEAST

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER_WEIGHTS = {
    "transformers_weights": f"other files of weights are not read; call the file {SINGLE}, and remove the field",
    "quantization_config": "quantised weights are not read; give the folder that they were made of",
}
"""Fields that make transformers read weights other than the checked ones."""
MOST = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts"), 10_000)
"""Limits of numbers from which transformers' configurations make lists."""
SIZES = tuple(name for name in LEAST if name.endswith(("_size", "_heads", "_dim")))
"""Sizes of tensors."""


def read_hf_config(folder: Path, known: Collection[str]) -> Any:
    """
    Args:
        known: known architectures, by `model_type`.

    Raises:
        ValueError: the config is missing or damaged, or names an unknown architecture or weights of another
            format, or a file of the folder is unsafe to read, such as a pipe.
    """
    content = check_config(folder)
    path = folder / "config.json"
    kind = content.get("model_type")
    if kind not in known:
        raise ValueError(
            f"{path}: model_type = {kind}: unknown architecture; give a model of {', '.join(known)}"
        )
    for field, remedy in OTHER_WEIGHTS.items():
        if field in content and (kind == GSAConfig.model_type or field != "quantization_config"):
            raise ValueError(f"{path}: {field} = {str(content[field])[:60]}: {remedy}")
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The cause of a StrictDataclassError names field and value. KeyError: a field of YaRN is missing. TypeError: an
    # unchecked value has a wrong type.
    except (StrictDataclassError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error.__cause__ or error}") from error
    # Ignore config.json's choice of attention, because transformers would download a kernel of that name.
    found._attn_implementation = None
    found._experts_implementation = None
    return found


def check_config(folder: Path) -> dict[str, Any]:
    """Returns the fields of config.json, after checking the ranges of its numbers.

    Raises:
        ValueError: the file is missing or damaged, a number is out of range, or a file of the folder is unsafe to
            read, such as a pipe.
    """
    check_files(folder)
    path = folder / "config.json"
    content = read_json_object(path)
    if sizes := [name for name, value in _numbers(content) if isinstance(value, int) and abs(value) >> 62]:
        raise ValueError(f"{path}: {sizes[0]} has more than 62 bits; give the number of the model")
    if numbers := [name for name, value in _numbers(content) if not math.isfinite(value)]:
        raise ValueError(f"{path}: {numbers[0]} is not finite; give a number")
    has_weights = any((folder / name).is_file() for name in (SINGLE, INDEX))
    shapes = SafetensorsFolder(folder).shapes.values() if has_weights else ()
    # No size exceeds the element count of the largest tensor. torch fails if a shape does not fit 64 bits.
    most = MOST | dict.fromkeys(SIZES, max(map(math.prod, shapes), default=math.inf))
    for field, value in content.items():
        if not isinstance(value, int | float):  # transformers checks the types
            continue
        of_what = ", the numbers in the largest tensor of the weights" if field in SIZES else ""
        if value < LEAST.get(field, value):
            raise ValueError(
                f"{path}: {field} = {value}: less than {LEAST[field]}; give the number of the model"
            )
        if value > most.get(field, value):
            raise ValueError(
                f"{path}: {field} = {value}: more than {most[field]}{of_what}; give the number of the model"
            )
    return content


def check_files(folder: Path) -> None:
    """Check the folder's files before transformers opens them, because transformers would hang on a pipe and parse JSON
    of any depth.

    Raises:
        ValueError: a file is unsafe to read.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        check_kind(path, "copy the folder from its source again")
        if path.name in MODEL_FILES:
            read_json_object(path)
        elif path.suffix == ".json" and path.is_file():
            try:
                parse_json(read_whole(path))
            except ValueError as error:
                # Syntax errors are left to the reader of this file, whose message is better.
                if not isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                    raise ValueError(f"{path} is damaged: {error}; copy it from its source again") from error


def _numbers(content: Any, where: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(content, dict):
        for name, value in content.items():
            # transformers writes infinity as {"__float__": "Infinity"}
            yield from _numbers(value, where if name == "__float__" else f"{where}.{name}" if where else name)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from _numbers(value, f"{where}.{number}")
    elif isinstance(content, int | float):
        yield where, content
    elif content in ("Infinity", "-Infinity", "NaN"):
        yield where, math.nan


def read_gsa_model(
    folder: Path, found: GSAConfig, config: GSAConfig, attention: str, dtype: torch.dtype | str = "auto"
) -> GSAForCausalLM:
    """
    Args:
        found: the folder's configuration, which the folder's weights must fit.
        config: configuration of the model. It may differ from `found` in budgets or in dense attention, not in sizes.

    Raises:
        ValueError: the weights are missing or damaged, or do not fit this configuration.
    """
    source = SafetensorsFolder(folder)
    stored = source.shapes
    try:
        with torch.device("meta"):
            empty: Any = GSAForCausalLM(found)
    except (
        RuntimeError,
        TypeError,
        ZeroDivisionError,
        AssertionError,
    ) as error:  # torch raises it for an invalid size
        raise ValueError(f"{folder / 'config.json'}: no model can be built from it: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    if found.tie_word_embeddings:  # the weight may be present or absent
        expected.pop("lm_head.weight")
        check_tied(folder, source)
        stored = {name: shape for name, shape in stored.items() if name != "lm_head.weight"}
    if wrong := sorted({name for name, _ in expected.items() ^ stored.items()}):
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise ValueError(
            f"{folder}: {name}{more} has the shape {_shape(stored.get(name))} in the weights, and "
            f"{_shape(expected.get(name))} by config.json; copy the folder from its source again"
        )
    state = {name: source.read(name) for name in stored}
    loaded: Any = GSAForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=found.dtype or state[EMBEDDING].dtype if dtype == "auto" else dtype,
        attn_implementation=attention,
        generation_config=_generation_config(folder),
        output_loading_info=True,
    )
    model: GSAForCausalLM = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ValueError(
            f"{folder}: {missing[0]} is missing in the weights; copy the folder from its source again"
        )
    return model


def _generation_config(folder: Path) -> GenerationConfig | None:
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy it from its source again") from error


def check_tied(folder: Path, source: SafetensorsFolder) -> None:
    """
    Raises:
        ValueError: config.json ties the output layer to the embedding, but the weights have a separate output layer.
    """
    if HEAD not in source.shapes or EMBEDDING not in source.shapes:
        return
    head, embedding = source.read(HEAD).float(), source.read(EMBEDDING).float()
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: tie_word_embeddings = true, but {HEAD} differs from {EMBEDDING} in the weights; set "
            "tie_word_embeddings to false in config.json, with which both count"
        )


def named_eos(folder: Path) -> str | None:
    """Returns the token that ends a document, from the folder's tokenizer_config.json.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / "tokenizer_config.json"
    token = read_json_object(path).get("eos_token") if path.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise ValueError(
            f"{path}: eos_token = {str(token)[:60]}: is not text; give the token as it is written"
        )
    return token


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
