"""Load the pickles in a checkpoint without running arbitrary functions.

A pickle may name any function, and unpickling calls it. torch unpickles without a restriction in two places: its reader
unpickles the file `.metadata`, and its planner unpickles objects other than tensors. This module replaces both, and
refuses every name that is not on its list. Tensors are safe, because torch loads them with `weights_only=True`.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME as COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from gsa_data.whole_files import parse_json
from gsa_train.checkpoint.files import MEGATRON_METADATA, leads_out
from gsa_train.checkpoint.parallel_read import ParallelReader, ReadLog, first_line, log_of
from gsa_train.checkpoint.write import BACKEND, TORCH_METADATA
from gsa_train.distributed.megatron_versions import replace_readers

CLASSES = {
    "torch": {"Size"},  # and dtypes
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
"""Maps modules to the names that a metadata file of torch 2.11 to 2.13 may ask for. All are records of text and
numbers."""
REMEDY = "No code in it was run. Copy the checkpoint from its source again, and load only checkpoints that you trust"


class RefusedContent(ValueError):
    """A checkpoint's file has content that no save writes."""


def _enum_member(kind: Any, name: Any) -> Any:
    """Replaces `getattr`, which Python 3.11.0 to 3.11.3 uses to pickle a member of an enum."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise _refused(TORCH_METADATA, "builtins.getattr")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in CLASSES.get(module, ()):
            raise _refused(TORCH_METADATA, f"{module}.{name}")
        return super().find_class(module, name)


def read_metadata(checkpoint: Path) -> Metadata:
    """Read torch's metadata file, which says where each tensor is.

    Raises:
        RefusedContent: the file is damaged, asks for a class that `CLASSES` lacks, or points outside the folder or past
            the end of a file.
    """
    with (checkpoint / TORCH_METADATA).open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
        except RefusedContent:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise RefusedContent(f"{TORCH_METADATA} is damaged: {first_line(error)}") from error
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "storage_data", None), dict):
        raise RefusedContent(f"{TORCH_METADATA} is damaged: it does not say where the tensors are")
    _check_places(checkpoint, list(metadata.storage_data.values()))
    return metadata


def metadata_bytes(metadata: Metadata) -> bytes:
    return pickle.dumps(metadata)


def read_common(checkpoint: Path) -> dict[str, Any]:
    """Read the common file, which holds everything except the tensors of model and optimizer.

    Raises:
        RefusedContent: the file is damaged, or asks for something that `weights_only` does not allow.
    """
    content = _load(checkpoint / COMMON_STATE_FNAME, COMMON_STATE_FNAME)
    if not isinstance(content, dict) or not isinstance(content.get("run"), dict):
        raise RefusedContent(f"{COMMON_STATE_FNAME} is damaged: it holds no run state")
    return content


def refused_content(checkpoint: Path, listed: Collection[str]) -> str | None:
    """Returns one line about why this checkpoint must not be loaded, or None. Reads all files except the tensors.

    Args:
        listed: files whose checksums are known.
    """
    try:
        backend = parse_json((checkpoint / MEGATRON_METADATA).read_bytes())["sharded_backend"]
        if backend != BACKEND[0]:
            return f"{MEGATRON_METADATA} has the format {backend!r}; only {BACKEND[0]} can be read"
        read_common(checkpoint)
        metadata = read_metadata(checkpoint)
        for index, place in metadata.storage_data.items():
            if place.relative_path not in listed:
                return f"{TORCH_METADATA} names {place.relative_path}, which is not in the manifest"
            if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                with (checkpoint / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    content = file.read(place.length)
                _load(io.BytesIO(content), f"{place.relative_path}, {index.fqn}")
    except (OSError, RefusedContent, AttributeError, TypeError) as error:
        return first_line(error)
    except (KeyError, ValueError) as error:
        return f"{MEGATRON_METADATA} is damaged: {first_line(error)}"
    return None


def _check_places(checkpoint: Path, places: list[Any]) -> None:
    sizes: dict[str, int] = {}
    for place in places:
        fields = vars(place) if isinstance(place, _StorageInfo) else {}
        name, start, length = (fields.get(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or type(start) is not int or type(length) is not int:
            raise RefusedContent(f"{TORCH_METADATA} is damaged: no place in a file: {str(place)[:100]}")
        if fields.get("transform_descriptors"):
            raise RefusedContent(f"{TORCH_METADATA} says that {name} is compressed, which no save does")
        if name not in sizes:
            if leads_out(checkpoint, name):
                raise RefusedContent(f"{TORCH_METADATA} names {name!r}, which leads out of the folder")
            path = checkpoint / name
            sizes[name] = path.stat().st_size if path.is_file() else 0
        if start < 0 or length < 0 or start + length > sizes[name]:
            raise RefusedContent(
                f"{TORCH_METADATA} says that bytes {start} to {start + length} of {name} are used, which has "
                f"{sizes[name]}"
            )


def _load(source: Path | io.BytesIO, name: str) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: the file ends too early
            raise
        asked = re.search(r"(?:GLOBAL|Trying to load unsupported GLOBAL|global) (\w[\w.]*\.\w+)", str(error))
        if asked:
            raise _refused(name, asked[1]) from error
        raise RefusedContent(f"{name} is damaged: {first_line(error)}") from error


def _refused(name: str, asked: str) -> RefusedContent:
    return RefusedContent(f"{name} asks for {asked}, which no checkpoint needs. {REMEDY}")


# --- replacements of torch's and megatron-core's readers ----------------------------------------------------------


class _Reader(ParallelReader):
    """Reads the metadata once. All readers of a load share the metadata if the load has a `ReadLog`."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # torch then reads no rank's metadata
        if self._metadata is None:
            log = log_of(Path(self.path)) or ReadLog(Path(self.path))
            self._metadata = log.metadata = log.metadata or read_metadata(Path(self.path))
            if self._metadata.storage_meta is not None:
                self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _LoadPlanner(mcore_torch.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        content = io.BytesIO()
        name = read_item.dest_index.fqn
        torch.save(_load(value, name), content)
        content.seek(0)
        super().load_bytes(read_item, content)


replace_readers(lambda folder, *_, **__: _Reader(folder), _LoadPlanner, read_common)
