"""Tests the bench of whole models: names of layouts, weak scaling, and ranks that fail."""

import pytest

from gsa_train.config import ConfigError
from helpers.runs import REPOSITORY
from whole_steps.layout_names import layout_list, layout_overrides
from whole_steps.variants import Sizes

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
