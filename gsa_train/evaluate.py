"""Validation: perplexity and attention statistics on fixed text, and what n-gram models reach on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gsa_data.ngram import fit_ngrams
from gsa_data.tokenize import Tokenizer
from gsa_train.batches import MicroBatch, replay_training_blocks, to_micro_batch
from gsa_train.config import Config
from gsa_train.metrics import attention_metrics, reduce_step
from gsa_train.model.build import Model
from gsa_train.parallel import Parallel
from gsa_train.step import evaluation_step


def evaluate(
    model: Model, blocks: np.ndarray, eos_id: int, config: Config, parallel: Parallel
) -> dict[str, Any]:
    """Score int32 blocks [n, L + 1], dealt over the replicas; every rank gets the result. Collective.

    Returns:
        `validation_loss` (nats per token), `validation_perplexity`, and the statistics of section 4 of the
        specification as `validation_recall`, `validation_random_recall`, ... (overall values).
    """
    model.runtime.measuring = True
    loss_sum, loss_tokens = evaluation_step(model, _deal(blocks, eos_id, config, parallel), config, parallel)
    model.runtime.measuring = False
    dist.all_reduce(loss_tokens, group=parallel.groups.dp)
    reduced = reduce_step(model.runtime.stats, loss_sum, loss_tokens.item(), None, parallel)
    overall = {
        f"validation_{name}": value
        for name, value in attention_metrics(reduced.layers).items()
        if not name.startswith("layer_")
    }
    return {
        "validation_loss": reduced.loss,
        "validation_perplexity": perplexity(reduced.loss),
        "validation_recall": None,
        "validation_random_recall": None,
        **overall,
    }


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def _deal(blocks: np.ndarray, eos_id: int, config: Config, parallel: Parallel) -> list[MicroBatch]:
    """This replica's micro-batches. All replicas get as many; what is missing is filled up with sequences that
    count for nothing in the loss."""
    size = config.train.micro_batch_size
    per_round = size * parallel.data_size
    missing = -len(blocks) % per_round
    filled = np.concatenate([blocks, np.repeat(blocks[:1], missing, axis=0)])
    counts = np.arange(len(filled)) < len(blocks)
    mine = torch.from_numpy(filled[parallel.data_rank :: parallel.data_size]).to(parallel.device)
    counted = torch.from_numpy(counts[parallel.data_rank :: parallel.data_size]).to(parallel.device)
    micro_batches = []
    for part, counted_part in zip(mine.split(size), counted.split(size), strict=True):
        batch = to_micro_batch(part, eos_id, config.data.attend_across_documents)
        micro_batches.append(
            MicroBatch(
                batch.tokens, batch.labels, batch.document_ids, batch.loss_mask * counted_part[:, None]
            )
        )
    return micro_batches


def ngram_perplexities(
    blocks: np.ndarray, tokenizer: Tokenizer, samples: int, config: Config
) -> dict[str, float]:
    """Perplexity on the same text of a unigram and a bigram model of the first `samples` training sequences."""
    model = fit_ngrams(
        replay_training_blocks(config, tokenizer, samples),
        config.model.vocab_size,
        tokenizer.eos_id,
        config.data.attend_across_documents,
    )
    return {
        "unigram_perplexity": model.unigram_perplexity([blocks]),
        "bigram_perplexity": model.bigram_perplexity([blocks]),
    }
