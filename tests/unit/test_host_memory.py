"""Tests the host memory of a save's copies, which is in blocks of powers of two."""

import io
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from gsa_train.checkpoint import host_memory
from gsa_train.checkpoint.host_memory import ALIGNMENT, HostMemory, pack, place
from helpers.single_rank import single_rank

MIB = 2**20


def assert_fit(sizes: Sequence[int], places: Sequence[tuple[int, int]], blocks: Sequence[int]) -> None:
    """Check that nothing overlaps, and everything lies in its block."""
    taken = sorted((block, start, start + size) for size, (block, start) in zip(sizes, places, strict=True))
    for (block, _, end), (other, start, _) in itertools.pairwise(taken):
        assert block < other or end <= start
    assert all(end <= blocks[block] and start % ALIGNMENT == 0 for block, start, end in taken)


def test_blocks_are_powers_of_two_and_nothing_overlaps() -> None:
    draw = random.Random(1)
    for count in (1, 3, 50):
        sizes = [draw.randrange(5 * MIB) for _ in range(count)] + [0, 1]
        blocks, places = pack(sizes)
        assert all(size & (size - 1) == 0 for size in blocks)
        assert_fit(sizes, places, blocks)
    assert pack([]) == ([], [])


def test_little_is_wasted() -> None:
    """The sizes are from one of 8 ranks of a 7B model. Separate blocks would waste two fifths."""
    sizes = [172 * MIB] * 66 + [64 * MIB] * 12 + [4096 * 4] * 60
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.35 * sum(sizes)
    assert sum(pack(sizes)[0]) < 1.1 * sum(sizes)


def test_copies_are_written_alone_and_kept() -> None:
    single_rank()  # on CPUs pinned memory is the CPU's
    tensors = [torch.rand(3, 5), torch.rand(4).bfloat16(), torch.rand(()), torch.zeros(0, 7)]
    memory = HostMemory()
    first = memory.pinned_like(tensors)
    for copy, tensor in zip(first, tensors, strict=True):
        copy.copy_(tensor)
        assert copy.untyped_storage().nbytes() == tensor.nbytes
    file = io.BytesIO()
    torch.save(first[0], file)
    assert len(file.getvalue()) < 2000  # not the whole block
    for copy, tensor in zip(first, tensors, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    again = memory.pinned_like([torch.zeros_like(tensor) for tensor in tensors])
    assert [copy.data_ptr() for copy in again[:3]] == [copy.data_ptr() for copy in first[:3]]
    (other,) = memory.pinned_like([torch.rand(9)])
    assert other.shape == (9,)


def test_what_is_there_is_used_and_the_rest_is_made() -> None:
    draw = random.Random(2)
    for _ in range(20):
        sizes = [draw.randrange(3 * MIB) for _ in range(draw.randrange(40))]
        there = [1 << draw.randrange(18, 24) for _ in range(draw.randrange(6))]
        places, more = place(sizes, there)
        assert_fit(sizes, places, [*there, *more])
    assert place([100, 5000], [MIB]) == ([(0, 5120), (0, 0)], [])
    assert place([2 * MIB], [MIB]) == ([(1, 0)], [2 * MIB])


def test_memory_is_made_before_it_is_asked_for_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory also stays through a phase that saves less or more."""
    single_rank()
    monkeypatch.setattr(host_memory, "RESERVED_BLOCK_BYTES", MIB)
    made: list[int] = []
    pinned = host_memory._pinned
    monkeypatch.setattr(host_memory, "_pinned", lambda size: made.append(size) or pinned(size))
    memory = HostMemory()
    tensors = [torch.rand(300_000) for _ in range(3)]
    memory.reserve([tensor.nbytes for tensor in tensors])
    memory.pinned_like(tensors)
    assert sum(block.numel() for block in memory._blocks) == 6 * MIB
    memory.reserve([tensor.nbytes for tensor in tensors])
    into_the_rest_of_a_block = [*tensors, torch.rand(100_000)]
    for save in (tensors, tensors[:1], tensors, into_the_rest_of_a_block):
        memory.pinned_like(save)
    assert made == [2 * MIB] * 3
    memory.pinned_like([*tensors, torch.rand(600_000)])
    assert len(made) == 4
    memory.release()
    assert sum(block.numel() for block in memory._blocks) == 0
    memory.close()


def test_a_save_that_comes_early_waits_for_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    single_rank()
    monkeypatch.setattr(host_memory, "RESERVED_BLOCK_BYTES", MIB)
    monkeypatch.setattr(host_memory, "PAUSE_OVER_BLOCK", 1e9)
    memory, other = HostMemory(), HostMemory()
    for each in (memory, other):
        each.reserve([800_000] * 3)
    memory.pinned_like([torch.rand(200_000)] * 3)
    assert sum(block.numel() for block in memory._blocks) == 3 * MIB
    other.close()


def test_where_there_is_no_memory_the_save_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    single_rank()

    def none_left(size: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_memory, "_pinned", none_left)
    memory = HostMemory()
    memory.reserve([1000])
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.pinned_like([torch.rand(250)])
    memory.close()
