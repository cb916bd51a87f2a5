"""Compute perplexity, bits per byte and loss by position of a model on text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from tqdm import tqdm

from gsa_eval.text import Piece, Text
from gsa_hf import GSAForCausalLM
from gsa_train.validation.perplexity import perplexity

LOGIT_ROWS = 4096
"""Number of labels whose logits, [rows, vocabulary], are computed at once."""
FIRST_BUCKET_TOKENS = 16


def score_text(model: GSAForCausalLM, text: Text, batch_size: int, name: str = "") -> dict[str, Any]:
    """Returns entries of results.json: `loss` (nats per scored label), `perplexity`, `bits_per_byte`,
    `loss_by_position` (loss by the number of tokens in the context), and counts."""
    begin = time.perf_counter()
    scored = token_losses(model, text.pieces, batch_size)
    labels = list(tqdm(scored, name, total=len(text.pieces), leave=False, disable=None))
    nats = np.concatenate([each.nats for each in labels]).astype(np.float64)
    positions = [text.pieces[each.number].positions[text.pieces[each.number].scored] for each in labels]
    seen = np.concatenate(positions) + 1
    seconds = time.perf_counter() - begin
    total, loss = float(nats.sum()), float(nats.mean())
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": total / math.log(2) / text.text_bytes if text.text_bytes else None,
        "tokens": len(nats),
        "bytes": text.text_bytes,
        "sequences": len(text.pieces),
        "forward_tokens": sum(len(piece.scored) for piece in text.pieces),
        "seconds": round(seconds, 3),
        "loss_by_position": by_position(nats, seen),
    }


class Scored(NamedTuple):
    number: int
    """Number of the piece, from 0."""
    nats: NDArray[np.float32]
    """[labels] cross-entropy"""
    greedy: NDArray[np.bool_]
    """[labels] whether no other token is more probable"""


@torch.no_grad()
def token_losses(model: GSAForCausalLM, pieces: Sequence[Piece], batch_size: int) -> Iterator[Scored]:
    """Yields the scores of each piece (token sequence), the longest piece first. Pieces are padded at their end, so
    causal attention never reaches the padding."""
    order = sorted(range(len(pieces)), key=lambda number: -len(pieces[number].scored))
    under_way: tuple[list[int], list[int], torch.Tensor, torch.Tensor] | None = None
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        batch = [pieces[number] for number in numbers]
        length = len(batch[0].scored)
        tokens = np.stack([_filled(piece.tokens[:-1], length) for piece in batch])
        positions = None
        if any((np.diff(piece.positions) != 1).any() for piece in batch):
            rows = [_filled(piece.positions, length, counts_on=True) for piece in batch]
            positions = _on_device(np.stack(rows), model.device)
        given = {"input_ids": _on_device(tokens, model.device), "position_ids": positions}
        hidden = model.model(**given, use_cache=False).last_hidden_state
        places = [row * length + np.flatnonzero(piece.scored) for row, piece in enumerate(batch)]
        labels = np.concatenate([piece.tokens[1:][piece.scored] for piece in batch]).astype(np.int64)
        begun = numbers, [len(each) for each in places], *_score_labels(model, hidden, places, labels)
        # The device computes this batch while the host reads the previous one.
        if under_way is not None:
            yield from _read(*under_way)
        under_way = begun
    if under_way is not None:
        yield from _read(*under_way)


def _score_labels(
    model: GSAForCausalLM, hidden: torch.Tensor, places: list[NDArray[np.int64]], labels: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `nats` and `greedy` of `Scored` for the labels of a batch, without waiting for the device.

    Args:
        hidden: [B, L, d]
        places: for each row, the positions of scored inputs in the flattened batch
    """
    flat, targets = hidden.flatten(0, 1), _on_device(labels, hidden.device)
    rows = _on_device(np.concatenate(places), hidden.device)
    nats, greedy = [flat.new_zeros(0, dtype=torch.float32)], [flat.new_zeros(0, dtype=torch.bool)]
    for some, wanted in zip(rows.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = model.lm_head(flat[some])
        nats.append(_cross_entropy(logits, wanted))
        greedy.append(logits.argmax(-1) == wanted)
    return torch.cat(nats), torch.cat(greedy)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 cross-entropy of logits [N, V]. On a GPU, a fused kernel reads the logits once, where torch
    would write two fp32 copies."""
    if logits.is_cuda and len(logits) > 0:
        from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy  # imports Triton

        return vocab_parallel_cross_entropy(logits, targets)
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def _read(
    numbers: list[int], counts: list[int], nats: torch.Tensor, greedy: torch.Tensor
) -> Iterator[Scored]:
    ends = np.cumsum(counts)[:-1]
    of_pieces = (np.split(each.cpu().numpy(), ends) for each in (nats, greedy))
    yield from map(Scored, numbers, *of_pieces)


def _on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # A copy from pageable memory would wait for all queued work.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def by_position(nats: NDArray[np.float64], seen: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Returns the mean loss by the number of tokens in the context: 1-16, 17-32, 33-64, ...

    Args:
        nats: [labels]
        seen: [labels] number of tokens in the context, including the input.
    """
    bucket = np.maximum(np.ceil(np.log2(seen / FIRST_BUCKET_TOKENS)), 0).astype(np.int64)
    counts = np.bincount(bucket)
    sums = np.bincount(bucket, weights=nats)
    return [
        {
            "from": 1 if number == 0 else FIRST_BUCKET_TOKENS * 2 ** (number - 1) + 1,
            "to": FIRST_BUCKET_TOKENS * 2**number,
            "loss": sums[number] / count,
            "tokens": int(count),
        }
        for number, count in enumerate(counts)
        if count
    ]


def _filled(row: NDArray[Any], length: int, counts_on: bool = False) -> NDArray[np.int64]:
    """Returns the row padded to [length] with zeros. With `counts_on`, the padding counts on from the last number."""
    filled = np.zeros(length, np.int64)
    filled[: len(row)] = row
    if counts_on:
        filled[len(row) :] = row[-1] + 1 + np.arange(length - len(row))
    return filled
