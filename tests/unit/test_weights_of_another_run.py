"""`checkpoint.initial_weights`: what a new run takes over from another one's checkpoint, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_train.checkpoint.initial_weights import load_initial_weights
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config
from gsa_train.model.build import Model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.resume import ResumeError
from helpers.checkpoints import run_state
from helpers.single_rank import (
    DENSE,
    SPARSE,
    named_weights,
    random_batches,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)

TOKENIZER = cast(Tokenizer, SimpleNamespace(fingerprint="pieces"))
DENSE_MODEL: dict[str, Any] = {"attention": "dense", "value_gate": False, "output_gate": False}

Trained = Callable[[Config], tuple[Path, Model]]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Folder of a run that took one step, and its model."""

    def train(config: Config) -> tuple[Path, Model]:
        model = tiny_model(config)
        optimizer = build_optimizer(model, config.phases[0], config)
        take_step(model, optimizer, random_batches(config), config, lr=1e-2)
        saver = CheckpointSaver(tmp_path / "checkpoints", CheckpointConfig(async_save=False), single_rank())
        state = dataclasses.replace(run_state(1, config), data={"tokenizer_fingerprint": "pieces"})
        (result,) = saver.begin(state, model, optimizer)
        assert result.error is None, result.error
        saver.close()
        close_optimizer(model, optimizer)
        return tmp_path, model

    return train


def start(folder: Path, config: Config, tokenizer: Tokenizer = TOKENIZER) -> Model:
    checkpoint = dataclasses.replace(config.checkpoint, initial_weights=str(folder))
    config = dataclasses.replace(config, checkpoint=checkpoint)
    model = tiny_model(config)
    load_initial_weights(config, model, tokenizer, single_rank())
    return model


def test_another_length_base_and_budget(trained: Trained) -> None:
    folder, model = trained(tiny_config([SPARSE]))
    longer = tiny_config(
        [DENSE, SPARSE],
        model={"rope_base": 5e5},
        gsa={"k_base": 8, "k_max": 16, "local_window": 2, "selection_block": 2},
        train={"seq_len_tokens": 32},
    )
    loaded = start(folder, longer)
    for name, weight in named_weights(model).items():
        assert torch.equal(named_weights(loaded)[name], weight), name
    for mine, other in zip(model.attentions, loaded.attentions, strict=True):
        assert mine.variance is not None
        assert other.variance is not None
        assert torch.equal(mine.variance.ema, other.variance.ema)


def test_a_dense_model_gets_gates_and_an_indexer(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    folder, dense = trained(tiny_config([DENSE], gsa=DENSE_MODEL))
    caplog.set_level("INFO", logger="gsa_train")
    config = tiny_config([SPARSE])
    fresh, loaded = named_weights(tiny_model(config)), named_weights(start(folder, config))
    old = named_weights(dense)
    assert 0 < len(old) < len(loaded)
    for name, weight in loaded.items():
        assert torch.equal(weight, old.get(name, fresh[name])), name
    assert any(not torch.equal(loaded[name], fresh[name]) for name in old)
    new = len(loaded) - len(old) + config.model.num_layers  # and the moving averages
    assert f"{new} weights are new" in caplog.text
    assert "the run begins at step 0" in caplog.text


def test_what_does_not_fit(trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained(tiny_config([SPARSE]))
    for config, message in (
        (tiny_config(model={"ffn_hidden_size": 32}), r"linear_fc1\.weight: \(64, 16\) here, \(48, 16\) in"),
        (tiny_config(model={"num_layers": 3}), r"layers\.2\.\S+: not in the checkpoint"),
        (tiny_config(model={"num_layers": 1}), r"layers\.1\.\S+: only in the checkpoint"),
        (tiny_config([DENSE], gsa=DENSE_MODEL), r"linear_gate\.\S+: only in the checkpoint"),
        (
            tiny_config(model={"num_heads": 8, "head_dim": 2, "num_kv_heads": 4}),
            r"model\.num_heads = 8 here, 4 in",
        ),
        (tiny_config(gsa={"indexer_activation": "relu"}), "indexer_activation = relu here, sigmoid in"),
    ):
        with pytest.raises(ResumeError, match=message):
            start(folder, config)
    with pytest.raises(ResumeError, match="another tokenizer"):
        start(folder, tiny_config(), cast(Tokenizer, SimpleNamespace(fingerprint="other pieces")))
    with pytest.raises(ResumeError, match="no complete checkpoint there"):
        start(tmp_path / "nowhere", tiny_config())
    damaged = next((folder / "checkpoints").glob("step_*/*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ResumeError, match="is damaged"):
        start(folder, tiny_config())
