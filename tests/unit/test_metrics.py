"""Tests the record of a logged step: how its speed is computed."""

import pytest
import torch

from gsa_train.data.batches import mean_causal_keys, to_micro_batch
from gsa_train.metrics.record import Interval, Measured, data_totals, send_step, step_record
from gsa_train.model.flops import flops_per_token
from gsa_train.optimizer.mcore import build_optimizer
from helpers.single_rank import (
    DENSE,
    EOS,
    SPARSE,
    WARM_UP,
    random_batches,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)


def test_visible_keys_of_two_documents() -> None:
    blocks = torch.tensor([[5, 6, EOS, 7, 8, 9, 1, 1], [5, 6, 7, 8, EOS, EOS, 9, 1]], dtype=torch.int32)
    batch = to_micro_batch(blocks, EOS, attend_across_documents=False)
    expected = [[1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 4, 5, 1, 1]]
    assert batch.causal_keys().tolist() == expected
    assert mean_causal_keys([batch]) == (16 + 17) / 14
    across = to_micro_batch(blocks, EOS, attend_across_documents=True)
    assert across.causal_keys().tolist() == [[1, 2, 3, 4, 5, 6, 7]] * 2
    assert mean_causal_keys([across]) == (7 + 1) / 2
    assert mean_causal_keys([batch, across]) == (16 + 17 + 2 * 28) / 28


STANDARD = {"attention": "dense", "value_gate": False, "output_gate": False}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("phase", "gsa"), [(SPARSE, {}), (WARM_UP, {}), (DENSE, STANDARD)], ids="swd")
def test_a_step_is_counted_by_the_keys_that_its_queries_see(phase, gsa, size):
    config = tiny_config([phase], gsa=gsa, train={"micro_batch_size": size})
    model, parallel = tiny_model(config, variance_ema=0.02), single_rank()
    optimizer, batches = build_optimizer(model, phase, config), random_batches(config)
    assert take_step(model, optimizer, batches, config, lr=0.0).causal_keys is None
    result = take_step(model, optimizer, batches, config, lr=0.0, measures=True)
    interval = Interval(steps=2, tokens=3000, seconds=1.5, wait_seconds=0.0)
    measured = Measured(interval, data_totals=data_totals({}, config.data), causal_keys=result.causal_keys)
    stats, tokens = model.runtime.stats, result.loss_tokens.item()
    reduced = send_step(stats, result.loss_sum, tokens, measured, parallel)()
    record = step_record(reduced, interval, phase, config, parallel, "fp32")

    visible = record["causal_keys"]
    assert visible == pytest.approx(float(mean_causal_keys(batches)))
    assert 1 < visible < (16 + 1) / 2 - 1
    sections = (config.model, config.gsa, config.moe, phase, 16)
    flops = flops_per_token(*sections, record.get("selected_keys"), visible)
    assert record["tflops_per_second"] == pytest.approx(2000 * flops.total / 1e12)
    assert record["tflops_per_second_dense_equivalent"] == pytest.approx(2000 * flops.dense_equivalent / 1e12)
    assert flops.dense_equivalent < flops_per_token(*sections).dense_equivalent
    if phase is SPARSE:
        assert record["selected_keys"] <= visible


def test_a_validation_has_no_mean_of_visible_keys() -> None:
    stats = tiny_model(tiny_config(gsa=STANDARD, phases=[DENSE])).runtime.stats
    measured = Measured(data_totals={"a": 3}, data_checksum=5)
    reduced = send_step(stats, torch.ones(()), 2.0, measured, single_rank())()
    assert (reduced.loss, reduced.causal_keys) == (0.5, None)
    assert (reduced.data_totals, reduced.data_checksum) == ({"a": 3}, 5)
    assert len(reduced.work_seconds) == 1
