"""The files of one checkpoint on their way to the disk: this rank's share, then what says where everything is.

Nothing here may use megatron-core's groups or the device: it runs in a thread beside the training.
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

from gsa_train.checkpoint.files import MEGATRON_METADATA, FileRecord, describe_file, sync, write_durably

TORCH_METADATA = ".metadata"
BACKEND = ("torch_dist", 1)
"""megatron-core's format and its version."""

Bucket = tuple[str, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
"""megatron-core's plan of one file: path, name, (objects, tensors), each with torch's description of it."""


@dataclass
class Written:
    """What one rank's thread tells the others."""

    errors: list[str]
    results: list[Any] = field(default_factory=list)
    """torch's description of what is where."""
    files: dict[str, FileRecord] = field(default_factory=dict)


def write_share(writer: Any, buckets: Sequence[Bucket], others: Mapping[Path, bytes], rank: int) -> Written:
    """This rank's files, durable, in one thread each; what goes wrong is returned.

    Args:
        writer: megatron-core's, which knows the format.
        buckets: its plan of this rank's data files, with the tensors to write.
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
    """What says where everything is, and that all is there; returns the records of all files.

    Args:
        metadata: torch's, of all files, which `writer` completes.
        folder: of the checkpoint, under its unfinished name.
    """
    writer.finish(metadata, [written.results for written in ranks])
    save_config(CheckpointingConfig(*BACKEND), str(folder))
    files = {name: record for written in ranks for name, record in written.files.items()}
    for name in (TORCH_METADATA, MEGATRON_METADATA):
        sync(folder / name)
        files[name] = describe_file(folder / name)
    return files


def _write_bucket(writer: Any, bucket: Bucket) -> tuple[list[Any], str, FileRecord]:
    """By megatron-core's writer, which switches Python's garbage collector off meanwhile."""
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
    """What the system said, where torch's writer then stumbled over its own closing."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _write_other(path: Path, content: bytes) -> tuple[list[Any], str, FileRecord]:
    return [], path.name, write_durably(path, content)
