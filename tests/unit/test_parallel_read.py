"""Tests tensors of a checkpoint that cannot be filled: the file or the reader is at fault."""

import io
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadItemType

from gsa_train.checkpoint import parallel_read
from gsa_train.checkpoint.files import FileRecord
from gsa_train.checkpoint.parallel_read import NotRead, ParallelReader, Part, ReadLog, faults_of_read, noting
from helpers.single_rank import single_rank


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
    assert fault.file == "0.distcp"
    assert fault.what.startswith("cannot be read: ")


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: ECC")]
)
def test_what_a_rank_cannot_take_over_is_no_fault_of_the_file(error, reader, tmp_path, monkeypatch):
    """If the file were blamed, an older checkpoint would replace it, and fail as well."""

    def fill(*_: object) -> None:
        raise error

    monkeypatch.setattr(parallel_read, "_fill", fill)
    log = ReadLog(tmp_path)
    read(reader, log)
    with pytest.raises(NotRead, match=rf"is intact .* rank 0 on \S+ 0.distcp cannot be read: {error}"):
        faults_of_read(log, record_of(b"1234"), single_rank())
    assert faults_of_read(log, record_of(b"1235"), single_rank()) == [
        f"0.distcp has checksum {zlib.crc32(b'1234'):08x} instead of {zlib.crc32(b'1235'):08x}",
        f"0.distcp cannot be read: {error}",
    ]


def record_of(content: bytes) -> dict[str, FileRecord]:
    return {"0.distcp": FileRecord(len(content), f"{zlib.crc32(content):08x}")}


def test_ranks_that_read_different_bytes_are_no_damage_and_do_not_go_on(tmp_path: Path) -> None:
    """One of these ranks has filled in wrong data, and which one is unknown."""
    (tmp_path / "0.distcp").write_bytes(b"12345678")
    right = zlib.crc32(b"1234")
    for wrong in (right - 1, right + 1):
        log = ReadLog(tmp_path, [Part("0.distcp", 0, 4, right), Part("0.distcp", 0, 4, wrong)])
        with pytest.raises(NotRead, match=r"different bytes of 0\.distcp from 0 to 4"):
            faults_of_read(log, record_of(b"12345678"), single_rank())
    log.parts = [Part("0.distcp", 0, 4, right), Part("0.distcp", 0, 4, right)]
    assert faults_of_read(log, record_of(b"12345678"), single_rank()) == []


def saved(what: Any) -> bytearray:
    file = io.BytesIO()
    torch.save(what, file)
    return bytearray(file.getvalue())


SAVED = {
    "fp32": torch.arange(12.0).view(3, 4),
    "bf16": torch.arange(5.0).bfloat16(),
    "int64, one number": torch.tensor(7),
    "bool": torch.tensor([True, False, True]),
    "a view of a larger storage": torch.arange(48.0).view(6, 8)[1:, 2:5].t(),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_tensor_lies_over_the_bytes_that_were_read(name: str) -> None:
    tensor = SAVED[name]
    content = bytearray(b"front" + saved(tensor))
    found = parallel_read._tensor_in(memoryview(content)[5:])
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    for place in range(len(content)):
        content[place] = 0
    assert not found.any()


def test_an_empty_tensor_is_read_and_one_that_is_cut_is_refused() -> None:
    empty, whole = saved(torch.empty(0, 4)), saved(torch.arange(1000.0))
    assert parallel_read._tensor_in(memoryview(empty)).shape == (0, 4)
    for wrong in (whole[:-400], whole[:200], bytearray()):
        with pytest.raises((RuntimeError, ValueError, OSError, zipfile.BadZipFile, EOFError)):
            parallel_read._tensor_in(memoryview(wrong))


def test_what_is_not_one_stored_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="a list and not a tensor"):
        parallel_read._tensor_in(memoryview(saved([torch.zeros(2), torch.zeros(2)])))
    packed = io.BytesIO()
    plain = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(1000))))
    with plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in plain.infolist():
            archive.writestr(each.filename, plain.read(each))
    with pytest.raises((ValueError, RuntimeError)):
        parallel_read._tensor_in(memoryview(bytearray(packed.getvalue())))
