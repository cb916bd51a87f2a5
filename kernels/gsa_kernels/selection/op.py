"""Scores, budget and selection in one call, without an L x L matrix: rows go through in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import triton

from gsa_kernels.checks import beta_tensor, check_at_least, check_budget_rule, check_shape
from gsa_kernels.devices import launching_on
from gsa_kernels.indexer.triton_scores import ScoreInputs, score_inputs, score_tiles, write_scores
from gsa_kernels.limits import MOST_CANDIDATES, REGISTER_KEYS, SELECTION_CHUNK_BYTES, candidate_room
from gsa_kernels.selection.candidates import (
    candidate_rows,
    sample_keys,
    select_by_candidates,
    select_failed,
)
from gsa_kernels.selection.score_chunks import (
    chunk_view,
    row_blocks,
    row_chunks,
    score_buffer,
    score_columns,
)
from gsa_kernels.selection.triton_select import LogSums, select_rows
from gsa_kernels.selection.triton_select_long import select_long_rows

_TILE_MULTIPLE = 64  # of the rows where another method begins: no tile of rows is split


@dataclass(frozen=True)
class Selection:
    """Which keys each query attends to: bit s % 32 of words[b, t, s // 32] is set if key s is in S_t.

    A word is a uint32 held in an int32: bit 31 makes it negative.
    """

    words: torch.Tensor
    """int32 [B, R, W], W = ceil(Lk / 32); R = L rows, or one per block of queries."""

    budget: torch.Tensor
    """int32 [B, R]: k_t, the keys of the top-k. The local window may add more to the words."""

    variance: torch.Tensor
    """fp32 [B, R]: population variance of the row's scores over its visible keys."""

    log_sum: torch.Tensor | None = None
    """fp32 [B, R]: log sum_{s in S_t} exp(beta I[t, s]), -inf where S_t is empty; only if asked for."""


@torch.no_grad()
def select_keys(
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
    selection_block: int = 1,
    query_start: int = 0,
    row_chunk_bytes: int = SELECTION_CHUNK_BYTES,
    candidates_from: int | None = None,
    inverse_temperature: float | torch.Tensor | None = None,
) -> Selection:
    """S_t = the k_t visible keys of highest score, ties to the lower index, and the last `local_window` keys.

    The definitions are `indexer_scores`, `score_moments`, `adaptive_budget` and `select_top_k`. The top-k is
    exact for the scores this call calculates, which differ from the reference by rounding only. Query i stands at
    position t = query_start + i, and sees key s if document_starts[b, i] <= s <= t. No gradients; nothing waits for
    the device; equal inputs give equal bits, and a query's row does not depend on which others are in the call.

    Args:
        q_idx: [B, R, HI, DI], bfloat16, float16 or float32; row r is query r * selection_block
        k_idx: [B, Lk, DI], Lk = query_start + L, dtype of q_idx
        weight_logits: w, [B, R, HI]
        variance_ema: 0-d fp32, the layer's moving average from before this step
        score_bias: b, [HI], zero if None
        weight_bias: c, [HI], zero if None
        document_starts: int32 [B, L], position of the first token of the query's document; 0 if None
        local_window: keys, the query's own included; they do not count towards k_t
        selection_block: b; only the first query of each aligned block of b selects, R = ceil(L / b).
        query_start: position of the first query, a multiple of b
        row_chunk_bytes: size of the buffer of scores; at least one tile of rows is calculated at a time.
            More bytes fill the device better: at 128K tokens, 512 MiB are a tenth faster than 256 MiB.
        candidates_from: rows at or beyond this many keys, a multiple of 64, are selected by candidates instead
            of by all their scores (`selection/candidates.py`); the result is the same, but for the rounding of
            the variance. No rows if None. They are whole tiles of 64: where query_start is no multiple of 64, up to
            63 rows beyond are selected by all their scores, too.
        inverse_temperature: beta > 0, a number or a tensor of one element: also give `log_sum`, which spares the
            indexer's loss a pass. For rows of at most REGISTER_KEYS keys, not selected by candidates.
    """
    num_keys = k_idx.shape[1]
    if inverse_temperature is not None and (num_keys > REGISTER_KEYS or candidates_from is not None):
        raise ValueError(
            f"inverse_temperature is given with {num_keys} keys and candidates_from {candidates_from}; "
            f"pass None beyond {REGISTER_KEYS} keys and with candidates"
        )
    with launching_on(q_idx):
        selector = make_selector(
            score_inputs(
                q_idx,
                k_idx,
                weight_logits,
                score_bias=score_bias,
                weight_bias=weight_bias,
                activation=activation,
                document_starts=document_starts,
                query_stride=selection_block,
                query_start=query_start,
            ),
            variance_ema,
            k_base=k_base,
            k_min=k_min,
            k_max=k_max,
            mode=mode,
            local_window=local_window,
            row_chunk_bytes=row_chunk_bytes,
            candidates_from=candidates_from,
        )
        outputs = new_outputs(selector.inputs)
        log_sums = None
        if inverse_temperature is not None:
            beta = beta_tensor(inverse_temperature, q_idx.device).detach().reshape(1).float()
            log_sums = LogSums(beta, torch.empty_like(outputs[2]))
        for rows in selector.chunks:
            failed = selector.select(rows, outputs, log_sums=log_sums)
            if failed is not None:
                selector.select_failed(rows, failed, outputs)
    return Selection(*outputs, None if log_sums is None else log_sums.out)


def make_selector(
    inputs: ScoreInputs,
    variance_ema: torch.Tensor,
    *,
    k_base: int,
    k_min: int,
    k_max: int,
    mode: str,
    local_window: int,
    row_chunk_bytes: int,
    candidates_from: int | None,
) -> "Selector":
    """Check what `select_keys` says of these arguments."""
    device = inputs.q_idx.device
    check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
    if variance_ema.dtype != torch.float32 or variance_ema.device != device:
        raise ValueError(
            f"variance_ema is {variance_ema.dtype} on {variance_ema.device}; pass float32 on {device}"
        )
    check_budget_rule(k_base, k_min, k_max, mode)
    check_at_least("local_window", local_window, 0)
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)

    length = inputs.k_idx.shape[1]
    if candidates_from is not None and (candidates_from < 1 or candidates_from % _TILE_MULTIPLE):
        raise ValueError(
            f"candidates_from is {candidates_from}; pass a positive multiple of {_TILE_MULTIPLE}, or None"
        )
    # No row has more than Lk keys: limits above that would only cost registers.
    budget_rule = (k_base, min(k_min, length), min(k_max, length), mode)
    return Selector(
        inputs,
        variance_ema,
        budget_rule,
        min(local_window, length),
        row_chunk_bytes,
        candidates_from,
    )


class Selector:
    """Scores and selects chunk by chunk: rows of few keys in one buffer of scores, longer ones by candidates."""

    def __init__(
        self,
        inputs: ScoreInputs,
        variance_ema: torch.Tensor,
        budget_rule: tuple[int, int, int, str],
        local_window: int,
        row_chunk_bytes: int,
        candidates_from: int | None,
    ) -> None:
        """budget_rule: k_base, k_min, k_max, mode; the others as `select_keys` has them"""
        self.inputs, self.variance_ema = inputs, variance_ema
        self.budget_rule, self.local_window = budget_rule, local_window
        batch, num_rows = inputs.q_idx.shape[:2]
        self.tile_rows, stride = score_tiles(inputs).rows, inputs.query_stride
        # Blocks of queries make few rows, which are not worth more launches.
        enough = stride == 1 and candidate_room(budget_rule[2]) <= MOST_CANDIDATES
        self.first_guessed = num_rows
        if enough and candidates_from is not None:
            below = max(inputs.rows_below(candidates_from), 0)
            self.first_guessed = min(triton.cdiv(below, _TILE_MULTIPLE) * _TILE_MULTIPLE, num_rows)
        self.row_chunk_bytes = row_chunk_bytes
        scored = list(
            row_chunks(batch, self.first_guessed, self.tile_rows, row_chunk_bytes, stride, inputs.query_start)
        )
        step = candidate_rows(batch, budget_rule[2], self.tile_rows, row_chunk_bytes)
        guessed = range(self.first_guessed, num_rows, step)
        self.chunks = scored + [range(start, min(start + step, num_rows)) for start in guessed]
        self.sample = sample_keys(inputs) if guessed else None
        self.buffer = score_buffer(inputs, scored)

    def by_candidates(self, rows: range) -> bool:
        """Whether that is how the chunk is selected."""
        return rows.start >= self.first_guessed

    def select(
        self,
        rows: range,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        words_start: int = 0,
        log_sums: LogSums | None = None,
    ) -> torch.Tensor | None:
        """One of the chunks.

        Args:
            outputs: words int32 [B, rows, W] of zeros, of which row r has [:, r - words_start]; budget int32
                [B, R]; variance fp32 [B, R]
            log_sums: only where rows are selected in registers

        Returns:
            int32 [B, rows] if the chunk is selected by candidates: 1 for the rows that `select_failed` must do
        """
        inputs, rule, window = self.inputs, self.budget_rule, self.local_window
        if self.sample is not None and self.by_candidates(rows):
            blocks = list(row_blocks(inputs, rows))
            return select_by_candidates(
                inputs, self.sample, rows, blocks, outputs, words_start, self.variance_ema, rule, window
            )
        scores = chunk_view(self.buffer, inputs, rows)
        write_scores(inputs, rows.start, rows.stop, scores)
        select_chunk(scores, rows, outputs, inputs, self.variance_ema, rule, window, words_start, log_sums)
        return None

    def select_failed(
        self,
        rows: range,
        failed: torch.Tensor,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        words_start: int = 0,
        failed_on_host: torch.Tensor | None = None,
    ) -> None:
        """What `select` left of a chunk; nothing where `failed`, its result, is 0.

        Args:
            failed_on_host: the same as `failed`; saves launches for rows without any
        """
        batch = self.inputs.q_idx.shape[0]
        columns = score_columns(self.inputs, rows)
        step = max(self.row_chunk_bytes // (4 * batch * columns) // self.tile_rows, 1) * self.tile_rows
        parts = [range(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]
        buffer = score_buffer(self.inputs, parts)
        for part in parts:
            here = slice(part.start - rows.start, part.stop - rows.start)
            if failed_on_host is not None and not failed_on_host[:, here].any():
                continue
            select_failed(
                self.inputs,
                part,
                list(row_blocks(self.inputs, part)),
                chunk_view(buffer, self.inputs, part),
                failed[:, here].contiguous(),
                outputs,
                words_start,
                self.variance_ema,
                self.budget_rule,
                self.local_window,
            )


@torch.no_grad()
def score_rows(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    row_start: int,
    row_stop: int,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    document_starts: torch.Tensor | None = None,
    selection_block: int = 1,
    query_start: int = 0,
) -> torch.Tensor:
    """The scores `select_keys` ranks, to the bit, of the rows row_start <= r < row_stop.

    Returns:
        fp32 [B, row_stop - row_start, Lk]; entries of invisible keys are unspecified (NaN is possible).
    """
    inputs = score_inputs(
        q_idx,
        k_idx,
        weight_logits,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        document_starts=document_starts,
        query_stride=selection_block,
        query_start=query_start,
    )
    batch, num_rows, length = *q_idx.shape[:2], k_idx.shape[1]
    if not 0 <= row_start < row_stop <= num_rows:
        raise ValueError(
            f"row_start is {row_start} and row_stop {row_stop}; pass 0 <= start < stop <= {num_rows}"
        )
    with launching_on(q_idx):
        scores = torch.empty((batch, row_stop - row_start, length), dtype=torch.float32, device=q_idx.device)
        write_scores(inputs, row_start, row_stop, scores)
    return scores


def new_outputs(inputs: ScoreInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """words, of zeros since only what is selected gets written, budget and variance."""
    batch, num_rows = inputs.q_idx.shape[:2]
    device = inputs.q_idx.device
    return (
        torch.zeros((batch, num_rows, -(-inputs.k_idx.shape[1] // 32)), dtype=torch.int32, device=device),
        torch.empty((batch, num_rows), dtype=torch.int32, device=device),
        torch.empty((batch, num_rows), dtype=torch.float32, device=device),
    )


def select_chunk(
    scores: torch.Tensor,
    rows: range,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: ScoreInputs,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    local_window: int,
    words_start: int = 0,
    log_sums: LogSums | None = None,
) -> None:
    """Select for the rows whose scores are in `scores`, each size of row by the kernel made for it."""
    for part, block in row_blocks(inputs, rows):
        select: Callable[..., None] = select_long_rows
        if block <= REGISTER_KEYS:
            select = partial(select_rows, log_sums=log_sums)
        select(
            scores,
            rows.start,
            part,
            block,
            outputs,
            inputs.document_starts,
            variance_ema,
            budget_rule,
            local_window,
            inputs.query_stride,
            words_start,
            inputs.query_start,
        )
