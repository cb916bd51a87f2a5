"""Reads selections of trained models from files of `launch/export_indexer.py` for the kernels of benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import cases
import torch
from cases import IndexerInputs

from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.types import BudgetRule, Geometry, Selection

WITHOUT_HEAD_WEIGHTS: dict[str, Literal["sigmoid", "relu"]] = {"plain": "sigmoid", "qsa": "relu"}
"""Activations without head weights in the config. The kernels, and the file, have head weights of 1 for them."""


@dataclass(frozen=True)
class Indexer:
    """Holds the selections of one layer."""

    inputs: IndexerInputs
    ema: torch.Tensor
    budget: tuple[int, int, int]
    """k_base, k_min and k_max"""
    window: int = 0
    """Number of latest keys that each query always selects."""
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    key_group_size: int = 1

    def select(self) -> Selection:
        indexer = replace(self.inputs.of_kernels, activation=self.activation)
        geometry = Geometry(local_window=self.window, key_group_size=self.key_group_size)
        return select_key_lists(indexer, BudgetRule(*self.budget, self.adaptive_k), self.ema, geometry)


def read_indexers(path: Path) -> tuple[int, dict[int, Indexer]]:
    """Return the length and the indexers by layer from a file of launch/export_indexer.py.

    Raises:
        ValueError: queries share selections or keys are pooled, which only release studies-0.1 has.
    """
    content = torch.load(path, map_location=cases.DEVICE, weights_only=True)
    gsa = content["gsa"]
    for removed in ("selection_block", "indexer_pool"):
        if gsa.get(removed, 1) != 1:
            raise ValueError(f"{path}: {removed} is {gsa[removed]}; use release studies-0.1")
    indexers = {}
    for layer, x in content["layers"].items():
        own: dict[str, Any] = {
            name: None if tensor is None else tensor.to(cases.DTYPE) for name, tensor in x.items()
        }
        inputs = IndexerInputs(
            own["queries"], own["keys"], own["weight_logits"], own["score_bias"], own["weight_bias"]
        )
        indexers[layer] = Indexer(
            inputs,
            x["variance_ema"].float(),
            (gsa["k_base"], gsa["k_min"], gsa["k_max"]),
            gsa["local_window"],
            WITHOUT_HEAD_WEIGHTS.get(gsa["indexer_activation"], gsa["indexer_activation"]),
            gsa["adaptive_k"],
            gsa.get("key_group_size", 1),
        )
    return content["seq_len_tokens"], indexers


def read_all(paths: Sequence[Path]) -> dict[int, dict[int, Indexer]]:
    """Map each length to its indexers by layer, from several files.

    Raises:
        ValueError: two files have the same length.
    """
    found = dict(map(read_indexers, paths))
    if len(found) < len(paths):
        raise ValueError("--selection: two files are of one length; pass one for each length")
    return found


def union_ratio(selection: Selection, indexer: Indexer) -> float:
    """Return r: the keys that any query of a tile selects, divided by the keys that one query selects."""
    assert selection.key_lists is not None
    mean_k = selection.budget.float().mean().item()
    return selection.key_lists.counts.float().mean().item() / (mean_k + indexer.window)
