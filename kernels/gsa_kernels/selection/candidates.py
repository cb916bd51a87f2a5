"""Finds the exact top-k of a chunk of long rows from a guess, and verifies the guess.

The guess is a threshold for each row, from a sample of its keys. Slightly more than k_t keys (the row's budget) should
reach it. The score kernel keeps only these keys, the candidates, and a second kernel finds the k_t best of them. If a
row has at least k_t candidates, they include its k_t best keys, so the result is exact. If a row has fewer candidates,
or more than fit in memory, the guess has failed, and `select_failed` selects from all scores of the row.
"""

from dataclasses import replace
from typing import TypeVar

import torch

from gsa_kernels import limits
from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.indexer.triton_scores import score_tiles, write_scores
from gsa_kernels.selection.criteria import Criteria, Outputs
from gsa_kernels.selection.score_chunks import row_blocks
from gsa_kernels.selection.triton_candidates import Candidates, columns_per_program, write_candidates
from gsa_kernels.selection.triton_guess import Guesses, guess_thresholds
from gsa_kernels.selection.triton_narrow import narrow_candidates
from gsa_kernels.selection.triton_select_long import select_long_rows

_Numbers = TypeVar("_Numbers", int, torch.Tensor)


def sample_keys(inputs: ScoreInputs) -> tuple[ScoreInputs, torch.Tensor]:
    """Return the indexer with one of each CANDIDATE_SAMPLE_STRIDE neighbouring keys, and their ascending positions
    int32 [S].

    Text may be periodic, so the sampled key's place in its group of neighbours changes from group to group, in steps
    of the golden ratio. The places do not depend on the sequence length. A short last group has no sample if the
    sampled place is after the end of the sequence.
    """
    length, indexer = inputs.num_keys, inputs.indexer
    groups = length // limits.CANDIDATE_SAMPLE_STRIDE
    if _sampled_of(groups) < length:
        groups += 1
    sampled = _sampled_of(torch.arange(groups, device=inputs.device))
    keys = indexer.keys[:, sampled].contiguous()
    return replace(inputs, indexer=replace(indexer, keys=keys)), sampled.to(torch.int32)


def _sampled_of(groups: _Numbers) -> _Numbers:
    """Return the position of the sampled key in each numbered group of CANDIDATE_SAMPLE_STRIDE neighbours."""
    phase = ((groups * 2654435769) % 2**32 * limits.CANDIDATE_SAMPLE_STRIDE) >> 32
    return groups * limits.CANDIDATE_SAMPLE_STRIDE + phase


def candidate_rows(batch: int, most_keys: int, tile: int, chunk_bytes: int) -> int:
    """Return the number of rows, in whole tiles, whose candidates fit in `chunk_bytes`."""
    return (
        max(chunk_bytes // (limits.CANDIDATE_BYTES * batch * limits.candidate_room(most_keys)) // tile, 1)
        * tile
    )


def select_by_candidates(
    criteria: Criteria, sample: tuple[ScoreInputs, torch.Tensor], rows: range, outputs: Outputs
) -> torch.Tensor:
    """Score and select a chunk of rows.

    Args:
        sample: from `sample_keys`
        outputs: the packed mask must contain zeros before the documents; the kernels write the rest up to the diagonal

    Returns:
        failed: int32 [B, R], 1 for the rows that `select_failed` must select. The packed mask of these rows is 0.
    """
    inputs = criteria.inputs
    sampled_inputs, sampled = sample
    batch, device = inputs.batch, inputs.device
    end = inputs.position(rows.stop - 1) + 1
    sample_scores = torch.empty(
        (batch, len(rows), limits.ceil_div(end, limits.CANDIDATE_SAMPLE_STRIDE * 16) * 16),
        dtype=torch.float32,
        device=device,
    )
    write_scores(
        sampled_inputs, rows.start, rows.stop, sample_scores, key_stride=limits.CANDIDATE_SAMPLE_STRIDE
    )
    tile_rows = score_tiles(inputs).rows
    num_tiles = limits.ceil_div(len(rows), tile_rows)
    guesses = Guesses(
        torch.empty((batch, len(rows), 3), dtype=torch.float32, device=device),
        torch.zeros((batch, num_tiles), dtype=torch.int32, device=device),
    )
    for of_block, block in row_blocks(inputs, rows):
        guess_thresholds(criteria, sample_scores, sampled, rows.start, of_block, block, guesses)
    del sample_scores

    sums = (batch, len(rows), limits.ceil_div(end, columns_per_program(inputs)), 2)
    room = limits.candidate_room(criteria.rule.most_keys)
    candidates = Candidates(
        sums=torch.empty(sums, dtype=torch.float32, device=device),
        entries=torch.empty((batch, num_tiles * tile_rows, room), dtype=torch.int64, device=device),
        counts=torch.zeros((batch, len(rows)), dtype=torch.int32, device=device),
    )
    write_candidates(inputs, rows, guesses, candidates, outputs)
    failed = torch.empty((batch, len(rows)), dtype=torch.int32, device=device)
    narrow_candidates(criteria, rows, candidates, guesses, outputs, failed)
    return failed


def select_failed(
    criteria: Criteria, scores: torch.Tensor, rows: range, failed: torch.Tensor, outputs: Outputs
) -> None:
    """Select the rows that `select_by_candidates` could not select, from all their scores.

    Args:
        scores: fp32 [B, rows, columns], a buffer
        rows: all or some rows of the chunk
        failed: int32 [B, rows]
    """
    write_scores(criteria.inputs, rows.start, rows.stop, scores, wanted=failed)
    for of_block, block in row_blocks(criteria.inputs, rows):
        select_long_rows(criteria, scores, rows.start, of_block, block, outputs, wanted=failed)
