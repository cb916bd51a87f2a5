"""Scores, budget and selection in one call, without an L x L matrix: rows go through in chunks."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import triton

from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.indexer.triton_scores import ScoreInputs, score_inputs, score_tiles, write_scores
from gsa_kernels.selection.triton_select import select_rows
from gsa_kernels.selection.triton_select_long import select_long_rows

ROW_CHUNK_BYTES = 256 * 2**20
# Rows below this many keys are selected in registers. One program has 256 KiB of them.
REGISTER_KEYS = 32768
_SMALLEST_BLOCK = 2048  # smaller ones gain less than their launch costs
_COLUMN_MULTIPLE = 128  # of the score buffer's rows, so that loads are aligned and tiles unmasked


@dataclass(frozen=True)
class Selection:
    """Which keys each query attends to: bit s % 32 of words[b, t, s // 32] is set if key s is in S_t.

    A word is a uint32 held in an int32: bit 31 makes it negative.
    """

    words: torch.Tensor
    """int32 [B, L, W], W = ceil(L / 32)."""

    budget: torch.Tensor
    """int32 [B, L]: k_t, the keys of the top-k. The local window may add more to the words."""

    variance: torch.Tensor
    """fp32 [B, L]: population variance of the row's scores over its visible keys."""


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
    row_chunk_bytes: int = ROW_CHUNK_BYTES,
) -> Selection:
    """S_t = the k_t visible keys of highest score, ties to the lower index, and the last `local_window` keys.

    The definitions are `indexer_scores`, `score_moments`, `adaptive_budget` and `select_top_k`. The top-k is
    exact for the scores this call calculates, which differ from the reference by rounding only. Key s is
    visible to query t if document_starts[b, t] <= s <= t. No gradients; nothing waits for the device; equal
    inputs give equal bits.

    Args:
        q_idx: [B, L, HI, DI], bfloat16, float16 or float32
        k_idx: [B, L, DI], dtype of q_idx
        weight_logits: w, [B, L, HI]
        variance_ema: 0-d fp32, the layer's moving average from before this step
        score_bias: b, [HI], zero if None
        weight_bias: c, [HI], zero if None
        document_starts: int32 [B, L], position of the first token of the query's document; 0 if None
        local_window: keys, the query's own included; they do not count towards k_t
        row_chunk_bytes: size of the buffer of scores; at least one tile of rows is calculated at a time.
            More bytes fill the device better: at 128K tokens, 512 MiB are a tenth faster than 256 MiB.
    """
    inputs = score_inputs(
        q_idx,
        k_idx,
        weight_logits,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        document_starts=document_starts,
    )
    check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
    if variance_ema.dtype != torch.float32 or variance_ema.device != q_idx.device:
        raise ValueError(
            f"variance_ema is {variance_ema.dtype} on {variance_ema.device}; pass float32 on {q_idx.device}"
        )
    check_at_least("k_base", k_base, 1)
    check_at_least("k_min", k_min, 1)
    if k_max < k_min:
        raise ValueError(f"k_max is {k_max}, below k_min {k_min}; pass k_max >= k_min")
    if mode not in ("inverse", "direct", "off"):
        raise ValueError(f"mode is {mode!r}; pass 'inverse', 'direct' or 'off'")
    check_at_least("local_window", local_window, 0)
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)

    batch, length = q_idx.shape[:2]
    # No row has more than L keys: limits above L would only cost registers.
    budget_rule = (k_base, min(k_min, length), min(k_max, length), mode)
    local_window = min(local_window, length)
    with _launching_on(q_idx):
        outputs = new_outputs(inputs)
        chunks = list(row_chunks(batch, length, score_tiles(inputs).rows, row_chunk_bytes))
        buffer = score_buffer(inputs, chunks)
        for rows in chunks:
            scores = chunk_view(buffer, batch, rows)
            write_scores(inputs, rows.start, rows.stop, scores)
            select_chunk(scores, rows, outputs, inputs, variance_ema, budget_rule, local_window)
    return Selection(*outputs)


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
) -> torch.Tensor:
    """The scores `select_keys` ranks, to the bit, of the queries row_start <= t < row_stop.

    Returns:
        fp32 [B, row_stop - row_start, L]; entries of invisible keys are unspecified (NaN is possible).
    """
    inputs = score_inputs(
        q_idx,
        k_idx,
        weight_logits,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        document_starts=document_starts,
    )
    batch, length = q_idx.shape[:2]
    if not 0 <= row_start < row_stop <= length:
        raise ValueError(
            f"row_start is {row_start} and row_stop {row_stop}; pass 0 <= start < stop <= {length}"
        )
    with _launching_on(q_idx):
        scores = torch.empty((batch, row_stop - row_start, length), dtype=torch.float32, device=q_idx.device)
        write_scores(inputs, row_start, row_stop, scores)
    return scores


def words_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """bool [..., Lk] -> int32 [..., ceil(Lk / 32)], bit s % 32 of word s // 32."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool mask")
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32))
    bits = padded.to(torch.int64) << torch.arange(32, device=mask.device)
    words = bits.sum(-1)
    # uint32 to int32 by value, since a cast of what does not fit is not defined.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def mask_from_words(words: torch.Tensor, num_keys: int) -> torch.Tensor:
    """int32 [..., W] -> bool [..., num_keys]; the inverse of `words_from_mask`."""
    if words.dtype != torch.int32 or words.shape[-1] != -(-num_keys // 32):
        raise ValueError(
            f"words is {words.dtype} {tuple(words.shape)}; pass int32 [..., ceil({num_keys} / 32)]"
        )
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.bool().flatten(-2)[..., :num_keys]


def row_chunks(batch: int, length: int, tile: int, chunk_bytes: int) -> Iterator[range]:
    """Row ranges whose scores, up to the last row's diagonal, fit in `chunk_bytes`; whole tiles of rows."""
    start = 0
    entries = chunk_bytes // (4 * batch)
    while start < length:
        # rows * (start + rows) <= entries, with the width rounded up
        width = start + _COLUMN_MULTIPLE
        rows = int((math.sqrt(width * width + 4 * entries) - width) / 2)
        stop = min(start + max(rows // tile, 1) * tile, length)
        yield range(start, stop)
        start = stop


def score_buffer(inputs: ScoreInputs, chunks: list[range]) -> torch.Tensor:
    """A flat fp32 buffer that holds the scores of the largest chunk."""
    batch = inputs.q_idx.shape[0]
    size = max(batch * len(rows) * _score_columns(rows) for rows in chunks)
    return torch.empty(size, dtype=torch.float32, device=inputs.q_idx.device)


def new_outputs(inputs: ScoreInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """words, of zeros since only what is selected gets written, budget and variance."""
    batch, length = inputs.q_idx.shape[:2]
    device = inputs.q_idx.device
    return (
        torch.zeros((batch, length, -(-length // 32)), dtype=torch.int32, device=device),
        torch.empty((batch, length), dtype=torch.int32, device=device),
        torch.empty((batch, length), dtype=torch.float32, device=device),
    )


def chunk_view(buffer: torch.Tensor, batch: int, rows: range) -> torch.Tensor:
    """The start of the flat `buffer` as [B, rows, columns], columns enough for the last row."""
    columns = _score_columns(rows)
    return buffer[: batch * len(rows) * columns].view(batch, len(rows), columns)


def select_chunk(
    scores: torch.Tensor,
    rows: range,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: ScoreInputs,
    variance_ema: torch.Tensor,
    budget_rule: tuple[int, int, int, str],
    local_window: int,
) -> None:
    """Select for the rows whose scores are in `scores`, each size of row by the kernel made for it."""
    for part, block in _row_blocks(rows):
        select = select_rows if block <= REGISTER_KEYS else select_long_rows
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
        )


def _row_blocks(rows: range) -> Iterator[tuple[range, int]]:
    """Split at the powers of two: a row's block, and so its result, depends on its position alone."""
    start = rows.start
    while start < rows.stop:
        block = max(_SMALLEST_BLOCK, 1 << start.bit_length())
        stop = min(block, rows.stop)
        yield range(start, stop), block
        start = stop


def _score_columns(rows: range) -> int:
    return -(-rows.stop // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


def _launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not triton.knobs.runtime.interpret:
        raise ValueError(
            f"q_idx is on {tensor.device}; pass CUDA tensors (or set TRITON_INTERPRET=1 to test)"
        )
    return nullcontext()
