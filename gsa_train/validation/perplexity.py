"""Measure perplexities and attention statistics on fixed text, and n-gram models' perplexities on the same text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gsa_data.faults import printable
from gsa_data.ngram import fit_ngrams
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import ScoredText, ValidationSet
from gsa_train.config import Config
from gsa_train.data.batches import MicroBatch, replay_training_blocks, to_micro_batch
from gsa_train.distributed.parallel import Parallel
from gsa_train.metrics.panels import PICTURES
from gsa_train.metrics.record import Reduced, attention_metrics, send_step
from gsa_train.model.mcore.build import Model
from gsa_train.step import evaluation_step

ROUND_MICRO_BATCHES = 32
"""Largest number of micro-batches per replica in a call of the pipeline schedule, rounded down to whole groups. A long
validation can thus be stopped within seconds."""

SCORES = ("loss", "perplexity", "bits_per_byte")


def evaluate(
    model: Model,
    sets: list[ValidationSet],
    eos_id: int,
    config: Config,
    parallel: Parallel,
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Score every validation set, distributed over the replicas. Every rank gets the result. Collective.

    The training state does not change: no random number is drawn, and no moving average is updated.

    Args:
        before_each: called on every rank before each part of at most `ROUND_MICRO_BATCHES`; may raise to end it.

    Returns:
        - `validation_set`: name of the first set.
        - Scores of this set: `validation_loss` (nats per scored token), `validation_perplexity`, and
          `validation_bits_per_byte` (bits of all scored labels with EOS, per byte of their text without EOS).
        - Attention statistics of this set (model/probes/stats.py), such as `validation_recall`. If micro-batches do not
          divide the set, some sequences count more often than others.
        - Scores of each other set: `validation_<name>_loss` and so on.
        - For a set split by source: `<score>_by_source`, dicts source -> value.
    """
    record: dict[str, Any] = {"validation_set": sets[0].name}
    for each in sets:
        is_first = each is sets[0]
        prefix = "validation" if is_first else f"validation_{each.name}"
        reduced = _score(model, each.text, eos_id, config, parallel, before_each, measures=is_first)
        scores = _scores(reduced.loss, each.text)
        record |= {f"{prefix}_{score}": scores[score] for score in SCORES}
        if is_first:
            record |= {"validation_recall": None, "validation_random_recall": None}
            record |= {
                f"validation_{name}": value
                for name, value in attention_metrics(reduced.layers).items()
                if not name.startswith("layer_") and name not in PICTURES
            }
        if each.by_source:
            by_source = {
                source: _scores(_score(model, text, eos_id, config, parallel, before_each).loss, text)
                for source, text in each.by_source.items()
            }
            for score in SCORES:
                of_sources = {source: scores[score] for source, scores in by_source.items()}
                record[f"{prefix}_{score}_by_source"] = of_sources
    return record


def describe(each: ValidationSet) -> str:
    """Describe the sizes of a set, because the perplexity of a source with few tokens is noisy."""
    sources = ", ".join(
        f"{printable(source)} {text.scored_tokens}" for source, text in each.by_source.items()
    )
    return (
        f"validation set {each.name}: {len(each.text.blocks)} sequences, {each.text.scored_tokens} scored tokens"
        f"{f' ({sources})' if sources else ''}"
    )


def scores_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the scores of `evaluate`, without the statistics of the attention."""
    endings = tuple(f"_{score}{by_source}" for score in SCORES for by_source in ("", "_by_source"))
    return {name: value for name, value in record.items() if name.endswith(endings)}


def _score(
    model: Model,
    text: ScoredText,
    eos_id: int,
    config: Config,
    parallel: Parallel,
    before_each: Callable[[], None],
    measures: bool = False,
) -> Reduced:
    """Score a text. `loss` is the mean over all its scored labels, for any distribution over ranks."""
    micro_batches = _deal(text, eos_id, config, parallel)
    loss_sum = torch.zeros((), dtype=torch.float64, device=parallel.device)
    group = schedule_group(config, parallel)
    most = max(ROUND_MICRO_BATCHES // group, 1) * group
    for first in range(0, len(micro_batches), most):
        before_each()
        part = micro_batches[first : first + most]
        loss_sum += evaluation_step(model, part, config, parallel, measures)[0]
    return send_step(model.runtime.stats, loss_sum, text.scored_tokens, None, parallel)()


def _scores(loss: float, text: ScoredText) -> dict[str, float | None]:
    bits = loss * text.scored_tokens / math.log(2)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": bits / text.text_bytes if text.text_bytes > 0 else None,
    }


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity on overflow."""
    return math.inf if loss >= 700 else math.exp(loss)


def schedule_group(config: Config, parallel: Parallel) -> int:
    """Returns how many micro-batches stages take together: the number of stages if they are interleaved."""
    return parallel.pipeline_size if config.parallel.virtual_pipeline > 1 else 1


def _deal(text: ScoredText, eos_id: int, config: Config, parallel: Parallel) -> list[MicroBatch]:
    """Returns this replica's micro-batches. All replicas get the same number, for which sequences are repeated in order
    if necessary. Repetitions count in the statistics, but not in the loss."""
    size = config.train.micro_batch_size
    missing = -len(text.blocks) % (size * parallel.data_size * schedule_group(config, parallel))
    blocks = np.resize(text.blocks, (len(text.blocks) + missing, text.blocks.shape[1]))
    lengths = np.concatenate([text.lengths, np.zeros(missing, np.int64)])
    mine = slice(parallel.data_rank, None, parallel.data_size)
    places = torch.arange(config.train.seq_len_tokens, device=parallel.device)
    micro_batches = []
    for part, part_lengths in zip(
        torch.from_numpy(blocks[mine]).to(parallel.device).split(size),
        torch.from_numpy(lengths[mine]).to(parallel.device).split(size),
        strict=True,
    ):
        batch = to_micro_batch(part, eos_id, config.data.attend_across_documents)
        is_text = places < part_lengths[:, None]
        micro_batches.append(dataclasses.replace(batch, loss_mask=batch.loss_mask * is_text))
    return micro_batches


def ngram_perplexities(
    blocks: np.ndarray, tokenizer: Tokenizer, text: Mapping[str, Any], config: Config
) -> dict[str, float]:
    """Returns the perplexity, on the same text, of a unigram and a bigram model of the run's training sequences.

    Args:
        text: the position after the training sequences.

    Raises:
        StateMismatch: with this config the text gives other sequences than the run has read.
    """
    model = fit_ngrams(
        replay_training_blocks(config, tokenizer, text),
        config.model.vocab_size,
        tokenizer.eos_id,
        config.data.attend_across_documents,
    )
    return {
        "unigram_perplexity": model.unigram_perplexity([blocks]),
        "bigram_perplexity": model.bigram_perplexity([blocks]),
    }
