"""Where the copies of a save lie: blocks that torch need not round up, and storages that hold one tensor each."""

from __future__ import annotations

import io
import itertools
import random

import torch

from gsa_train.checkpoint.host_memory import ALIGNMENT, HostMemory, pack
from helpers.single_rank import single_rank

MIB = 2**20


def test_blocks_are_powers_of_two_and_nothing_overlaps() -> None:
    draw = random.Random(1)
    for count in (1, 3, 50):
        sizes = [draw.randrange(5 * MIB) for _ in range(count)] + [0, 1]
        blocks, places = pack(sizes)
        assert all(size & (size - 1) == 0 for size in blocks)
        taken = sorted(
            (block, start, start + size) for size, (block, start) in zip(sizes, places, strict=True)
        )
        for (block, _, end), (other, start, _) in itertools.pairwise(taken):
            assert block < other or end <= start
        assert all(end <= blocks[block] for block, _, end in taken)
        assert all(start % ALIGNMENT == 0 for _, start, _ in taken)
    assert pack([]) == ([], [])


def test_little_is_wasted() -> None:
    """The share of one of 8 ranks of a 7B model: each tensor alone would be rounded up by two fifths."""
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


def test_of_tensors_in_host_memory_the_copies_are_their_own() -> None:
    tensor = torch.rand(4)
    group: list[tuple[str, torch.Tensor]] = [("item", tensor[1:])]
    HostMemory().copy([group])
    ((item, copy),) = group
    tensor.zero_()
    assert item == "item"
    assert copy.all()
