"""Tests errors of incomplete additions to tables and of unknown names; test_recipes.py makes the additions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gsa_train.losses import OBJECTIVES
from gsa_train.model import gates
from gsa_train.model.mcore.config import to_mcore_config
from gsa_train.model.mcore.linears import LINEAR_LAYERS
from gsa_train.optimizer.build import OPTIMIZERS
from gsa_train.planning.choices import unknown_choices
from gsa_train.schedule import SCHEDULES
from helpers.single_rank import SPARSE, single_rank, tiny_config


def test_a_gate_that_the_layer_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gates.gate_rows
    monkeypatch.setattr(gates, "ON_HEADS", (*gates.ON_HEADS, "sixth"))
    monkeypatch.setattr(gates, "gate_rows", lambda *sizes: rows(*sizes) | {"sixth": 2})
    config = to_mcore_config(tiny_config(), single_rank())
    with pytest.raises(ValueError, match=r"gates \['sixth'\] have rows and no field; add it to GateLogits"):
        gates.split_gate_logits(torch.zeros(1, gates.head_gate_rows(config)), config)


def test_a_name_that_no_table_has_is_a_line_that_lists_the_names() -> None:
    tables = {"linear_layers": LINEAR_LAYERS, "objective": OBJECTIVES, "optimizer": OPTIMIZERS}
    phase = dataclasses.replace(SPARSE, decay="absent")
    config = tiny_config([phase], train=dict.fromkeys(tables, "absent"))
    fields = {f"train.{field}": table for field, table in tables.items()} | {"phases.0.decay": SCHEDULES}
    assert unknown_choices(config) == [
        f"{field} = absent: no such name; give one of {', '.join(table)}" for field, table in fields.items()
    ]
