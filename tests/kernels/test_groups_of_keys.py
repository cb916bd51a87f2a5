"""Compares Triton's results and gradients with the reference for groups of keys that are selected together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from api_cases import BATCH, DEVICE, Case, check_results, mask_of, problem, select

from gsa_kernels import api, limits
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample

HEADS = (4, 2, 32)
RULE = BudgetRule(k_base=16, k_min=9, k_max=22)


def groups(size: int, keys: int = 64, query_start: int = 0, rule: BudgetRule = RULE, **options: Any) -> Case:
    """Return a case of groups of `size`; the keys from `query_start` on have queries."""
    options = {"group": size, "queries": keys - query_start, "rule": rule, "heads": HEADS} | options
    return Case(query_start=query_start, **options)


DOCUMENTS = ((0, 7, 9, 30, 45), (0, 33))
CASES = {
    "pairs, packed mask": groups(2),
    "fours, key lists": groups(4, kernel="gathered"),
    "fours, the printed rule": groups(4, 68, rule=BudgetRule(16, 8, 24, "direct")),
    "eights, fixed budget, short last group": groups(8, 99, rule=BudgetRule(24, 8, 64, "off")),
    "whole words": groups(32, 160, rule=BudgetRule(64, 64, 64)),
    "groups of two words, short last": groups(64, 350, rule=BudgetRule(128, 64, 128), local_window=70),
    "groups of two words, documents": groups(
        64, 390, rule=BudgetRule(128, 64, 128), documents=((0, 100), (0, 150, 161))
    ),
    "groups of two words, documents, key lists": groups(
        64, 390, rule=BudgetRule(128, 64, 128), documents=((0, 100), (0, 150, 161)), kernel="gathered"
    ),
    "all causal keys": groups(4, dense=True),
    "all causal keys, documents, short last group": groups(4, 67, dense=True, documents=DOCUMENTS),
    "documents, window": groups(4, 75, documents=DOCUMENTS, local_window=6),
    "documents, window, key lists": groups(
        4, 75, documents=DOCUMENTS, local_window=6, kernel="gathered", activation="relu"
    ),
    "short last group, key lists": groups(8, 67, rule=BudgetRule(16, 8, 24), kernel="gathered"),
    "later queries": groups(4, 84, query_start=36, documents=DOCUMENTS, local_window=3),
    "later queries, key lists": groups(4, 84, query_start=36, local_window=9, kernel="gathered"),
    "later queries, all causal keys": groups(4, 84, query_start=4, dense=True),
    "a share of the rows": groups(2, 136, rows=RowSample(share=(1, 2))),
    "a share of the tiles": groups(2, 136, rows=RowSample(share=(1, 2)), kernel="gathered"),
    "half of the rows of all keys": groups(2, 135, rows=RowSample(0.5, draw=3), dense=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_selection_attention_and_loss_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_results(case, monkeypatch)


def test_long_rows_are_selected_as_key_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the packed mask."""
    case = groups(4, 321, rule=BudgetRule(16, 8, 32), documents=((0,), (0, 6, 157, 161, 300)))
    given = problem(case)
    wanted = mask_of(select(case, given, "reference"), 321)
    monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", 256)
    monkeypatch.setattr(limits, "CANDIDATES_FROM", 64)
    chosen = select(case, given, "triton")
    assert chosen.format == "key_lists"
    assert torch.equal(mask_of(chosen, 321), wanted)


def test_other_sizes_are_refused() -> None:
    shapes = ((BATCH, 48, 2, 16), (BATCH, 48, 16), (BATCH, 48, 2))
    indexer = Indexer(*(torch.zeros(shape, device=DEVICE) for shape in shapes))
    ema = torch.zeros((), device=DEVICE)
    arguments = (indexer, BudgetRule(12, 3, 12), ema, Geometry(key_group_size=3))
    with pytest.raises(ValueError, match=r"key_group_size 3; pass one of .*implementation='reference'"):
        api.select(*arguments, implementation="triton")
