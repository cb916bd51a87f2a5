"""Export a checkpoint of any layout as a folder that transformers loads."""

from __future__ import annotations

import glob
import inspect
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoTokenizer

import gsa_hf
from gsa_data.companions import GENERATION_FILE, Companions, read_companions, set_up_tokenizer
from gsa_data.tokenize import SENTENCEPIECE_MODEL, TOKENIZER_JSON, Tokenizer
from gsa_eval.convert.hf_config import dtype_name, to_hf_config
from gsa_eval.convert.model_card import model_card
from gsa_eval.convert.names import Pair, pairs
from gsa_eval.convert.safetensors_folder import PlannedTensor, write_shards
from gsa_eval.convert.tokenizer import write_tokenizer
from gsa_train.checkpoint.files import (
    complete_checkpoints,
    find_checkpoint,
    is_complete,
    step_folder,
    step_of,
)
from gsa_train.checkpoint.load import RunState, read_run_state
from gsa_train.checkpoint.tensors import CheckpointTensors
from gsa_train.config import Config, config_from_yaml

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AUTO_MAP = {
    "AutoConfig": "configuration_gsa.GSAConfig",
    "AutoModel": "modeling_gsa.GSAModel",
    "AutoModelForCausalLM": "modeling_gsa.GSAForCausalLM",
}
"""Classes that AutoModel loads from the folder with trust_remote_code."""


@dataclass(frozen=True)
class Exported:
    folder: Path
    tensors: int
    bytes: int
    warnings: Sequence[str]


def export_hf(
    checkpoint: Path,
    out: Path,
    run_dir: Path | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write a transformers folder: the model's weights (not the optimizer's fp32 copies), config, tokenizer and code.

    Args:
        checkpoint: a step_* folder, or a folder that `import_hf` wrote.
        out: the new folder, created atomically.
        run_dir: the run's folder, for the model card.
        dtype: dtype of the weights; None: unchanged.

    Raises:
        ValueError: `out` exists, the checkpoint is damaged or does not fit its config, the model has features
            that `gsa_hf` lacks, or the tokenizer is missing, is not the run's, or cannot be converted.
    """
    state = read_run_state(checkpoint)
    config = config_from_yaml(state.config_yaml, checkpoint / "common.pt")
    tokenizer = tokenizer_of(checkpoint, config, state)
    hf_config = to_hf_config(config)
    source = CheckpointTensors(checkpoint)
    found = pairs(config)
    check_tensors(checkpoint, source, found)
    planned = _plan(source, found, dtype)
    companions = companions_of(checkpoint)
    warnings = warnings_of(hf_config, config, state)
    with new_folder(out) as folder:
        kind = source.kinds["embedding.word_embeddings.weight"].dtype if dtype is None else DTYPES[dtype]
        hf_config.dtype = dtype_name(kind)
        hf_config.architectures = ["GSAForCausalLM"]
        hf_config.auto_map = AUTO_MAP
        stops = list(tokenizer.stop_ids)
        hf_config.eos_token_id = stops if stops[1:] else tokenizer.eos_id
        hf_config.save_pretrained(folder)
        write_tokenizer(
            tokenizer, folder, config.train.seq_len_tokens, companions, was_trained=state.tokens > 0
        )
        _write_generation_config(folder, hf_config.eos_token_id, companions)
        for path in Path(inspect.getfile(gsa_hf)).parent.glob("*_gsa.py"):
            shutil.copyfile(path, folder / path.name)
        card = model_card(out.name, config, state, run_dir, dtype_name(kind), warnings)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_shards(folder, planned, max_shard_bytes)
    return Exported(out, len(planned), sum(each.bytes for each in planned), warnings)


def find_source(run_dir: Path | None, step: int | None, checkpoint: Path | None) -> tuple[Path, Path | None]:
    """Returns the checkpoint that the options name, and the folder of its run; None if it lies in no run.

    Raises:
        ValueError: there is no such checkpoint.
    """
    option, folder = ("--checkpoint", checkpoint) if run_dir is None else ("--run", run_dir)
    assert folder is not None
    if not folder.is_dir():
        what = "a step_* folder" if run_dir is None else "a run's folder, <run.dir>/<run.name>"
        raise ValueError(f"{option} {folder}: no such folder; give {what}")
    found = find_checkpoint(folder) if step is None else step_folder(folder / "checkpoints", step)
    if run_dir is None:
        if found is None:
            raise ValueError(f"--checkpoint {folder}: no complete checkpoint there; give a step_* folder")
        above = found.absolute().parent.parent
        return found, above if (above / "metrics.jsonl").is_file() else None
    if found is None or (step is not None and not is_complete(found)):
        have = ", ".join(str(step_of(path.name)) for path in complete_checkpoints(run_dir / "checkpoints"))
        of_step = "" if step is None else f" --step {step}"
        raise ValueError(
            f"--run {run_dir}{of_step}: no complete checkpoint there; steps that have one: {have or 'none'}"
        )
    return found, run_dir


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `out` at the end. A killed process leaves no folder `out`.

    Raises:
        ValueError: `out` is not empty, at the beginning or at the end.
        OSError: `out` cannot be written.
    """
    _refuse_filled(out)
    prefix = f".tmp_{out.name}.{socket.gethostname()}."
    unfinished = out.absolute().with_name(f"{prefix}{os.getpid()}")
    for left in unfinished.parent.glob(f"{glob.escape(prefix)}*"):
        if left == unfinished or not Path("/proc", left.suffix[1:]).exists():  # left by a killed command
            shutil.rmtree(left, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)  # takes the place of an empty folder only
    except OSError as error:
        failed = Path(os.fsdecode(error.filename or unfinished))  # the error of a full disk names no file
        if error.errno is None or not (failed in unfinished.parents or failed.is_relative_to(unfinished)):
            raise
        _refuse_filled(out)  # by another command meanwhile
        raise OSError(f"{out}: {error}; make room there, or give another place") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refuse_filled(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists and is not empty; give another folder, or remove it")


def check_tensors(checkpoint: Path, source: CheckpointTensors, found: Sequence[Pair]) -> None:
    """
    Raises:
        ValueError: the checkpoint's tensors are not exactly the tensors of this model.
    """
    expected = {pair.ours: pair.shape for pair in found}
    stored = {name: kind.shape for name, kind in source.kinds.items()}
    if wrong := sorted(expected.items() ^ stored.items()):
        name = wrong[0][0]
        raise ValueError(
            f"{checkpoint}: {name} has the shape {stored.get(name, 'of nothing')}, its config says "
            f"{expected.get(name, 'nothing')}; the checkpoint is of another version of gsa_train"
        )


def _plan(
    source: CheckpointTensors, found: Sequence[Pair], dtype: Literal["bf16", "fp32"] | None
) -> list[PlannedTensor]:
    read = lru_cache(maxsize=1)(source.read)  # consecutive tensors may be made from one
    planned = []
    for pair in found:
        kind = source.kinds[pair.ours].dtype if dtype is None or pair.always_fp32 else DTYPES[dtype]
        for number, (name, shape) in enumerate(zip(pair.theirs, pair.shapes(), strict=True)):

            def tensor(pair: Pair = pair, number: int = number, kind: torch.dtype = kind) -> torch.Tensor:
                # A copy is needed, because a view would keep its whole storage.
                return pair.split(read(pair.ours))[number].to(kind, copy=True)

            planned.append(PlannedTensor(name, math.prod(shape) * kind.itemsize, tensor))
    return planned


def _write_generation_config(folder: Path, eos_ids: int | list[int], companions: Companions) -> None:
    """Write generation_config.json: the stop tokens, and the sampling settings of the imported model. The class
    GenerationConfig is not used, because it refuses sampling settings that older versions of transformers wrote."""
    content: dict[str, Any] = {"eos_token_id": eos_ids, **companions.sampling}
    pad = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).pad_token_id
    if pad is not None:
        content["pad_token_id"] = pad
    content["transformers_version"] = transformers.__version__
    (folder / GENERATION_FILE).write_text(json.dumps(content, indent=2) + "\n")


def tokenizer_of(checkpoint: Path, config: Config, state: RunState) -> Tokenizer:
    """Returns the tokenizer, with its stop tokens, from its copy in the checkpoint. Older checkpoints have no copy. For
    them, the tokenizer is read from `data.tokenizer`.

    Raises:
        ValueError: the tokenizer is missing, or differs from the run's tokenizer.
    """
    copies = (checkpoint / name for name in (SENTENCEPIECE_MODEL, TOKENIZER_JSON))
    path = next((str(copy) for copy in copies if copy.is_file()), config.data.tokenizer)
    tokenizer = Tokenizer(path, config.data.eos_token or None)
    if tokenizer.fingerprint != state.data["tokenizer_fingerprint"]:
        raise ValueError(
            f"tokenizer {tokenizer.path}: not the file that {checkpoint} was trained with "
            f"({tokenizer.differs_from(state.data['tokenizer_fingerprint'])}); put that run's file there, or into the "
            "checkpoint's folder"
        )
    set_up_tokenizer(tokenizer, companions_of(checkpoint))
    return tokenizer


def companions_of(checkpoint: Path) -> Companions:
    """Returns the chat template and the special tokens that the checkpoint keeps next to its tokenizer.

    Raises:
        ValueError: a copy is damaged.
    """
    return read_companions(str(checkpoint / TOKENIZER_JSON))


def warnings_of(hf_config: gsa_hf.GSAConfig, config: Config, state: RunState) -> list[str]:
    """Returns a warning if a model with sparse layers was saved in a dense phase."""
    said = []
    phase = config.phases[state.phase_index] if state.phase_index < len(config.phases) else None
    selects = set(hf_config.layer_types or ()) != {gsa_hf.DENSE_LAYER}
    if selects and phase is not None and phase.attention == "dense":
        said.append(
            f"Saved in phase {phase.name}, which attends to all keys: its indexer has not selected in training yet, "
            "and attention here is sparse."
        )
    return said
