"""Tests that damage to a checkpoint is named, both before the load and by the threads that read it."""

import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from gsa_train.checkpoint import checksums, guarded
from gsa_train.checkpoint.damage import find_damage, tensor_files
from gsa_train.checkpoint.load import DamagedCheckpoint, load_checkpoint
from gsa_train.config import Config
from gsa_train.optimizer.mcore import build_optimizer
from helpers import saving
from helpers.damage import cut, flip
from helpers.single_rank import SPARSE, single_rank, tiny_model

# pytest finds the fixtures here.
config, trained, intact, folder = saving.config, saving.trained, saving.intact, saving.folder


flip_a_bit = flip(0.5)
DAMAGES = [
    (flip_a_bit, "__0_0.distcp", "__0_0.distcp has checksum"),
    (cut, "__0_1.distcp", "__0_1.distcp has .* bytes instead of"),
    (Path.unlink, "__0_1.distcp", "__0_1.distcp is missing"),
    (flip_a_bit, "common.pt", "common.pt has checksum"),
    (flip_a_bit, ".metadata", ".metadata has checksum"),
    (cut, "manifest.json", "manifest.json is damaged"),
    (Path.unlink, "manifest.json", "it has no manifest.json"),
    (Path.unlink, "metadata.json", "metadata.json is missing"),
    (lambda path: shutil.rmtree(path.parent), "metadata.json", "it is missing or incomplete"),
]


@pytest.mark.parametrize(("damage", "name", "expected"), DAMAGES)
def test_damage_is_found_and_named(damage, name, expected, folder):
    for by_checksum in (False, True):
        assert find_damage(folder, single_rank(), by_checksum) is None
    damage(folder / name)
    found = find_damage(folder, single_rank(), checksums=True)
    assert re.match(expected, found), found
    by_size = find_damage(folder, single_rank(), checksums=False)
    if name.endswith(".distcp") or "checksum" not in expected:  # pickles are read anyway
        assert by_size == (None if "checksum" in expected else found)


# --- while it is read ----------------------------------------------------------------------------------------


def test_checksums_of_parts_join_to_the_checksum_of_the_whole() -> None:
    chance = random.Random(0)
    for _ in range(50):
        content = chance.randbytes(chance.randrange(1, 5000))
        cuts = sorted(chance.choices(range(len(content) + 1), k=chance.randrange(6)))
        pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        assert checksums.joined((zlib.crc32(each), len(each)) for each in pieces) == zlib.crc32(content)
    zeros = 3 << 33  # bytes that no test can hold
    assert checksums.joined([(zlib.crc32(b"a"), 1), (0, 0)]) == zlib.crc32(b"a")
    twice = checksums.joined([(zlib.crc32(b"a"), 1), (5, zeros), (7, zeros)])
    assert twice == checksums.joined([(checksums.joined([(zlib.crc32(b"a"), 1), (5, zeros)]), 1), (7, zeros)])


def test_threads_find_the_checksum_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 99, 100, 101, 12_345):
        content = random.Random(size).randbytes(size)
        path.write_bytes(content)
        for part in (100, 1 << 28):
            monkeypatch.setattr(checksums, "PART_BYTES", part)
            assert checksums.crc32_of(path) == (size, zlib.crc32(content))
    with pytest.raises(OSError, match=r"file ends at byte 12345, before 12346"):
        checksums.crc32_of_range(path, 12_000, 12_346)


@pytest.fixture(scope="module")
def reader(config: Config) -> tuple[Any, Any]:
    model = tiny_model(config)
    return model, build_optimizer(model, SPARSE, config)


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    parts = [tensor for part in optimizer.state_parts() for tensor in part.tensors.values()]
    return [*model.gpt.parameters(), *model.gpt.buffers(), *parts]


def load(folder: Path, reader: tuple[Any, Any], with_optimizer: bool = True) -> None:
    load_checkpoint(folder, *reader, single_rank(), with_optimizer, unchecked=tensor_files(folder))


def test_each_load_reads_what_is_where_once(intact, reader, monkeypatch):
    """Locations from an earlier load are not used, because the files may differ."""
    read: list[Path] = []
    read_metadata = guarded.read_metadata
    monkeypatch.setattr(guarded, "read_metadata", lambda folder: read.append(folder) or read_metadata(folder))
    for loads in (1, 2):
        load(intact, reader)
        assert read == [intact] * loads


PLACES = (0.0, 0.31, 0.5, 0.77, 0.999)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_bit_is_found_wherever_it_is(place, with_optimizer, folder, trained, reader):
    """Without the optimizer most of the file is not used. An intact file is never called damaged."""
    names = sorted(tensor_files(folder))
    assert len(names) > 1
    for name in names:
        path = folder / name
        good = path.read_bytes()
        wrong = bytearray(good)
        wrong[int(place * len(good))] ^= 4
        path.write_bytes(wrong)
        at_once = find_damage(folder, single_rank(), checksums=True, tensors_later=True)
        # Small objects are read before.
        assert at_once is None or (name in at_once and "_extra_state" in at_once)
        with pytest.raises(DamagedCheckpoint, match=f"{name} has checksum") as found:
            load(folder, reader, with_optimizer)
        before = find_damage(folder, single_rank(), checksums=True)
        assert before in str(found.value)
        path.write_bytes(good)
    load(folder, reader, with_optimizer)
    load(folder, reader)
    found, expected = state_of(*reader), state_of(*trained)
    assert len(found) == len(expected) > 20
    assert all(map(torch.equal, found, expected))


def test_what_cannot_be_read_at_all_is_a_fault_and_no_error(folder, reader):
    """An error would leave other ranks waiting for this one in the middle of the load."""
    path = folder / "config.yaml"  # files that are not tensors are checked before
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert "config.yaml has" in str(find_damage(folder, single_rank(), checksums=True, tensors_later=True))
    path = folder / sorted(tensor_files(folder))[0]
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedCheckpoint, match=r"has checksum .*cannot be read"):
        load(folder, reader)
    with pytest.raises(CheckpointException, match="is damaged"):
        load_checkpoint(folder, *reader, single_rank(), True)
