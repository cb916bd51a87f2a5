"""Tests the order of values in a block, and that conversion restores the rows."""

import torch

from gsa_kernels.hopper.target_blocks import block_shape, rows_of_blocks


def test_eight_values_of_a_lane_are_side_by_side() -> None:
    row_blocks, key_blocks, size = block_shape(40, 100)
    assert (row_blocks, key_blocks, size) == (2, 4, 1024)
    blocks = torch.arange(row_blocks * key_blocks * size).view(1, 1, row_blocks, key_blocks, size)
    rows = rows_of_blocks(blocks, 40, 100)[0, 0]
    assert rows.shape == (40, 100)
    for row, lane, key_block in ((0, 0, 0), (7, 3, 1), (13, 2, 2), (39, 1, 0)):
        first = 32 * key_block + 2 * lane
        columns = [first + further + second for further in (0, 8, 16, 24) for second in (0, 1)]
        start = (row // 32 * key_blocks + key_block) * size + row % 32 * 32 + lane * 8
        assert rows[row, columns].tolist() == list(range(start, start + 8))


def test_every_place_is_of_one_row_and_key() -> None:
    shape = block_shape(64, 64)
    blocks = torch.arange(2 * 3 * shape[0] * shape[1] * shape[2]).view(2, 3, *shape)
    rows = rows_of_blocks(blocks, 64, 64)
    for batch in range(2):
        for part in range(3):
            assert torch.equal(rows[batch, part].flatten().sort().values, blocks[batch, part].flatten())
