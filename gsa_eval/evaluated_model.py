"""Load the evaluated model, from a run, a checkpoint or a transformers folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsa_data.tokenize import Tokenizer
from gsa_eval.convert.export_hf import DTYPES, check_tensors, tokenizer_of, warnings_of
from gsa_eval.convert.hf_config import to_hf_config
from gsa_eval.convert.names import pairs
from gsa_eval.convert.read_hf import read_gsa_model, read_hf_config
from gsa_eval.convert.read_source import read_source
from gsa_eval.convert.tokenizer import folder_tokenizer
from gsa_eval.settings import apply_settings
from gsa_hf import DENSE_LAYER, GSAConfig, GSAForCausalLM
from gsa_train.checkpoint.load import read_run_state
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import Config, config_from_yaml

EMBEDDING = "embedding.word_embeddings.weight"
ATTENTION = ("gsa", "sdpa", "eager")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Source of a model: exactly one of run, checkpoint and hf is set."""

    run: Path | None = None
    checkpoint: Path | None = None
    hf: Path | None = None
    step: int | None = None
    """Step of the run's checkpoint; None: the newest."""


@dataclass(frozen=True)
class Execution:
    device: str = ""
    """Empty: cuda if available."""
    attention: str = ""
    """`gsa`: our kernels. `sdpa`, `eager`: plain torch. Empty: `gsa` on CUDA devices, else `sdpa`."""
    dtype: str = ""
    """`bf16`, `fp32`; empty: the weights' dtype."""


@dataclass(frozen=True)
class EvaluatedModel:
    model: GSAForCausalLM
    tokenizer: Tokenizer
    trained_length: int
    """Length of a training sequence in tokens."""
    attend_across_documents: bool
    """As in training; False for a transformers folder, which does not record it."""
    run_dir: Path | None
    config: Config | None
    """Config of the run; None for a transformers folder."""
    about: dict[str, Any]
    """Entries for results.json."""
    wandb_run_id: str | None = None
    """W&B run of the training."""


def load_evaluated_model(
    source: Source, settings: Sequence[str] = (), execution: Execution | None = None
) -> EvaluatedModel:
    """
    Raises:
        ValueError: the model does not exist, or cannot run with these settings.
    """
    execution = execution or Execution()
    device = device_of(execution.device)
    attention = execution.attention or ("gsa" if device.type == "cuda" else "sdpa")
    if attention not in ATTENTION:
        raise ValueError(f"attention {attention}: give one of {', '.join(ATTENTION)}")
    if execution.dtype and execution.dtype not in DTYPES:
        raise ValueError(f"dtype {execution.dtype}: give one of {', '.join(DTYPES)}")
    dtype = DTYPES.get(execution.dtype)
    if source.hf is not None:
        if not (source.hf / "config.json").exists():
            raise ValueError(f"--hf {source.hf}: no config.json there; give a folder that export_hf.py wrote")
        found: GSAConfig = read_hf_config(source.hf, [GSAConfig.model_type])
        hf_config = apply_settings(found, settings)
        loaded = read_gsa_model(source.hf, found, hf_config, attention, dtype or "auto")
        length = hf_config.max_position_embeddings
        about: dict[str, Any] = {"hf": str(source.hf.absolute())}
        tokenizer = folder_tokenizer(source.hf, found)
        evaluated = EvaluatedModel(loaded, tokenizer, length, False, None, None, about)
    else:

        def read(checkpoint: Path, run_dir: Path | None) -> EvaluatedModel:
            state = read_run_state(checkpoint)
            config = config_from_yaml(state.config_yaml, checkpoint / "common.pt")
            hf_config = apply_settings(to_hf_config(config), settings)
            for warning in warnings_of(hf_config, config, state):
                logger.warning(warning)
            return EvaluatedModel(
                model_in_memory(checkpoint, config, hf_config, attention, dtype),
                tokenizer_of(checkpoint, config, state),
                config.train.seq_len_tokens,
                config.data.attend_across_documents,
                run_dir,
                config,
                {
                    "checkpoint": str(checkpoint.absolute()),
                    "step": state.step,
                    "tokens_trained": state.tokens,
                },
                state.wandb_run_id,
            )

        evaluated = read_source(source.run, source.step, source.checkpoint, read)
    model, about = evaluated.model, evaluated.about
    module: torch.nn.Module = model  # transformers' own `to` has another signature
    module.to(device).eval().requires_grad_(False)
    about |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": attention,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "settings": list(settings),
        "config": {
            name: value
            for name, value in model.config.to_diff_dict().items()
            if name != "transformers_version"
        },
    }
    logger.info(
        "%s: %d parameters in %s, attention by %s on %s",
        about.get("checkpoint") or about["hf"],
        about["parameters"],
        about["dtype"],
        attention,
        about["device"],
    )
    return evaluated


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {name}: models run only on cpu and cuda; give cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {name}: not on this machine ({str(error).splitlines()[0]}); give cpu, cuda or cuda:N"
        ) from error
    return device


def model_in_memory(
    checkpoint: Path, config: Config, hf_config: GSAConfig, attention: str, dtype: torch.dtype | None
) -> GSAForCausalLM:
    """Load the weights that training computes with.

    Args:
        hf_config: result of `to_hf_config`. Budgets and dense attention may be changed in it, but no sizes.
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
    return model
