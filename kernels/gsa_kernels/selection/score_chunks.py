"""Divides rows into chunks whose scores fit in a buffer, and chunks into blocks. Each block uses a kernel variant with
enough registers for the block's longest row."""

import math
from collections.abc import Iterator

import torch

from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.limits import ceil_div

SMALLEST_BLOCK = 2048
"""Smallest block in keys; smaller blocks save less time than their launch costs."""

_COLUMN_MULTIPLE = 128  # for the rows of the score buffer, so that loads are aligned and tiles unmasked


def row_chunks(
    batch: int, num_rows: int, tile: int, chunk_bytes: int, query_start: int = 0
) -> Iterator[range]:
    """Yield row ranges, in whole tiles, whose scores up to the last row's diagonal fit in `chunk_bytes`."""
    start = 0
    entries = chunk_bytes // (4 * batch)
    while start < num_rows:
        # Solve rows * (query_start + start + rows) <= entries; the loop below rounds the width up.
        width = query_start + start
        rows = (math.isqrt(width * width + 4 * entries) - width) // 2
        stop = num_rows
        if rows < num_rows - start:
            stop = min(start + max(rows // tile, 1) * tile, num_rows)
        while stop - start > tile:  # this loop runs once or twice
            columns = _rounded_columns(query_start + stop - 1)
            if (stop - start) * columns <= entries:
                break
            stop = start + ((stop - start - 1) // tile) * tile
        yield range(start, stop)
        start = stop


def score_buffer(inputs: ScoreInputs, chunks: list[range]) -> torch.Tensor:
    """Create a flat fp32 buffer for the scores of the largest chunk."""
    size = max((inputs.batch * len(rows) * score_columns(inputs, rows) for rows in chunks), default=0)
    return torch.empty(size, dtype=torch.float32, device=inputs.device)


def chunk_view(buffer: torch.Tensor, inputs: ScoreInputs, rows: range) -> torch.Tensor:
    """Return the start of the flat `buffer` as [B, rows, columns], with enough columns for the last row."""
    batch, columns = inputs.batch, score_columns(inputs, rows)
    return buffer[: batch * len(rows) * columns].view(batch, len(rows), columns)


def row_blocks(inputs: ScoreInputs, rows: range) -> Iterator[tuple[range, int]]:
    """Split rows where positions reach powers of two. A row's block and result depend only on its position."""
    start = rows.start
    while start < rows.stop:
        block = max(SMALLEST_BLOCK, 1 << inputs.position(start).bit_length())
        stop = min(inputs.rows_below(block), rows.stop)
        yield range(start, stop), block
        start = stop


def score_columns(inputs: ScoreInputs, rows: range) -> int:
    """Return the number of columns that `rows` need in a score buffer."""
    return _rounded_columns(inputs.position(rows.stop - 1))


def _rounded_columns(last_position: int) -> int:
    return ceil_div(last_position + 1, _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
