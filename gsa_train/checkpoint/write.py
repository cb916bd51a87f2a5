"""Write the files of one checkpoint: this rank's share, then the metadata.

Nothing here may use megatron-core's groups or the device, because a thread runs this code during training.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async

from gsa_train.checkpoint.files import MEGATRON_METADATA, FileRecord, describe_file, sync, write_recorded

TORCH_METADATA = ".metadata"
BACKEND = ("torch_dist", 1)
"""megatron-core's name and version of the format."""

Bucket = tuple[str, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
"""megatron-core's plan of one file: path, name, (objects, tensors), each with torch's description of it."""


@dataclass
class Written:
    """Reports one rank's files to the other ranks' threads."""

    errors: list[str]
    results: list[Any] = field(default_factory=list)
    """torch's description of where each tensor is."""
    files: dict[str, FileRecord] = field(default_factory=dict)


def write_share(writer: Any, buckets: Sequence[Bucket], others: Mapping[Path, bytes], rank: int) -> Written:
    """Write this rank's files durably, with one thread per file. Errors are returned.

    Args:
        writer: megatron-core's writer of the format.
        buckets: this rank's data files in megatron-core's plan, with the tensors to write.
        others: content of further files, by path.
    """
    tasks: list[Future[tuple[list[Any], str, FileRecord]]] = []
    with ThreadPoolExecutor(max(1, len(buckets)), "checkpoint-file") as threads:
        tasks += [threads.submit(_write_bucket, writer, bucket) for bucket in buckets]
        tasks += [threads.submit(_write_other, path, content) for path, content in others.items()]
    errors = [f"rank {rank}: {error}" for task in tasks if (error := task.exception()) is not None]
    if errors:
        return Written(errors)
    written = [task.result() for task in tasks]
    return Written(
        errors=[],
        results=[result for results, _, _ in written for result in results],
        files={name: record for _, name, record in written},
    )


def write_metadata(
    writer: Any, metadata: Any, folder: Path, ranks: Sequence[Written]
) -> dict[str, FileRecord]:
    """Write the metadata and the marker of completeness. Returns the records of all files.

    Args:
        metadata: torch's metadata of all files, which `writer` completes.
        folder: the checkpoint's folder, under its temporary name.
    """
    writer.finish(metadata, [written.results for written in ranks])
    save_config(CheckpointingConfig(*BACKEND), str(folder))
    files = {name: record for written in ranks for name, record in written.files.items()}
    for name in (TORCH_METADATA, MEGATRON_METADATA):
        sync(folder / name)
        files[name] = describe_file(folder / name)
    return files


def _write_bucket(writer: Any, bucket: Bucket) -> tuple[list[Any], str, FileRecord]:
    """Write with megatron-core's writer, which disables Python's garbage collector meanwhile."""
    path, name, _ = bucket
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(0)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        [writer.transforms], 0, bucket, results, running, use_fsync=True
    )
    _, written = results.get()
    if isinstance(written, BaseException):
        raise OSError(f"{path}: {_first_cause(written)}") from written
    return written, name, describe_file(Path(path))


def _first_cause(error: BaseException) -> BaseException:
    """Returns the system's error if torch's writer failed a second time while closing its file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _write_other(path: Path, content: bytes) -> tuple[list[Any], str, FileRecord]:
    return [], path.name, write_recorded(path, content)
