"""Average the weights of checkpoints, or take a checkpoint's moving average, and write a checkpoint of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gsa_eval.convert.export_hf import new_folder
from gsa_train.checkpoint.files import MANIFEST, MEGATRON_METADATA
from gsa_train.checkpoint.load import read_run_state
from gsa_train.checkpoint.optimizer_state import PREFIX, SAVED_MAIN_WEIGHT, has_state, main_weight_key
from gsa_train.checkpoint.tensors import CheckpointTensors, write_weights
from gsa_train.checkpoint.write import TORCH_METADATA
from gsa_train.optimizer.build import WEIGHT_AVERAGE

OF_MEGATRON = (MANIFEST, MEGATRON_METADATA, TORCH_METADATA, "common.pt")


def average_weights(checkpoints: Sequence[Path], out: Path, moving: bool) -> None:
    """Write the averages to the folder `out`, which is created atomically.

    `out` also gets the step, the config and the tokenizer of the last checkpoint. The averages have the dtype of the
    weights. If the weights are not fp32, `out` also holds fp32 averages for `checkpoint.initial_weights`.

    Args:
        moving: average the checkpoints' moving averages. A parameter without a moving average, because the phase does
            not train it, contributes its weight.

    Raises:
        ValueError: a checkpoint is damaged, has other tensors than the last, has no moving average, or was saved before
            the indexer had run.
    """
    sources, last = [CheckpointTensors(each) for each in checkpoints], checkpoints[-1]
    for checkpoint, source in zip(checkpoints, sources, strict=True):
        if source.kinds != sources[-1].kinds:
            raise ValueError(f"{checkpoint} and {last} hold different models; give checkpoints of one model")
        if _has_variance(source) != _has_variance(sources[-1]):
            raise ValueError(
                f"{checkpoint} and {last}: only in one has the indexer run; give checkpoints of one phase"
            )
        if moving and not has_state(source.all_kinds, WEIGHT_AVERAGE):
            raise ValueError(
                f"{checkpoint} has no moving average; train with train.weight_average_decay, or average the weights of "
                "several steps"
            )
    state = dataclasses.replace(read_run_state(last), wandb_run_id=None, rng=[])
    files = {
        each.name: each.read_bytes()
        for each in last.iterdir()
        if each.is_file() and each.name not in OF_MEGATRON and each.suffix != ".distcp"
    }
    with new_folder(out) as unfinished:
        write_weights(unfinished, _averages(sources, moving), state, files)


def _has_variance(source: CheckpointTensors) -> bool:
    """Returns whether the indexer has run in training: until then, its variance average is 0."""
    return any(bool(source.read(name).any()) for name in source.kinds if name.endswith(".variance.ema"))


def _averages(sources: Sequence[CheckpointTensors], moving: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind in sources[-1].kinds.items():
        if not kind.dtype.is_floating_point:
            yield name, sources[-1].read(name)
            continue
        keys = [_key(source, name, moving) for source in sources]
        total = torch.zeros(kind.shape, dtype=torch.float64)
        for source, key in zip(sources, keys, strict=True):
            total += source.read(key)
        mean = (total / len(sources)).float()
        yield name, mean.to(kind.dtype)
        if kind.dtype != torch.float32 and any(key != name for key in keys):
            yield f"{PREFIX}.{SAVED_MAIN_WEIGHT}.{name}", mean


def _key(source: CheckpointTensors, name: str, moving: bool) -> str:
    """Returns the name of the tensor to average: the moving average, the fp32 weight or the model's weight."""
    average = f"{PREFIX}.{WEIGHT_AVERAGE}.{name}"
    if moving and average in source.all_kinds:
        return average
    return main_weight_key(name, source.all_kinds) or name
