"""Tensors of a checkpoint that cannot be filled: a fault of the file, or no room for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadItemType

from gsa_train.checkpoint import parallel_read
from gsa_train.checkpoint.parallel_read import ParallelReader, ReadLog, noting


@pytest.fixture
def reader(tmp_path: Path) -> ParallelReader:
    (tmp_path / "0.distcp").write_bytes(b"1234")
    reader = ParallelReader(tmp_path)
    place: Any = SimpleNamespace(relative_path="0.distcp", offset=0, length=4)
    reader.storage_data = {cast(Any, "weight"): place}
    return reader


def read(reader: ParallelReader, log: ReadLog) -> None:
    item = SimpleNamespace(storage_index="weight", type=LoadItemType.TENSOR)
    with noting(log):
        reader.read_data(cast(Any, SimpleNamespace(items=[item])), cast(Any, None))


def test_what_is_no_tensor_is_a_fault_of_its_file(reader: ParallelReader, tmp_path: Path) -> None:
    log = ReadLog(tmp_path)
    read(reader, log)
    (fault,) = log.faults
    assert fault.startswith("0.distcp cannot be read: ")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_no_room_is_no_fault_of_the_file(
    error: type[Exception], reader: ParallelReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise error("no room")

    monkeypatch.setattr(parallel_read, "_fill", fill)
    log = ReadLog(tmp_path)
    with pytest.raises(error, match="no room"):
        read(reader, log)
    assert not log.faults
