"""Tests which model fields a resume must keep from its checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from gsa_train.config import Config, RopeScalingConfig, config_to_yaml
from gsa_train.phases import phase_ranges
from gsa_train.run_folder.resume import ResumeError, _check_same_model, _check_same_phases
from helpers.checkpoints import run_state
from helpers.single_rank import CONFIG, tiny_config

CHECKPOINT = Path("runs/x/checkpoints/step_00000003")


def resume(config: Config, saved_yaml: str) -> None:
    _check_same_model(config, Mock(config_yaml=saved_yaml), CHECKPOINT)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    parts = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **parts)


EXPERTS = changed(CONFIG, moe={"experts": 8})
YARN = {"rope_scaling": RopeScalingConfig("yarn", 4.0, 64)}


@pytest.mark.parametrize(
    ("saved", "changes", "said"),
    [
        (CONFIG, {"gsa": {"local_window": 3}}, r"gsa\.local_window = 3 here, 0 in"),
        (CONFIG, {"model": {"num_layers": 4}}, r"model\.num_layers = 4 here, 2 in the checkpoint"),
        (CONFIG, {"model": YARN}, r"model\.rope_scaling = \{'rope_type': 'yarn', 'factor': 4\.0"),
        (EXPERTS, {"moe": {"experts": 0}}, r"moe\.experts = 0 here, .* in the checkpoint"),
    ],
)
def test_another_meaning_of_the_weights_is_refused(saved: Config, changes: dict[str, Any], said: str) -> None:
    other = changed(saved, **changes)
    resume(other, config_to_yaml(other))
    with pytest.raises(ResumeError, match=said):
        resume(other, config_to_yaml(saved))


def test_who_computes_and_what_is_trained_may_change() -> None:
    gsa = {"attention_impl": "reference", "attention_kernel": "gathered", "dense_attention": "cudnn"}
    moe = {"experts_impl": "sequential", "balance_coeff": 0.1, "z_loss_coeff": 0.0}
    resume(changed(EXPERTS, gsa={**gsa, "indexer_loss_row_fraction": 0.5}, moe=moe), config_to_yaml(EXPERTS))


def test_a_field_that_the_checkpoint_does_not_have_stood_at_its_default() -> None:
    saved = yaml.safe_load(config_to_yaml(CONFIG))
    for field in ("attention_kernel", "local_window"):
        del saved["gsa"][field]
    del saved["model"]["rope_scaling"], saved["moe"]
    resume(CONFIG, yaml.safe_dump(saved))
    for other, said in (
        (changed(CONFIG, gsa={"local_window": 3}), "gsa.local_window = 3"),
        (EXPERTS, "moe.experts = 8"),
    ):
        with pytest.raises(ResumeError, match=f"{said} here, 0 in the checkpoint"):
            resume(other, yaml.safe_dump(saved))


def test_a_removed_field_of_a_checkpoint_stood_at_its_default() -> None:
    saved = yaml.safe_load(config_to_yaml(CONFIG))
    saved["gsa"] |= {
        "reuse_teacher": "leader",
        "selection_query": "first",
        "selection_block": 1,
        "key_group_size": 1,
    }
    resume(CONFIG, yaml.safe_dump(saved))
    saved["gsa"] |= {"selection_block": 32, "key_group_size": 16}
    for said in (r"gsa\.selection_block = 32", r"gsa\.key_group_size = 16"):
        with pytest.raises(ResumeError, match=f"{said} .*: removed; release studies"):
            resume(CONFIG, yaml.safe_dump(saved))


def test_the_state_of_another_optimizer_is_refused() -> None:
    muon, adamw = (tiny_config(train={"optimizer": name}) for name in ("muon", "adamw"))
    said = r"holds the state of train.optimizer = muon; the config has adamw\."
    ranges = phase_ranges(muon.phases)
    for step in (2, ranges[-1].end):  # a start at the end of the run also loads the optimizer's state
        with pytest.raises(ResumeError, match=said):
            _check_same_phases(adamw.train, run_state(step, muon), ranges, CHECKPOINT)
