"""Tests source weights and best-fit packing in the training loop: batches, metrics, a resume with other weights."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gsa_data.best_fit import COUNTERS
from gsa_data.pack import FILLER
from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config
from gsa_train.data.batches import TrainBatches, to_micro_batch
from gsa_train.metrics.record import data_metrics, data_totals
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import PhaseRange
from gsa_train.trainer import run_phase
from helpers.single_rank import EOS, SPARSE, random_blocks, single_rank, tiny_config, tiny_model, token_losses
from helpers.tiny_run import tiny_run

TOKENIZER = Path(__file__).parents[2] / "data" / "sample" / "tokenizer.model"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write A and B in turn, of 2 to 40 words."""
    folder = tmp_path_factory.mktemp("text")
    for shard in range(2):
        with (folder / f"s{shard}.jsonl").open("w") as file:
            for n in range(shard * 40, shard * 40 + 40):
                text, source = f"{n} " + "word " * (n * 7 % 39 + 1), "AB"[n % 2]
                file.write(json.dumps({"text": text, "meta": {"redpajama_set_name": source}}) + "\n")
    return folder


def config_of(text: Path, weights: dict[str, float], packing: str = "best_fit") -> Config:
    data = {"train_dir": str(text), "tokenizer": str(TOKENIZER), "num_lanes": 2, "packing_pool_documents": 8}
    data |= {"source_weights": weights, "packing": packing}
    return tiny_config([SPARSE], model={"vocab_size": 4096}, data=data, logging={"every_steps": 1})


def test_filler_is_seen_by_nothing_and_predicts_nothing() -> None:
    blocks = torch.tensor([[5, 6, EOS, 7, EOS, FILLER, FILLER, FILLER]], dtype=torch.int32)
    batch = to_micro_batch(blocks, EOS, False)
    assert batch.tokens.tolist() == [[5, 6, EOS, 7, EOS, EOS, EOS]]
    assert batch.labels.tolist() == [[6, EOS, 7, EOS, EOS, EOS, EOS]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert to_micro_batch(blocks, EOS, True).loss_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0]]

    config = tiny_config()
    model = tiny_model(config, variance_ema=0.02)
    whole = random_blocks(config)[:2].clamp(min=1)
    whole[:, 8] = EOS
    filled = whole.clone()
    filled[:, 9:] = FILLER
    batches = [to_micro_batch(each, EOS, False) for each in (whole, filled)]
    losses = [token_losses(model, each)[:, :8] for each in batches]
    torch.testing.assert_close(losses[0], losses[1])
    assert batches[1].loss_mask.sum() == 2 * 8


def steps(
    config: Config, first: int, last: int, state: dict[str, Any] | None
) -> tuple[list[Any], dict[str, Any]]:
    """Run the steps first + 1 to last with a new model. Return the records and the data state."""
    phase = dataclasses.replace(SPARSE, steps=last)
    tokenizer = Tokenizer(config.data.tokenizer)
    batches = TrainBatches(config, single_rank(), tokenizer, state)
    model = tiny_model(config, variance_ema=0.02)
    optimizer = build_optimizer(model, phase, config)
    records: list[dict[str, Any]] = []
    sinks = Mock(log=records.append)
    run = tiny_run(config, model, batches=batches, tokenizer=tokenizer, sinks=sinks, step=first)
    run_phase(run, PhaseRange(0, phase, 0, last), optimizer)
    close_optimizer(model, optimizer)
    return records, batches.state()


def test_a_run_shows_its_mixture_and_goes_on_with_other_weights(text, caplog):
    only_b, mostly_a = config_of(text, {"A": 0.0, "B": 2.0}), config_of(text, {"A": 3.0, "C": 1.0})
    records, state = steps(only_b, 0, 4, None)
    assert "no document of" not in caplog.text
    for record in records:
        by_source = record["data_tokens_by_source"]
        assert list(by_source) == ["(others)", "A", "B"]
        assert by_source["A"] == by_source["(others)"] == 0
        assert by_source["B"] > record["tokens"] * (1 - record["packing_filler_share"])  # with the pools
        assert 0 <= record["packing_filler_share"] < 0.5
        assert 0 <= record["packing_cut_share"] <= 1
        assert record["packing_documents_per_block"] >= 1
        assert record["data_skipped_documents"] == 0
    assert [record["tokens"] for record in records] == [64, 128, 192, 256]
    assert state["counters"]["packed_labels"] == 256

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        later, end = steps(mostly_a, 4, 20, state)
    assert "{'A': 3.0, 'C': 1.0} from here on, {'A': 0.0, 'B': 2.0} before this checkpoint" in caplog.text
    assert "no document of C among the" in caplog.text
    assert later[0]["data_tokens_by_source"]["(others)"] >= records[-1]["data_tokens_by_source"]["B"]
    assert later[-1]["data_tokens_by_source"]["A"] > 0
    assert later[-1]["data_tokens_by_source"]["C"] == 0
    assert end["consumed_samples"] == 80
    assert end["counters"]["packed_labels"] == 1280


def test_metrics_of_a_plain_run_match_before(text: Path) -> None:
    config = config_of(text, {}, packing="concatenate")
    totals = data_totals({"tokens of A": 5, "bad_json": 2, **dict.fromkeys(COUNTERS, 1)}, config.data)
    counts = {"data_skipped_documents": 2, "data_skipped_shards": 0, "data_read_retries": 0}
    assert data_metrics(totals) == counts
