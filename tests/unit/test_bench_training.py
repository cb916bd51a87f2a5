"""Tests the bench of whole models: names of layouts, weak scaling, and ranks that fail."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, ConfigError
from helpers.checkpoints import run_state
from helpers.runs import REPOSITORY
from helpers.single_rank import single_rank
from whole_steps import training
from whole_steps.failures import Failure, RankFailed, difference
from whole_steps.layout_names import layout_list, layout_overrides
from whole_steps.results import Result, scaling
from whole_steps.variants import Sizes, Variant, plain, variants

DEMO = REPOSITORY / "configs" / "demo.yaml"


def test_a_layout_in_short() -> None:
    assert layout_list("tp=1; tp=2,sp ;") == ["tp=1", "tp=2,sp"]
    sizes = Sizes(sequences_per_device=2, seq_len_tokens=64, num_layers=2)
    config = sizes.apply(DEMO, "tp=2,sp,opt=off,recompute=full,train.grad_clip=0.5", world_size=4)
    assert (config.parallel.tensor, config.parallel.sequence, config.parallel.pipeline) == (2, True, 1)
    assert not config.parallel.distributed_optimizer
    assert (config.train.recompute, config.train.grad_clip) == ("full", 0.5)
    train = config.train
    assert (train.global_batch_size, train.seq_len_tokens, config.model.num_layers) == (8, 64, 2)
    assert not sizes.apply(DEMO, "tp=2", world_size=2).parallel.sequence
    with pytest.raises(ValueError, match="tpp=2: not part of a layout; name tp"):
        layout_overrides("tpp=2")
    with pytest.raises(ConfigError, match="world size = 2"):
        sizes.apply(DEMO, "tp=4", world_size=2)


def test_text_and_a_checkpoint_instead_of_random_tokens_and_weights(tmp_path: Path) -> None:
    data = REPOSITORY / "data" / "sample"
    overrides = (f"data.train_dir={data / 'train'}", f"data.tokenizer={data / 'tokenizer.model'}")
    sizes = Sizes(2, seq_len_tokens=32, num_layers=1, overrides=overrides, text=True)
    (trained,) = variants([DEMO], None, ["tp=1"], sizes, 1)
    parallel = single_rank()
    (first, second), again = (training.batches_of(trained, parallel) for _ in range(2))
    assert first.tokens.shape == (1, 32)
    assert torch.equal(first.tokens, again[0].tokens)
    assert not torch.equal(first.tokens, second.tokens)
    random = training.batches_of(replace(trained, text=False), parallel)
    assert not torch.equal(random[0].tokens, first.tokens)
    short = replace(trained.config.gsa, k_base=4)
    few = replace(trained, config=replace(trained.config, gsa=short))
    assert training.mean_keys(few, random) == (33 / 2, (1 + 2 + 3 + 4 * 29) / 32)
    assert training.mean_keys(replace(few, config=plain(few.config)), random) == (33 / 2, 33 / 2)
    result = Result("demo", "tp=1", 1, sequences=2, seq_len_tokens=32)
    training._measure(result, few, 0, parallel, 1, 0, 0)
    assert (result.causal_keys, result.attended_keys) == training.mean_keys(few, [first, second])

    trainee = training.build(trained, parallel)
    trainee.step([first, second])
    saver = CheckpointSaver(tmp_path, CheckpointConfig(async_save=False), parallel)
    (result,) = saver.begin(run_state(1, trained.config, parallel.layout), trainee.model, trainee.optimizer)
    saver.close()
    assert result.error is None
    checkpoints = {"demo": tmp_path / "step_00000001"}
    (loaded,) = variants([DEMO], None, ["tp=1"], sizes, 1, checkpoints)
    again, fresh = training.build(loaded, parallel), training.build(trained, parallel)
    for name, weight in trainee.model.chunks[0].state_dict().items():
        if isinstance(weight, torch.Tensor):
            assert torch.equal(weight, again.model.chunks[0].state_dict()[name]), name
    assert not torch.equal(*(next(x.model.chunks[0].parameters()) for x in (trainee, fresh)))


def row(world_size: int, speed: float | None, **other: object) -> dict[str, object]:
    same = {"model": "gsa", "layout": "tp=1", "seq_len_tokens": 10, "sequences": 8 * world_size}
    same |= {"causal_keys": 5.5}
    return {**same, "world_size": world_size, "tokens_per_second_per_device": speed, **other}


def test_weak_scaling_compares_equal_work_per_device() -> None:
    others = row(1, 1.0, model="other"), row(4, 5.0, layout="tp=2")
    (found,) = scaling([row(1, 100.0), others[0]], [row(4, 90.0), others[1]])
    assert (found["devices"], found["efficiency"], found["causal_keys"]) == ("1 -> 4", 0.9, 5.5)
    with pytest.raises(ValueError, match=r"80.0 and 40.0 tokens per device"):
        scaling([row(1, 100.0, sequences=4)], [row(4, 90.0)])
    for keys, said in {
        5.6: r"sees 5\.6 keys on 1 devices and 5\.5 on 4",
        None: "does not say how many keys",
    }.items():
        with pytest.raises(ValueError, match=said):
            scaling([row(1, 100.0, causal_keys=keys)], [row(4, 90.0)])


@pytest.mark.parametrize(
    ("collectives", "pipeline", "expected"),
    [
        ([{"world": 4, "tp 0": 7}, {"world": 4, "tp 1": 9}], 1, ""),
        ([{"world": 4, "tp": 7}, {"world": 4, "tp": 8}], 1, "all ranks failed, but at different places"),
        ([{"world": 4}, {"world": 4}], 2, "all ranks failed, but sends between pipeline stages"),
        ([{"world": 4}], 1, "1 of 2 ranks failed, and the others wait for them"),
    ],
)
def test_failed_ranks_go_on_only_where_nothing_is_half_done(collectives, pipeline, expected):
    parallel: Any = SimpleNamespace(world_size=2, pipeline_size=pipeline)
    found = {rank: Failure("out of memory", counts) for rank, counts in enumerate(collectives)}
    answer = difference(found, parallel)
    assert answer.startswith(expected)
    assert bool(answer) == bool(expected)


def measure(error: RuntimeError) -> Result:
    """Run a variant in this process whose model cannot be built."""
    config = Sizes(sequences_per_device=1, seq_len_tokens=64, num_layers=1).apply(DEMO, "tp=1", world_size=1)
    result = Result("demo", "tp=1", 1)
    with patch.object(training, "build", side_effect=error):
        training._measure(result, Variant("demo", "tp=1", config), 7, single_rank(), 1, 0, 0)
    return result


def test_errors_of_a_variant() -> None:
    found = measure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore."))
    assert found.failed == "on all ranks: out of memory: CUDA out of memory. Tried to allocate 1 GiB."
    error = RuntimeError("CUDA error: misaligned address")
    speaks = []
    for _ in range(2):  # as two ranks of one world would
        with pytest.raises(RankFailed, match=f"rank 0: RuntimeError: {error}") as raised:
            measure(error)
        assert raised.value.__cause__ is error
        speaks.append(raised.value.speaks)
    assert speaks == [True, False]
