"""Tests which model fields a resume must keep from its checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from gsa_train.config import Config, MoEConfig, RopeScalingConfig, config_to_yaml
from gsa_train.run_folder.resume import ResumeError, _check_same_model
from helpers.single_rank import CONFIG

CHECKPOINT = Path("runs/x/checkpoints/step_00000003")


def resume(config: Config, saved_yaml: str) -> None:
    _check_same_model(config, Mock(config_yaml=saved_yaml), CHECKPOINT)


def with_gsa(**changes: Any) -> Config:
    return dataclasses.replace(CONFIG, gsa=dataclasses.replace(CONFIG.gsa, **changes))


def test_another_meaning_of_the_weights_is_refused() -> None:
    with pytest.raises(ResumeError, match=r"gsa\.indexer_pool = 16: the checkpoint has 1"):
        resume(with_gsa(indexer_pool=16), config_to_yaml(CONFIG))
    bigger = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, num_layers=4))
    with pytest.raises(ResumeError, match=r"model\.num_layers = 4: the checkpoint has 2"):
        resume(bigger, config_to_yaml(CONFIG))


def test_another_scaling_of_the_rotary_embedding_is_refused() -> None:
    model = dataclasses.replace(CONFIG.model, rope_scaling=RopeScalingConfig("yarn", 4.0, 64))
    scaled = dataclasses.replace(CONFIG, model=model)
    resume(scaled, config_to_yaml(scaled))
    with pytest.raises(ResumeError, match=r"model\.rope_scaling = \{'rope_type': 'yarn', 'factor': 4\.0"):
        resume(scaled, config_to_yaml(CONFIG))


def test_who_computes_may_change() -> None:
    changed = with_gsa(
        attention_impl="reference",
        attention_kernel="gathered",
        dense_attention="cudnn",
        indexer_loss_row_fraction=0.5,
    )
    resume(changed, config_to_yaml(CONFIG))


def test_a_field_younger_than_the_checkpoint_stood_at_its_default() -> None:
    saved = yaml.safe_load(config_to_yaml(CONFIG))
    for field in ("attention_kernel", "local_window"):
        del saved["gsa"][field]
    del saved["model"]["rope_scaling"]
    resume(CONFIG, yaml.safe_dump(saved))
    with pytest.raises(ResumeError, match=r"gsa\.local_window = 3: the checkpoint has 0"):
        resume(with_gsa(local_window=3), yaml.safe_dump(saved))


def test_a_removed_field_of_a_checkpoint_stood_at_its_default() -> None:
    saved = yaml.safe_load(config_to_yaml(CONFIG))
    saved["gsa"] |= {"reuse_teacher": "leader", "selection_query": "first", "selection_block": 1}
    resume(CONFIG, yaml.safe_dump(saved))
    saved["gsa"]["selection_block"] = 32
    with pytest.raises(ResumeError, match=r"gsa\.selection_block = 32 .*: removed after release studies"):
        resume(CONFIG, yaml.safe_dump(saved))


def test_experts_of_another_meaning_are_refused_and_who_computes_them_may_change() -> None:
    experts = dataclasses.replace(CONFIG, moe=MoEConfig(experts=8))
    saved = config_to_yaml(experts)
    other = MoEConfig(experts=8, experts_impl="sequential", balance_coeff=0.1, z_loss_coeff=0.0)
    resume(dataclasses.replace(CONFIG, moe=other), saved)
    for changed in ({"top_k": 4}, {"routed_scale": 2.0}, {"balancing": "none"}, {"experts": 0}):
        ((name, value),) = changed.items()
        config = dataclasses.replace(CONFIG, moe=dataclasses.replace(experts.moe, **changed))
        with pytest.raises(ResumeError, match=rf"moe\.{name} = {value}: the checkpoint has"):
            resume(config, saved)


def test_a_checkpoint_from_before_there_were_experts_has_none() -> None:
    saved = yaml.safe_load(config_to_yaml(CONFIG))
    del saved["moe"]
    resume(CONFIG, yaml.safe_dump(saved))
    with pytest.raises(ResumeError, match=r"moe\.experts = 8: the checkpoint has 0"):
        resume(dataclasses.replace(CONFIG, moe=MoEConfig(experts=8)), yaml.safe_dump(saved))
