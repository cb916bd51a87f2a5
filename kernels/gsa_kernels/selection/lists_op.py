"""Scores, budget and selection as lists of keys per tile of queries: for sequences too long for a bit per pair."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from gsa_kernels.checks import check_at_least
from gsa_kernels.devices import launching_on
from gsa_kernels.indexer.triton_scores import score_inputs
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_build import (
    CountedKeys,
    FilledLists,
    copy_to_host,
    count_keys,
    fill_lists,
    join_lists,
)
from gsa_kernels.limits import CANDIDATES_FROM, SELECTION_CHUNK_BYTES
from gsa_kernels.selection.op import Selector, make_selector


@dataclass(frozen=True)
class ListSelection:
    """Which keys each query attends to, as `Selection` has them, in tiles of 32 queries."""

    lists: KeyLists

    budget: torch.Tensor
    """int32 [B, L]: k_t, the keys of the top-k. The local window may add more to the lists."""

    variance: torch.Tensor
    """fp32 [B, L]: population variance of the row's scores over its visible keys."""


@torch.no_grad()
def select_key_lists(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    variance_ema: torch.Tensor,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    k_base: int,
    k_min: int,
    k_max: int,
    mode: Literal["inverse", "direct", "off"],
    document_starts: torch.Tensor | None = None,
    local_window: int = 0,
    query_start: int = 0,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
    candidates_from: int | None = CANDIDATES_FROM,
) -> ListSelection:
    """The selection of `select_keys`, to the bit, and its arguments; another form of the result.

    The bits of two chunks of rows exist at a time. How long the lists are is in the data: the host waits for the
    counts of each chunk, while the device is at the next one.
    """
    inputs = score_inputs(
        q_idx,
        k_idx,
        weight_logits,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        document_starts=document_starts,
        query_start=query_start,
    )
    with launching_on(q_idx):
        selector = make_selector(
            inputs,
            variance_ema,
            k_base=k_base,
            k_min=k_min,
            k_max=k_max,
            mode=mode,
            local_window=local_window,
            row_chunk_bytes=row_chunk_bytes,
            candidates_from=candidates_from,
        )
        batch, length = q_idx.shape[:2]
        budget = torch.empty((batch, length), dtype=torch.int32, device=k_idx.device)
        variance = torch.empty((batch, length), dtype=torch.float32, device=k_idx.device)
        buffers = _word_buffers(selector)
        parts: list[FilledLists] = []
        waiting: _Chunk | None = None
        # The longest rows first: the host's work for them is hidden by theirs, and little is left to wait for.
        for number, rows in enumerate(reversed(selector.chunks)):
            words = _words_of(buffers[number % 2], selector, rows)
            chunk = _select_and_count(selector, rows, (words, budget, variance))
            if waiting is not None:
                parts.append(waiting.fill())
            waiting = chunk
        if waiting is not None:
            parts.append(waiting.fill())
        lists = join_lists(parts[::-1], length, query_start)
    return ListSelection(lists, budget, variance)


@dataclass(frozen=True)
class _Chunk:
    """Rows whose selection and counts are under way on the device."""

    selector: Selector
    rows: range
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    counted: CountedKeys
    failed: torch.Tensor | None
    """of the candidates, on the device"""
    failed_on_host: torch.Tensor | None
    """the same, there once the keys are counted"""

    def fill(self) -> FilledLists:
        """Wait for the counts; select first what the candidates left, which is almost never anything."""
        counted = self.counted.wait()
        if self.failed is not None and self.failed_on_host is not None and self.failed_on_host.any():
            self.selector.select_failed(
                self.rows, self.failed, self.outputs, self.rows.start, self.failed_on_host
            )
            counted = count_keys(counted.words, self.rows, self.selector.inputs.query_start).wait()
        return fill_lists(counted)


def _select_and_count(
    selector: Selector, rows: range, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> _Chunk:
    failed = selector.select(rows, outputs, words_start=rows.start)
    failed_on_host = None if failed is None else copy_to_host(failed)
    counted = count_keys(outputs[0], rows, selector.inputs.query_start)
    return _Chunk(selector, rows, outputs, counted, failed, failed_on_host)


@torch.no_grad()
def key_lists_from_words(words: torch.Tensor, length: int, query_start: int = 0) -> KeyLists:
    """The lists of a selection as bits. Waits for the device.

    Args:
        words: int32 [B, L, ceil(Lk / 32)], Lk = query_start + L, `Selection.words`
        length: L
        query_start: position of the first query
    """
    check_at_least("length", length, 1)
    check_at_least("query_start", query_start, 0)
    columns = triton.cdiv(query_start + length, 32)
    if words.dtype != torch.int32 or words.ndim != 3 or words.shape[1:] != (length, columns):
        raise ValueError(f"words is {words.dtype} {tuple(words.shape)}; pass int32 [B, {length}, {columns}]")
    with launching_on(words):
        counted = count_keys(words.contiguous(), range(length), query_start).wait()
        return join_lists([fill_lists(counted)], length, query_start)


def _word_buffers(selector: Selector) -> list[torch.Tensor]:
    """Two, since the lists of a chunk are filled when the next chunk is selected."""
    batch = selector.inputs.q_idx.shape[0]
    size = max(batch * len(rows) * _columns(selector, rows) for rows in selector.chunks)
    return [
        torch.empty(size, dtype=torch.int32, device=selector.inputs.q_idx.device)
        for _ in range(min(2, len(selector.chunks)))
    ]


def _columns(selector: Selector, rows: range) -> int:
    return triton.cdiv(selector.inputs.query_start + rows.stop, 32)


def _words_of(buffer: torch.Tensor, selector: Selector, rows: range) -> torch.Tensor:
    """The start of the flat `buffer` as [B, rows, W]; zeros, unless all words that are read will be written."""
    batch, num_words = selector.inputs.q_idx.shape[0], _columns(selector, rows)
    words = buffer[: batch * len(rows) * num_words].view(batch, len(rows), num_words)
    if selector.by_candidates(rows) and selector.inputs.document_starts is None:
        return words
    return words.zero_()
