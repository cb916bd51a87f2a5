"""Exact top-k of a chunk of rows by a guess that is verified: what makes long rows cost little.

A sample of the keys gives each row a score that somewhat more than its k_t keys reach. The score kernel keeps
these candidates only, and the k_t best are found among them. If at least k_t keys are candidates, they hold the
k_t best, whatever the sample was: the result is exact. A row in which there are fewer, or far more, is scored
again in full and selected by groups of keys.
"""

from dataclasses import replace
from typing import TypeVar

import torch
import triton

from gsa_kernels import limits
from gsa_kernels.indexer.triton_scores import ScoreInputs, score_tiles, write_scores
from gsa_kernels.selection.triton_candidates import columns_per_program, write_candidates
from gsa_kernels.selection.triton_guess import guess_thresholds
from gsa_kernels.selection.triton_narrow import narrow_candidates
from gsa_kernels.selection.triton_select_long import select_long_rows

_Numbers = TypeVar("_Numbers", int, torch.Tensor)


def sample_keys(inputs: ScoreInputs) -> tuple[ScoreInputs, torch.Tensor]:
    """The indexer with one key of each CANDIDATE_SAMPLE_STRIDE neighbours, and their positions, int32 [S], ascending.

    Which of the neighbours changes from one to the next, by the golden ratio: text that repeats with a period
    must not show the sample one phase of it alone. Of the last neighbours there may be none: a key is in the sample
    or not wherever the sequence ends.
    """
    length = inputs.k_idx.shape[1]
    groups = length // limits.CANDIDATE_SAMPLE_STRIDE
    if _sampled_of(groups) < length:
        groups += 1
    sampled = _sampled_of(torch.arange(groups, device=inputs.k_idx.device))
    return replace(inputs, k_idx=inputs.k_idx[:, sampled].contiguous()), sampled.to(torch.int32)


def _sampled_of(groups: _Numbers) -> _Numbers:
    """Positions of the sampled keys of the groups of CANDIDATE_SAMPLE_STRIDE neighbours with these numbers."""
    phase = ((groups * 2654435769) % 2**32 * limits.CANDIDATE_SAMPLE_STRIDE) >> 32
    return groups * limits.CANDIDATE_SAMPLE_STRIDE + phase


def candidate_rows(batch: int, k_max: int, tile: int, chunk_bytes: int) -> int:
    """Rows, whole tiles of them, whose candidates fit in `chunk_bytes`."""
    return (
        max(chunk_bytes // (limits.CANDIDATE_BYTES * batch * limits.candidate_room(k_max)) // tile, 1) * tile
    )


def select_by_candidates(
    inputs: ScoreInputs,
    sample: tuple[ScoreInputs, torch.Tensor],
    rows: range,
    blocks: list[tuple[range, int]],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    words_start: int,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    local_window: int,
) -> torch.Tensor:
    """Scores and selection of a chunk of rows.

    Args:
        sample: from `sample_keys`
        blocks: `rows` split where their size, and so the block of registers that holds the sample, doubles
        outputs: words int32 [B, rows, W] (see `write_candidates`; zeros before the documents), budget int32
            [B, L], variance fp32 [B, L]
        words_start: the row of words[:, 0]

    Returns:
        failed: int32 [B, R], 1 for the rows that are left to `select_failed`: their words are 0
    """
    words, budget, variance = outputs
    sampled_inputs, sampled = sample
    batch, device = budget.shape[0], budget.device
    starts = inputs.document_starts
    end = inputs.position(rows.stop - 1) + 1
    sample_scores = torch.empty(
        (batch, len(rows), triton.cdiv(end, limits.CANDIDATE_SAMPLE_STRIDE * 16) * 16),
        dtype=torch.float32,
        device=device,
    )
    write_scores(
        sampled_inputs, rows.start, rows.stop, sample_scores, key_stride=limits.CANDIDATE_SAMPLE_STRIDE
    )
    guesses = torch.empty((batch, len(rows), 3), dtype=torch.float32, device=device)
    tile_rows = score_tiles(inputs).rows
    num_tiles = triton.cdiv(len(rows), tile_rows)
    tied = torch.zeros((batch, num_tiles), dtype=torch.int32, device=device)
    for part, block in blocks:
        guess_thresholds(
            sample_scores,
            sampled,
            inputs.query_start,
            part,
            rows.start,
            block,
            limits.CANDIDATE_SAMPLE_STRIDE,
            starts,
            variance_ema,
            budget_rule,
            tile_rows,
            tied,
            guesses,
        )
    del sample_scores

    span = columns_per_program(inputs)
    sums = torch.empty((batch, len(rows), triton.cdiv(end, span), 2), dtype=torch.float32, device=device)
    room = limits.candidate_room(budget_rule[2])
    candidates = torch.empty((batch, num_tiles * tile_rows, room), dtype=torch.int64, device=device)
    counts = torch.zeros((batch, len(rows)), dtype=torch.int32, device=device)
    write_candidates(inputs, rows, guesses, tied, candidates, counts, words, words_start, sums)

    failed = torch.empty((batch, len(rows)), dtype=torch.int32, device=device)
    narrow_candidates(
        candidates,
        counts,
        guesses,
        sums,
        span,
        inputs.query_start,
        rows,
        words,
        words_start,
        (budget, variance),
        failed,
        starts,
        variance_ema,
        budget_rule,
        local_window,
    )
    return failed


def select_failed(
    inputs: ScoreInputs,
    rows: range,
    blocks: list[tuple[range, int]],
    scores: torch.Tensor,
    failed: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    words_start: int,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    local_window: int,
) -> None:
    """Select the rows that `select_by_candidates` left, from all their scores.

    Args:
        rows: of the chunk, or some of them; `blocks` are theirs
        scores: fp32 [B, rows, columns], a buffer
        failed: int32 [B, rows]
    """
    write_scores(inputs, rows.start, rows.stop, scores, wanted=failed)
    for part, block in blocks:
        select_long_rows(
            scores,
            rows.start,
            part,
            block,
            outputs,
            inputs.document_starts,
            variance_ema,
            budget_rule,
            local_window,
            words_start=words_start,
            query_start=inputs.query_start,
            wanted=failed,
        )
