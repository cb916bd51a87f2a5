"""Perplexity, bits per byte and loss by position of a model on text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from tqdm import tqdm

from gsa_hf import GSAForCausalLM
from gsa_train.evaluation.text import Piece, Text

LOGIT_ROWS = 4096
"""Labels whose logits are calculated at once: [rows, vocabulary] in fp32 is 2 GB with 128K tokens."""
FIRST_BUCKET_TOKENS = 16


def score_text(model: GSAForCausalLM, text: Text, batch_size: int, name: str = "") -> dict[str, Any]:
    """Of results.json: `loss` (nats per scored label), `perplexity`, `bits_per_byte`, `word_perplexity` (exp(nats of
    all labels / words)), and `loss_by_position`, by how many tokens the model sees when it predicts."""
    begin = time.perf_counter()
    scored = token_losses(model, text.pieces, batch_size)
    losses = list(tqdm(scored, name, total=len(text.pieces), leave=False, disable=None))
    nats = np.concatenate([each for _, each in losses]).astype(np.float64)
    seen = np.concatenate([piece.positions[piece.scored] + 1 for piece, _ in losses])
    seconds = time.perf_counter() - begin
    total, loss = float(nats.sum()), float(nats.mean())
    found: dict[str, Any] = {
        "loss": loss,
        "perplexity": exp(loss),
        "bits_per_byte": total / math.log(2) / text.text_bytes if text.text_bytes else None,
        "tokens": len(nats),
        "bytes": text.text_bytes,
        "sequences": len(text.pieces),
        "forward_tokens": sum(len(piece.scored) for piece in text.pieces),
        "seconds": round(seconds, 3),
        "loss_by_position": by_position(nats, seen),
    }
    if text.words is not None:
        found |= {"words": text.words, "word_perplexity": exp(total / text.words)}
    return found


@torch.no_grad()
def token_losses(
    model: GSAForCausalLM, pieces: Sequence[Piece], batch_size: int
) -> Iterator[tuple[Piece, NDArray[np.float32]]]:
    """Each piece with the cross-entropy of its scored labels, fp32 [labels], the longest first.

    Padding stands behind a sequence, where no query of it looks.

    Raises:
        ValueError: packed documents whose queries share selections.
    """
    order = sorted(pieces, key=lambda piece: -len(piece.scored))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        length = len(batch[0].scored)
        tokens = np.stack([_filled(piece.tokens[:-1], length) for piece in batch])
        positions = None
        if any((np.diff(piece.positions) != 1).any() for piece in batch):
            _check_may_pack(model)
            rows = [_filled(piece.positions, length, counts_on=True) for piece in batch]
            positions = torch.from_numpy(np.stack(rows)).to(model.device)
        hidden = model.model(
            input_ids=torch.from_numpy(tokens).to(model.device), position_ids=positions, use_cache=False
        ).last_hidden_state
        places = [row * length + np.flatnonzero(piece.scored) for row, piece in enumerate(batch)]
        labels = np.concatenate([piece.tokens[1:][piece.scored] for piece in batch]).astype(np.int64)
        losses = _cross_entropy(model, hidden.flatten(0, 1), np.concatenate(places), labels)
        counts = np.cumsum([len(each) for each in places])[:-1]
        yield from zip(batch, np.split(losses, counts), strict=True)


def _cross_entropy(
    model: GSAForCausalLM, hidden: torch.Tensor, places: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.float32]:
    parts = []
    for first in range(0, len(places), LOGIT_ROWS):
        rows = hidden[torch.from_numpy(places[first : first + LOGIT_ROWS]).to(hidden.device)]
        targets = torch.from_numpy(labels[first : first + LOGIT_ROWS]).to(hidden.device)
        parts.append(functional.cross_entropy(model.lm_head(rows).float(), targets, reduction="none"))
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)


def by_position(nats: NDArray[np.float64], seen: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Mean loss in buckets of 1-16, 17-32, 33-64, ... tokens that the model sees.

    Args:
        nats: [labels]
        seen: [labels] tokens, the last one included.
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


def exp(loss: float) -> float:
    """Infinite where a float cannot hold it."""
    return math.inf if loss >= 700 else math.exp(loss)


def _filled(row: NDArray[Any], length: int, counts_on: bool = False) -> NDArray[np.int64]:
    """[length], zeros behind the row, or numbers that go on from its last."""
    filled = np.zeros(length, np.int64)
    filled[: len(row)] = row
    if counts_on:
        filled[len(row) :] = row[-1] + 1 + np.arange(length - len(row))
    return filled


def _check_may_pack(model: GSAForCausalLM) -> None:
    """In training blocks of queries are aligned to the sequence, here to each document."""
    if model.config.index_block_size > 1:
        raise ValueError(
            f"gsa.selection_block = {model.config.index_block_size} with isolated documents in one sequence: blocks of "
            "queries would not be those of training; give --stride, which scores each document by itself"
        )
