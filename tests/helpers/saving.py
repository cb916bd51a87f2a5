"""Provides fixtures for tests of checkpoints: a small trained model, and savers of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gsa_train.checkpoint import files as checkpoint_files
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import SPARSE, random_batches, single_rank, take_step, tiny_config, tiny_model

LR = 1e-2


@pytest.fixture(scope="module")
def config() -> Config:
    return tiny_config([SPARSE])


@pytest.fixture(scope="module")
def trained(config: Config) -> tuple[Model, PhaseOptimizer]:
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    for seed in range(3):
        take_step(model, optimizer, random_batches(config, seed), config, lr=LR)
    return model, optimizer


@pytest.fixture(scope="module")
def intact(
    config: Config, trained: tuple[Model, PhaseOptimizer], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a checkpoint of the trained model; do not change it."""
    return write_checkpoint(tmp_path_factory.mktemp("intact"), 3, *trained, config)


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run" / "checkpoints" / intact.name
    shutil.copytree(intact, copy)
    (copy.parent / "latest").write_text(copy.name)
    return copy


@pytest.fixture
def make_saver(tmp_path: Path) -> Iterator[Any]:
    savers = []

    def make(**fields: Any) -> CheckpointSaver:
        savers.append(CheckpointSaver(tmp_path, CheckpointConfig(**fields), single_rank()))
        return savers[-1]

    yield make
    for saver in savers:
        saver.close()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_intact(folder: Path) -> bool:
    return not checkpoint_files.faults_in(
        folder, checkpoint_files.read_manifest(folder).files, checksums=True
    )
