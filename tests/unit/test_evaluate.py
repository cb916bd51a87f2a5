"""Tests several validation sets: each has its own perplexity on any replicas, and training does not change."""

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsa_data.validation import ScoredText, ValidationSet, is_scored
from gsa_train.config import ParallelConfig, PhaseConfig
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.model.mcore.build import Model
from gsa_train.phases import enter_phase
from gsa_train.step import evaluation_step
from gsa_train.validation.perplexity import _deal, describe, evaluate, perplexity, scores_of
from helpers.single_rank import (
    EOS,
    SPARSE,
    WARM_UP,
    random_blocks,
    single_rank,
    tiny_config,
    tiny_model,
    token_losses,
    with_sections,
)
from helpers.text_runs import SAMPLE, assert_trained_alike, left_by, of_event, text_config, train_on_text

CONFIG = tiny_config()
LENGTH = CONFIG.train.seq_len_tokens


def text_of(num_sequences: int, seed: int, last_length: int = LENGTH) -> ScoredText:
    """Draw sequences, the last one padded after `last_length` labels, with two bytes per token."""
    config = tiny_config(train={"global_batch_size": num_sequences, "micro_batch_size": 1})
    blocks = random_blocks(config, seed).numpy()
    lengths = np.full(num_sequences, LENGTH)
    lengths[-1] = last_length
    scored = int(is_scored(blocks, lengths, EOS, False).sum())
    return ScoredText(blocks, lengths, scored, 2 * scored)


def mean_loss(model: Model, text: ScoredText) -> float:
    """Compute the loss by one forward pass over all sequences."""
    batch = to_micro_batch(torch.from_numpy(text.blocks), EOS, False)
    scored = torch.from_numpy(is_scored(text.blocks, text.lengths, EOS, False))
    with torch.no_grad():
        losses = token_losses(model, batch, evaluating=True)[scored]
    assert len(losses) == text.scored_tokens
    return losses.double().mean().item()


@cache
def ready_model() -> Model:
    model = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(model, SPARSE)
    return model


def test_each_set_and_source_has_the_scores_of_its_own_text() -> None:
    wiki, code = text_of(5, seed=1), text_of(3, seed=2, last_length=4)
    parts = {"Python": text_of(1, seed=3, last_length=7), "C, or C++": text_of(2, seed=4)}
    sets = [ValidationSet("wiki", wiki, {}), ValidationSet("code", code, parts)]
    model = ready_model()
    record = evaluate(model, sets, EOS, CONFIG, single_rank())
    assert record["validation_set"] == "wiki"
    tokens = [text.scored_tokens for text in (code, *parts.values())]
    expected = "validation set code: 3 sequences, {} scored tokens (Python {}, C, or C++ {})"
    assert describe(sets[1]) == expected.format(*tokens)
    assert record["validation_loss"] == pytest.approx(mean_loss(model, wiki), rel=1e-5)
    assert record["validation_perplexity"] == math.exp(record["validation_loss"])
    assert record["validation_bits_per_byte"] == pytest.approx(record["validation_loss"] / math.log(2) / 2)
    assert 0 < record["validation_recall"] <= 1
    assert record["validation_code_loss"] == pytest.approx(mean_loss(model, code), rel=1e-5)
    for source, text in parts.items():
        loss = record["validation_code_loss_by_source"][source]
        assert loss == pytest.approx(mean_loss(model, text), rel=1e-5)
        assert record["validation_code_perplexity_by_source"][source] == math.exp(loss)
        assert record["validation_code_bits_per_byte_by_source"][source] == pytest.approx(loss / math.log(4))
    assert len({record["validation_loss"], record["validation_code_loss"]}) == 2
    scores = {score: record[f"validation_{score}"] for score in ("loss", "perplexity", "bits_per_byte")}
    names = {name for score in scores for name in (score, f"code_{score}", f"code_{score}_by_source")}
    assert set(scores_of(record)) == {f"validation_{name}" for name in names}
    alone = evaluate(model, [dataclasses.replace(sets[0], name="alone")], EOS, CONFIG, single_rank())
    assert scores_of(alone) == {f"validation_{score}": value for score, value in scores.items()}


def test_text_without_bytes_has_no_bits_per_byte() -> None:
    text = dataclasses.replace(text_of(2, seed=1), text_bytes=0)
    record = evaluate(ready_model(), [ValidationSet("x", text, {})], EOS, CONFIG, single_rank())
    assert record["validation_bits_per_byte"] is None


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_any_number_of_replicas_scores_the_same_tokens(replicas: int) -> None:
    text = text_of(5, seed=5, last_length=3)
    ranks = [dataclasses.replace(single_rank(), data_rank=r, data_size=replicas) for r in range(replicas)]
    dealt = [_deal(text, EOS, CONFIG, rank) for rank in ranks]
    assert len({len(batches) for batches in dealt}) == 1  # the schedule is collective
    sequences = torch.cat([batch.tokens for batches in dealt for batch in batches])
    times = torch.unique(sequences, dim=0, return_counts=True)[1]
    assert (len(times), int(times.max() - times.min()) <= 1) == (5, True)  # in the statistics of attention
    results = [evaluation_step(ready_model(), batches, CONFIG, single_rank()) for batches in dealt]
    assert sum(int(tokens) for _, tokens in results) == text.scored_tokens
    loss = sum(loss_sum.item() for loss_sum, _ in results) / text.scored_tokens
    assert loss == pytest.approx(mean_loss(ready_model(), text), rel=1e-5)


def test_interleaved_stages_get_whole_groups_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes a multiple of three micro-batches for three stages."""
    parts: list[int] = []

    def count(model: object, part: list[MicroBatch], *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        parts.append(len(part))
        return torch.zeros(()), torch.zeros(())

    monkeypatch.setattr("gsa_train.validation.perplexity.evaluation_step", count)
    train = dataclasses.replace(CONFIG.train, micro_batch_size=1)
    interleaved = ParallelConfig(pipeline=3, virtual_pipeline=2)
    config = dataclasses.replace(CONFIG, parallel=interleaved, train=train)
    stages = dataclasses.replace(single_rank(), pipeline_size=3)
    evaluate(ready_model(), [ValidationSet("x", text_of(40, seed=1), {})], EOS, config, stages)
    assert sum(parts) == 42
    assert len(parts) == 2
    assert all(part % 3 == 0 for part in parts)


# ---- a run that evaluates, and the same run that does not


def trained(folder: Path, phase: PhaseConfig, every_steps: int) -> dict[str, Any]:
    sets = {"first": str(SAMPLE / "validation"), "second": str(SAMPLE / "train")}
    config = text_config(
        [phase],
        gsa={"indexer_loss_row_fraction": 0.5},
        train={"grad_clip": 1.0},
        evaluate={"every_steps": every_steps, "max_blocks": 3, "split_by_source": True},
    )
    config = with_sections(config, {"data": {"validation_dir": "", "validation_sets": sets}})
    records, run, _ = train_on_text(config, folder)
    return left_by(run, records)


@pytest.mark.parametrize("phase", [WARM_UP, SPARSE], ids=lambda phase: phase.name)
def test_training_is_the_same_to_the_last_bit_with_and_without_evaluation(
    phase: PhaseConfig, tmp_path: Path
) -> None:
    phase = dataclasses.replace(phase, steps=5)
    without, evaluated = trained(tmp_path, phase, 0), trained(tmp_path, phase, 2)
    validations = of_event(evaluated, "validation")
    assert [record["step"] for record in validations] == [2, 4]
    losses = [record["validation_second_loss"] for record in validations]
    if phase.train == "indexer":  # the base does not change, so the same text has the same loss
        assert losses[0] == losses[1]
    else:
        assert losses[0] != losses[1]
    assert "validation_second_loss_by_source" in validations[0]
    assert len(without["records"]) == 5
    assert_trained_alike(evaluated, without, but="validation")


def test_perplexities_that_no_float_holds() -> None:
    assert (perplexity(0.0), perplexity(1000.0), perplexity(math.inf)) == (1.0, math.inf, math.inf)
    assert math.isnan(perplexity(math.nan))
