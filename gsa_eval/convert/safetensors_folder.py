"""Read and write weights in transformers' format: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gsa_data.whole_files import read_json_object
from gsa_train.checkpoint.files import sync

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SafetensorsFolder:
    """Reads the tensors of a folder one by one.

    Raises:
        ValueError: there are no weights, or a shard is missing, truncated, or differs from the index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        listed = _read_index(folder)
        for file_name in sorted(set(listed.values())) if listed else [SINGLE]:
            names = self._open(folder, file_name)
            expected = {name for name, place in listed.items() if place == file_name} if listed else names
            if names != expected:
                other = sorted(names ^ expected)[0]
                where = f"only in {INDEX}" if other in expected else f"not in {INDEX}"
                raise ValueError(
                    f"{folder / file_name} holds other tensors than {INDEX} says: {other} is {where}; copy the folder "
                    "from its source again"
                )

    def _open(self, folder: Path, file_name: str) -> set[str]:
        path = folder / file_name
        if not path.is_file():
            raise ValueError(f"{path}: the shard is missing; copy the folder from its source again")
        try:
            file = self._files[file_name] = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}; copy the folder from its source again") from error
        names = set(file.keys())
        for name in names:
            self._file_of[name] = file_name
            self.shapes[name] = tuple(file.get_slice(name).get_shape())
        return names

    def read(self, name: str) -> torch.Tensor:
        """
        Raises:
            ValueError: the tensor has a dtype that weights never have, or holds NaN or infinity.
        """
        file_name = self._file_of[name]
        tensor: torch.Tensor = self._files[file_name].get_tensor(name)
        if tensor.dtype not in WEIGHTS:
            kinds = ", ".join(str(each).removeprefix("torch.") for each in WEIGHTS)
            raise ValueError(
                f"{self._folder / file_name}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}; give "
                f"weights of {kinds}"
            )
        if not tensor.isfinite().all():
            raise ValueError(
                f"{self._folder / file_name}: {name} holds NaN or infinity; give weights without, as of an earlier "
                "checkpoint"
            )
        return tensor


def _read_index(folder: Path) -> dict[str, str]:
    """Returns the index of shards (tensor -> file), or an empty dict if the folder has a single weight file. If it has
    both, the single file is used, as in transformers."""
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        listed = read_json_object(folder / INDEX).get("weight_map")
        if (
            not isinstance(listed, dict)
            or not listed
            or not all(isinstance(name, str) for name in listed.values())
        ):
            raise ValueError(
                f"{folder / INDEX} is damaged: weight_map names no file for each tensor; copy it from its source again"
            )
        for name in listed.values():
            if not name.isprintable() or name in ("", ".", "..") or Path(name).name != name:
                raise ValueError(f"{folder / INDEX} names {name!r}, which leads out of the folder")
        return dict(listed)
    if not (folder / SINGLE).is_file():
        others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        wrong = f"has {others[0]}, a pickle, which is not read" if others else "has no weights"
        raise ValueError(f"{folder} {wrong}; give a folder with {SINGLE}, or with shards and {INDEX}")
    return {}


@dataclass(frozen=True)
class PlannedTensor:
    name: str
    bytes: int
    read: Callable[[], torch.Tensor]


def write_shards(folder: Path, planned: list[PlannedTensor], largest_bytes: int) -> None:
    """Write the tensors in order, with one shard in memory at a time. A shard has at most `largest_bytes`, unless a
    single tensor is larger."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.bytes > largest_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    names = [SINGLE]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        tensors = {each.name: each.read().contiguous() for each in shard}
        try:
            save_file(tensors, folder / name, {"format": "pt"})
        except SafetensorError as error:  # safetensors raises it on a full disk
            raise OSError(
                f"{folder / name} cannot be written: {error}; make room, or give another place"
            ) from error
        sync(folder / name)
    if len(shards) > 1:
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        content = {
            "metadata": {"total_size": sum(each.bytes for each in planned)},
            "weight_map": dict(sorted(places.items())),
        }
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
