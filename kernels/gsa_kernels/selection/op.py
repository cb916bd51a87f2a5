"""Computes scores, budget and selection in one call, in chunks of rows, without an L x L matrix."""

from collections.abc import Callable
from dataclasses import replace

import torch

from gsa_kernels.checks import beta_tensor, check_at_least, check_shape
from gsa_kernels.devices import launching_on
from gsa_kernels.indexer.score_inputs import ScoreInputs, score_inputs
from gsa_kernels.indexer.triton_scores import score_tiles, write_scores
from gsa_kernels.limits import REGISTER_KEYS, SELECTION_CHUNK_BYTES, ceil_div, has_candidates
from gsa_kernels.selection.candidates import (
    candidate_rows,
    sample_keys,
    select_by_candidates,
    select_failed,
)
from gsa_kernels.selection.criteria import Criteria, LogSums, Outputs
from gsa_kernels.selection.score_chunks import (
    chunk_view,
    row_blocks,
    row_chunks,
    score_buffer,
    score_columns,
)
from gsa_kernels.selection.triton_select import select_rows
from gsa_kernels.selection.triton_select_long import select_long_rows
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

_TILE_MULTIPLE = 64  # rows: the method changes only at multiples, so that no tile of rows is split
_ALL_OF_ONE_SEQUENCE = Geometry()


@torch.no_grad()
def select_keys(
    indexer: Indexer,
    rule: BudgetRule,
    variance_ema: torch.Tensor,
    geometry: Geometry = _ALL_OF_ONE_SEQUENCE,
    *,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
    candidates_from: int | None = None,
    with_log_sum: bool = False,
) -> Selection:
    """Select S_t: the k_t causal keys with the highest scores, and the last `local_window` keys.

    If keys have equal scores, the key with the lower index is selected first. `indexer_scores`, `score_moments`,
    `adaptive_budget` and `select_top_k` define the result. The top-k is exact for the scores that this call computes,
    which differ from the reference's scores by rounding.

    There are no gradients, and the host does not wait for the device. Equal inputs give the same bits. The result for a
    query does not depend on other queries.

    Args:
        indexer: bfloat16 or float32
        variance_ema: 0-d fp32, the layer's moving average before this step
        row_chunk_bytes: size of the buffer of scores, at least one tile of rows. More bytes fill the device better.
        candidates_from: a multiple of 64, or None for no rows. Rows with at least this number of keys are selected by
            candidates (`selection/candidates.py`) instead of all their scores. The result is the same except for the
            rounding of the variance. Candidates need whole tiles of 64 rows. If query_start is not a multiple of 64, up
            to 63 further rows are therefore selected by all their scores.
        with_log_sum: also return `log_sum` for the indexer's inverse temperature. Rows must have at most REGISTER_KEYS
            keys and not be selected by candidates.
    """
    num_keys = indexer.keys.shape[1]
    if with_log_sum and (num_keys > REGISTER_KEYS or candidates_from is not None):
        raise ValueError(
            f"with_log_sum is True with {num_keys} keys and candidates_from {candidates_from}; pass False beyond "
            f"{REGISTER_KEYS} keys and with candidates"
        )
    with launching_on(indexer.queries, "the indexer"):
        selector = Selector(indexer, rule, variance_ema, geometry, row_chunk_bytes, candidates_from)
        outputs = new_outputs(selector.inputs)
        if with_log_sum:
            beta = beta_tensor(indexer.inverse_temperature, variance_ema.device).detach().reshape(1).float()
            outputs = replace(outputs, log_sums=LogSums(beta, torch.empty_like(outputs.variance)))
        for rows in selector.chunks:
            failed = selector.select(rows, outputs)
            if failed is not None:
                selector.select_failed(rows, failed, outputs)
    log_sum = None if outputs.log_sums is None else outputs.log_sums.out
    return Selection(outputs.packed_mask, None, outputs.budget, outputs.variance, log_sum=log_sum)


class Selector:
    """Scores and selects chunk by chunk. Short rows use a buffer of all scores, and long rows use candidates."""

    def __init__(
        self,
        indexer: Indexer,
        rule: BudgetRule,
        variance_ema: torch.Tensor,
        geometry: Geometry,
        row_chunk_bytes: int,
        candidates_from: int | None,
    ) -> None:
        """Check the arguments, which are those that `select_keys` describes."""
        self.inputs = inputs = score_inputs(indexer, geometry)
        check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
        if variance_ema.dtype != torch.float32 or variance_ema.device != inputs.device:
            raise ValueError(
                f"variance_ema is {variance_ema.dtype} on {variance_ema.device}; pass float32 on {inputs.device}"
            )
        check_at_least("row_chunk_bytes", row_chunk_bytes, 1)
        if candidates_from is not None and (candidates_from < 1 or candidates_from % _TILE_MULTIPLE):
            raise ValueError(
                f"candidates_from is {candidates_from}; pass a positive multiple of {_TILE_MULTIPLE}, or None"
            )
        length = inputs.num_keys
        rule = replace(
            rule,
            k_min=min(rule.k_min, length),
            k_max=min(rule.k_max, length),
            dense_below=min(rule.dense_below, length + 1),
        )
        self.criteria = Criteria(inputs, rule, variance_ema, min(geometry.local_window, length))

        batch, num_rows, self.tile_rows = inputs.batch, inputs.num_rows, score_tiles(inputs).rows
        self.first_guessed = num_rows
        if candidates_from is not None and has_candidates(rule.most_keys):
            below = max(inputs.rows_below(candidates_from), 0)
            self.first_guessed = min(ceil_div(below, _TILE_MULTIPLE) * _TILE_MULTIPLE, num_rows)
        self.row_chunk_bytes = row_chunk_bytes
        scored = list(
            row_chunks(batch, self.first_guessed, self.tile_rows, row_chunk_bytes, inputs.query_start)
        )
        step = candidate_rows(batch, rule.most_keys, self.tile_rows, row_chunk_bytes)
        guessed = range(self.first_guessed, num_rows, step)
        self.chunks = scored + [range(start, min(start + step, num_rows)) for start in guessed]
        self.sample = sample_keys(inputs) if guessed else None
        self.buffer = score_buffer(inputs, scored)

    def by_candidates(self, rows: range) -> bool:
        return rows.start >= self.first_guessed

    def select(self, rows: range, outputs: Outputs) -> torch.Tensor | None:
        """Select one of the chunks.

        Returns:
            int32 [B, rows] if the chunk is selected by candidates: 1 for the rows that `select_failed` must select
        """
        if self.sample is not None and self.by_candidates(rows):
            return select_by_candidates(self.criteria, self.sample, rows, outputs)
        scores = chunk_view(self.buffer, self.inputs, rows)
        write_scores(self.inputs, rows.start, rows.stop, scores)
        select_chunk(self.criteria, scores, rows, outputs)
        return None

    def select_failed(
        self, rows: range, failed: torch.Tensor, outputs: Outputs, failed_on_host: torch.Tensor | None = None
    ) -> None:
        """Select the rows of a chunk for which `select` returned 1 in `failed`.

        Args:
            failed_on_host: a copy of `failed` on the host, which saves launches for chunks without failed rows
        """
        columns = score_columns(self.inputs, rows)
        step = self.row_chunk_bytes // (4 * self.inputs.batch * columns)
        step = max(step // self.tile_rows, 1) * self.tile_rows
        chunks = [range(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]
        buffer = score_buffer(self.inputs, chunks)
        for chunk in chunks:
            here = slice(chunk.start - rows.start, chunk.stop - rows.start)
            if failed_on_host is not None and not failed_on_host[:, here].any():
                continue
            scores = chunk_view(buffer, self.inputs, chunk)
            select_failed(self.criteria, scores, chunk, failed[:, here].contiguous(), outputs)


@torch.no_grad()
def score_rows(indexer: Indexer, rows: range, geometry: Geometry = _ALL_OF_ONE_SEQUENCE) -> torch.Tensor:
    """Return the scores that `select_keys` ranks, to the bit, for some rows.

    Returns:
        fp32 [B, len(rows), Lk]; entries of keys that are not causal are unspecified (NaN is possible).
    """
    inputs = score_inputs(indexer, geometry)
    if not 0 <= rows.start < rows.stop <= inputs.num_rows or rows.step != 1:
        raise ValueError(f"rows is {rows}; pass range(start, stop), 0 <= start < stop <= {inputs.num_rows}")
    with launching_on(inputs.indexer.queries, "the indexer"):
        scores = torch.empty(
            (inputs.batch, len(rows), inputs.num_keys), dtype=torch.float32, device=inputs.device
        )
        write_scores(inputs, rows.start, rows.stop, scores)
    return scores


def new_outputs(inputs: ScoreInputs) -> Outputs:
    """Create the outputs with a zero packed mask, because kernels write only selected keys."""
    batch, num_rows, device = inputs.batch, inputs.num_rows, inputs.device
    return Outputs(
        torch.zeros((batch, num_rows, -(-inputs.num_keys // 32)), dtype=torch.int32, device=device),
        torch.empty((batch, num_rows), dtype=torch.int32, device=device),
        torch.empty((batch, num_rows), dtype=torch.float32, device=device),
    )


def select_chunk(criteria: Criteria, scores: torch.Tensor, rows: range, outputs: Outputs) -> None:
    """Select the rows whose scores are in `scores`, each row by the kernel for its length."""
    for of_block, block in row_blocks(criteria.inputs, rows):
        select: Callable[..., None] = select_rows if block <= REGISTER_KEYS else select_long_rows
        select(criteria, scores, rows.start, of_block, block, outputs)
