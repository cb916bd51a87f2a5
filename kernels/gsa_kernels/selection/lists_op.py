"""Computes scores and budget, and returns the selection as key lists, for sequences too long for a packed mask. Each
tile of 32 queries has a key list: every key that at least one query of the tile selects."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gsa_kernels.checks import check_at_least
from gsa_kernels.devices import launching_on
from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_build import (
    CountedKeys,
    FilledLists,
    copy_to_host,
    count_keys,
    fill_lists,
    join_lists,
    roomy_lists,
)
from gsa_kernels.limits import CANDIDATES_FROM, SELECTION_CHUNK_BYTES, ceil_div
from gsa_kernels.selection.criteria import Outputs
from gsa_kernels.selection.op import Selector
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

_ALL_OF_ONE_SEQUENCE = Geometry()


@torch.no_grad()
def select_key_lists(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    *,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
    candidates_from: int | None = CANDIDATES_FROM,
    overlap_with: Callable[[], object] = lambda: None,
) -> Selection:
    """Return the selection of `select_keys`, bit for bit, as key lists of tiles of 32 queries.

    `select_keys` explains the arguments, and `api.select` explains `overlap_with`. To save memory, packed masks exist
    for only two chunks of rows at a time. The host must know the length of a chunk's lists to allocate them. While it
    waits for this length, the device already computes the next chunk.
    """
    with launching_on(indexer.queries, "the indexer"):
        selector = Selector(indexer, rule, variance_ema, geometry, row_chunk_bytes, candidates_from)
        batch, length = indexer.queries.shape[:2]
        budget = torch.empty((batch, length), dtype=torch.int32, device=indexer.keys.device)
        variance = torch.empty((batch, length), dtype=torch.float32, device=indexer.keys.device)
        buffers = _mask_buffers(selector)
        filled: list[FilledLists] = []
        waiting: _Chunk | None = None
        # The host works on a chunk while the device computes the next one. The last chunk has the shortest rows.
        for number, rows in enumerate(reversed(selector.chunks)):
            packed_mask = _mask_of(buffers[number % 2], selector, rows)
            chunk = _select_and_count(selector, rows, Outputs(packed_mask, budget, variance, rows.start))
            if waiting is not None:
                filled.append(waiting.fill())
            waiting = chunk
        overlap_with()
        if waiting is not None:
            filled.append(waiting.fill())
        lists = join_lists(filled[::-1], length, geometry.query_start)
    return Selection(None, lists, budget, variance)


@dataclass(frozen=True)
class _Chunk:
    """Holds rows that the device is selecting and counting."""

    selector: Selector
    rows: range
    outputs: Outputs
    counted: CountedKeys
    failed: torch.Tensor | None
    """Result of `select_by_candidates` on the device."""
    failed_on_host: torch.Tensor | None
    """The tensor `failed` on the host, available once the counts have reached the host."""

    def fill(self) -> FilledLists:
        """Wait for the counts and return the lists, after selecting the rare rows that failed by candidates."""
        counted = self.counted
        counted.host_counts.read()  # by then, the earlier copy `failed_on_host` is complete, too
        if self.failed is not None and self.failed_on_host is not None and self.failed_on_host.any():
            self.selector.select_failed(self.rows, self.failed, self.outputs, self.failed_on_host)
            counted = count_keys(counted.packed_mask, self.rows, self.selector.inputs.query_start)
        return fill_lists(counted)


def _select_and_count(selector: Selector, rows: range, outputs: Outputs) -> _Chunk:
    failed = selector.select(rows, outputs)
    failed_on_host = None if failed is None else copy_to_host(failed)
    counted = count_keys(outputs.packed_mask, rows, selector.inputs.query_start)
    return _Chunk(selector, rows, outputs, counted, failed, failed_on_host)


@torch.no_grad()
def key_lists_from_packed_mask(packed_mask: torch.Tensor, length: int, query_start: int = 0) -> KeyLists:
    """Return the key lists of the same selection, with room for all causal keys. The host does not wait.

    Args:
        packed_mask: int32 [B, L, ceil(Lk / 32)], Lk = query_start + L; no query selects a later key
        length: L
        query_start: position of the first query
    """
    check_at_least("length", length, 1)
    check_at_least("query_start", query_start, 0)
    columns = ceil_div(query_start + length, 32)
    if (
        packed_mask.dtype != torch.int32
        or packed_mask.ndim != 3
        or packed_mask.shape[1:] != (length, columns)
    ):
        raise ValueError(
            f"packed_mask is {packed_mask.dtype} {tuple(packed_mask.shape)}; pass int32 [B, {length}, {columns}]"
        )
    with launching_on(packed_mask, "packed_mask"):
        return roomy_lists(packed_mask.contiguous(), query_start)


def _mask_buffers(selector: Selector) -> list[torch.Tensor]:
    """Create two buffers, because the lists of a chunk are filled while the next chunk is selected."""
    inputs = selector.inputs
    size = max(inputs.batch * len(rows) * _columns(inputs, rows) for rows in selector.chunks)
    chunks = min(2, len(selector.chunks))
    return [torch.empty(size, dtype=torch.int32, device=inputs.device) for _ in range(chunks)]


def _columns(inputs: ScoreInputs, rows: range) -> int:
    return ceil_div(inputs.query_start + rows.stop, 32)


def _mask_of(buffer: torch.Tensor, selector: Selector, rows: range) -> torch.Tensor:
    """Return the start of `buffer` as a packed mask, zeroed unless kernels write all words that are read."""
    inputs = selector.inputs
    shape = (inputs.batch, len(rows), _columns(inputs, rows))
    packed_mask = buffer[: math.prod(shape)].view(shape)
    if selector.by_candidates(rows) and inputs.document_starts is None:
        return packed_mask
    return packed_mask.zero_()
