"""The bench of whole models: names of layouts, weak scaling, and whether ranks that failed may go on together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gsa_train.bench.failures import Failure, difference
from gsa_train.bench.layout_names import layout_list, layout_overrides
from gsa_train.bench.training import Sizes, plain, scaling
from gsa_train.config import ConfigError
from gsa_train.model.flops import count_parameters, flops_per_token
from helpers.runs import REPOSITORY

DEMO = REPOSITORY / "configs" / "demo.yaml"


def test_a_layout_in_short() -> None:
    assert layout_list("tp=1; tp=2,sp ;") == ["tp=1", "tp=2,sp"]
    sizes = Sizes(sequences_per_device=2, seq_len_tokens=64, num_layers=2)
    config = sizes.apply(DEMO, "tp=2,sp,opt=off,recompute=full,train.grad_clip=0.5", world_size=4)
    assert (config.parallel.tensor, config.parallel.sequence, config.parallel.pipeline) == (2, True, 1)
    assert not config.parallel.distributed_optimizer
    assert (config.train.recompute, config.train.grad_clip) == ("full", 0.5)
    assert (config.train.global_batch_size, config.train.seq_len_tokens, config.model.num_layers) == (
        8,
        64,
        2,
    )
    assert not sizes.apply(DEMO, "tp=2", world_size=2).parallel.sequence
    with pytest.raises(ValueError, match="tpp=2: not part of a layout; name tp"):
        layout_overrides("tpp=2")
    with pytest.raises(ConfigError, match="world size = 2"):
        sizes.apply(DEMO, "tp=4", world_size=2)


def test_megatrons_model_is_counted_as_what_it_is() -> None:
    """Also with the sizes of a GSA config."""
    sizes = Sizes(sequences_per_device=2, seq_len_tokens=64, num_layers=2)
    config = plain(sizes.apply(DEMO, "tp=1", world_size=1))
    count = count_parameters(config.model, config.gsa)
    assert (count.gates, count.indexer) == (0, 0)
    (phase,) = config.phases
    flops = flops_per_token(config.model, config.gsa, phase, 64)
    assert flops.total == flops.dense_equivalent


def row(world_size: int, speed: float | None, **other: object) -> dict[str, object]:
    same = {"model": "gsa", "layout": "tp=1", "seq_len_tokens": 10, "sequences": 8 * world_size}
    return {**same, "world_size": world_size, "tokens_per_second_per_device": speed, **other}


def test_weak_scaling_compares_equal_work_per_device() -> None:
    (found,) = scaling(
        [row(1, 100.0), row(1, 1.0, model="other")], [row(4, 90.0), row(4, 5.0, layout="tp=2")]
    )
    assert (found["devices"], found["efficiency"]) == ("1 -> 4", 0.9)
    with pytest.raises(ValueError, match=r"80.0 and 40.0 tokens per device"):
        scaling([row(1, 100.0, sequences=4)], [row(4, 90.0)])
    with pytest.raises(ValueError, match="no model and layout in common"):
        scaling([row(1, None)], [row(4, 90.0)])


@pytest.mark.parametrize(
    ("collectives", "pipeline", "expected"),
    [
        ([{"world": 4, "tp 0": 7}, {"world": 4, "tp 1": 9}], 1, ""),
        ([{"world": 4, "tp": 7}, {"world": 4, "tp": 8}], 1, "all ranks failed, but at different places"),
        ([{"world": 4}, {"world": 4}], 2, "all ranks failed, but sends between pipeline stages"),
        ([{"world": 4}], 1, "1 of 2 ranks failed, and the others wait for them"),
    ],
)
def test_failed_ranks_go_on_only_where_nothing_is_half_done(
    collectives: list[dict[str, int]], pipeline: int, expected: str
) -> None:
    parallel: Any = SimpleNamespace(world_size=2, pipeline_size=pipeline)
    found = {rank: Failure("out of memory", counts) for rank, counts in enumerate(collectives)}
    answer = difference(found, parallel)
    assert answer.startswith(expected)
    assert bool(answer) == bool(expected)
