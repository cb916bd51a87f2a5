"""Import a Hugging Face folder as a checkpoint of weights, for `checkpoint.initial_weights` or `export_hf`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from gsa_data.companions import read_companions
from gsa_data.tokenize import TOKENIZER_JSON, Tokenizer
from gsa_eval.convert.dense_models import ARCHITECTURES, Gates, config_of, open_gate, unused
from gsa_eval.convert.export_hf import new_folder
from gsa_eval.convert.hf_config import from_hf_config
from gsa_eval.convert.names import pairs
from gsa_eval.convert.read_hf import check_tied, read_hf_config
from gsa_eval.convert.safetensors_folder import SafetensorsFolder
from gsa_eval.convert.tokenizer import TokenizerChoice, folder_tokenizer
from gsa_hf import GSAConfig
from gsa_train.checkpoint.load import RunState
from gsa_train.checkpoint.tensors import write_weights
from gsa_train.config import Config, RunConfig, config_to_yaml


def import_hf(
    folder: Path,
    out: Path,
    gates: Gates = "none",
    seq_len_tokens: int | None = None,
    tokenizer: TokenizerChoice | None = None,
) -> Config:
    """Write `out`: a checkpoint with only weights, the tokenizer and its side files, and a config.yaml for a run.

    Args:
        folder: folder of a GSA model (`gsa_hf`) or of a dense model (`dense_models.ARCHITECTURES`).
        out: the new folder, created atomically.
        gates: for a dense model: `none`, or `open` (gates that multiply by 1).
        seq_len_tokens: sequence length of later training; None: the longest that the model supports.

    Raises:
        ValueError: a GSA model cannot represent the model; a shard is missing, damaged or
            differs from the index; the tokenizer is missing or larger than the embedding.
    """
    found = read_hf_config(folder, (*ARCHITECTURES, GSAConfig.model_type))
    if found.model_type == GSAConfig.model_type:
        if gates != "none":
            raise ValueError(
                f"--gates {gates}: {folder} is a GSA model, which has its own gates; leave the option out"
            )
        config = from_hf_config(found)
        if seq_len_tokens is not None:
            config = dataclasses.replace(
                config, train=dataclasses.replace(config.train, seq_len_tokens=seq_len_tokens)
            )
    else:
        config = config_of(found, gates, seq_len_tokens)
    config = dataclasses.replace(config, run=RunConfig(name=out.name))
    text = folder_tokenizer(folder, found, tokenizer)
    companions = read_companions(str(folder / TOKENIZER_JSON))
    if text.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"vocab_size = {config.model.vocab_size}: {text.path} has {text.vocab_size} tokens, more than the "
            "embedding has rows; give the model's own tokenizer by --tokenizer"
        )
    copy = out / text.file_name
    data = dataclasses.replace(config.data, tokenizer=str(copy), eos_token=text.eos_token or "")
    config = dataclasses.replace(config, data=data)
    source = SafetensorsFolder(folder)
    if config.model.tie_embeddings:
        check_tied(folder, source)
    tensors = _tensors(folder, source, config, found.model_type)
    with new_folder(out) as unfinished:
        files = {text.file_name: text.file, **companions.files()}
        write_weights(unfinished, tensors, _state(config, text), files)
        # not in the manifest, because users edit it
        (unfinished / "config.yaml").write_text(_start_from(config, out), encoding="utf-8")
    return config


def _tensors(
    folder: Path, source: SafetensorsFolder, config: Config, model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Check names and shapes of all tensors in the folder. Then yield the converted tensors one by one."""
    found = pairs(config)
    gates: dict[str, tuple[tuple[int, ...], float]] = {}
    for pair in found:
        for name, shape in zip(pair.theirs, pair.shapes(), strict=True):
            value = open_gate(name) if model_type in ARCHITECTURES else None
            if value is None:
                _check_shape(folder, source, name, shape)
            else:
                gates[name] = (shape, value)
    left = source.shapes.keys() - {name for pair in found for name in pair.theirs if name not in gates}
    if extra := sorted(left - unused(left, config)):
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise ValueError(
            f"{folder}: {extra[0]}{more}: in the weights, but a GSA model of its config.json has no such tensor"
        )
    dtype = source.read("model.norm.weight").dtype

    def made_of(name: str) -> torch.Tensor:
        return torch.full(*gates[name], dtype=dtype) if name in gates else source.read(name)

    return ((pair.ours, pair.join([made_of(name) for name in pair.theirs])) for pair in found)


def _check_shape(folder: Path, source: SafetensorsFolder, name: str, shape: tuple[int, ...]) -> None:
    stored = source.shapes.get(name)
    if stored is None:
        raise ValueError(f"{folder}: {name}: missing in the weights; copy the folder from its source again")
    if stored != shape:
        raise ValueError(
            f"{folder}: {name} has the shape {list(stored)}, and {list(shape)} by config.json; copy the folder from "
            "its source again"
        )


def _state(config: Config, tokenizer: Tokenizer) -> RunState:
    return RunState(
        step=0,
        tokens=0,
        phase_index=0,
        phase_name="imported weights",
        phase_start=0,
        data={"tokenizer_fingerprint": tokenizer.fingerprint},
        wandb_run_id=None,
        config_yaml=config_to_yaml(config),
        layout=(1, 1, 1, 1),
        rng=[],
    )


def _start_from(config: Config, out: Path) -> str:
    tree = dataclasses.asdict(config)
    own = {
        "model": tree["model"],
        **({"moe": tree["moe"]} if config.moe.experts else {}),
        "gsa": tree["gsa"],
        "train": {"seq_len_tokens": config.train.seq_len_tokens},
        "data": {"tokenizer": config.data.tokenizer, "eos_token": config.data.eos_token},
        "checkpoint": {"initial_weights": str(out)},
    }
    head = (
        "# To start a run from these weights: add run, data.train_dir, phases and what is to differ.\n"
        "# model must stay; gsa may get gates and an indexer that the model has not.\n"
    )
    return head + yaml.safe_dump(own, sort_keys=False, allow_unicode=True)
