"""Read and write a checkpoint's tensors one by one, in a process without process groups.

A run in any parallel layout can load the written weights (`checkpoint.initial_weights`).
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gsa_train.checkpoint.damage import find_damage_alone
from gsa_train.checkpoint.files import (
    MEGATRON_METADATA,
    Manifest,
    describe_file,
    sync,
    write_manifest,
    write_recorded,
)
from gsa_train.checkpoint.guarded import metadata_bytes, read_metadata
from gsa_train.checkpoint.load import RunState
from gsa_train.checkpoint.write import BACKEND, TORCH_METADATA

LARGEST_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class TensorKind:
    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointTensors:
    """Reads the model's tensors in one checkpoint by their names on disk. Any layout may have written them.

    Raises:
        ValueError: a file is missing or damaged, or asks for something that no checkpoint needs.
        FileNotFoundError: the folder does not exist.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._inode = checkpoint.stat().st_ino
        fault = find_damage_alone(checkpoint)
        if fault is not None:
            raise ValueError(f"{checkpoint} is damaged: {fault}. Give another checkpoint.")
        metadata = read_metadata(checkpoint)
        self._places: dict[str, list[tuple[MetadataIndex, Any]]] = defaultdict(list)
        for index, place in metadata.storage_data.items():
            self._places[index.fqn].append((index, place))
        self.all_kinds = {
            name: TensorKind(tuple(stored.size), stored.properties.dtype)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.kinds = {
            name: kind for name, kind in self.all_kinds.items() if not name.startswith("optimizer.")
        }
        """Maps names of tensors to shape and dtype, without the optimizer's tensors."""

    def read(self, name: str) -> torch.Tensor:
        """Assemble the whole tensor from its parts.

        Raises:
            ValueError: the parts do not form one tensor, or the folder was replaced meanwhile.
            FileNotFoundError: the folder is gone.
        """
        kind = self.all_kinds[name]
        whole = torch.empty(kind.shape, dtype=kind.dtype)
        filled = 0
        for index, place in self._places[name]:
            with (self._checkpoint / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            starts = index.offset or (0,) * part.dim()
            if not isinstance(part, torch.Tensor) or part.dim() != whole.dim():
                raise ValueError(f"{self._checkpoint}: {name} has a part outside its shape")
            view = whole
            for dim, start in enumerate(starts):
                view = view.narrow(dim, start, part.shape[dim])
            view.copy_(part)
            filled += part.numel()
        if self._checkpoint.stat().st_ino != self._inode:
            raise ValueError(f"{self._checkpoint}: it was written again while it was read; read it again")
        if filled != math.prod(kind.shape):
            raise ValueError(
                f"{self._checkpoint}: the parts of {name} have {filled} elements of {whole.numel()}"
            )
        return whole


def write_weights(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    state: RunState,
    small_files: Mapping[str, bytes],
) -> None:
    """Write a checkpoint with weights only, one tensor after another.

    Args:
        folder: an existing empty folder.
        tensors: whole tensors with their names on disk.
        state: names the model and the tokenizer of the weights.
        small_files: name -> content of further files.
    """
    metadata, size_bytes = Metadata({}, storage_data={}), 0
    names = ["__0_0.distcp"]
    for key, tensor in tensors:
        buffer = io.BytesIO()
        torch.save(tensor.contiguous().clone(), buffer)  # saving a view would write its whole storage
        content = buffer.getbuffer()
        if size_bytes > 0 and size_bytes + len(content) > LARGEST_FILE_BYTES:
            names.append(f"__0_{len(names)}.distcp")
            size_bytes = 0
        with (folder / names[-1]).open("ab") as file:  # closed at once: a later tensor may be refused
            file.write(content)
        origin = torch.Size([0] * tensor.dim())
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(tensor),
            tensor.shape,
            [ChunkStorageMetadata(origin, tensor.shape)],
        )
        metadata.storage_data[MetadataIndex(key, origin)] = _StorageInfo(names[-1], size_bytes, len(content))
        size_bytes += len(content)
    common = {
        "run": vars(state),
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": True},
    }
    buffer = io.BytesIO()
    torch.save(common, buffer)
    contents = {
        TORCH_METADATA: metadata_bytes(metadata),
        COMMON_STATE_FNAME: buffer.getvalue(),
        **small_files,
    }
    records = {name: write_recorded(folder / name, content) for name, content in contents.items()}
    save_config(CheckpointingConfig(*BACKEND), str(folder))
    for name in (*names, MEGATRON_METADATA):
        sync(folder / name)
        records[name] = describe_file(folder / name)
    write_manifest(folder, Manifest(state.run, state.run_id, state.step, records))
