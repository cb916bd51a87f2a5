"""Compares results and gradients of the names that `gsa_kernels` exports: Triton against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from api_cases import (
    BATCH,
    CASES,
    DEVICE,
    EMA,
    LENGTH,
    RULE,
    Case,
    check_results,
    mask_of,
    problem,
    results,
    select,
)

import gsa_kernels
from gsa_kernels import indexer_loss, limits, operations_triton, sparse_attention, types
from gsa_kernels.key_lists.format import HostCounts
from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.types import BudgetRule, Geometry, RowSample, Selection


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_selection_attention_and_loss_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_results(case, monkeypatch)


NEIGHBOURS = {  # For each form: the query whose selection changes, and the queries whose last bits may change, too.
    "packed mask": (Case("masked", 96), 20, range(0)),
    "key lists": (Case("gathered", 96), 20, range(32)),
}


@pytest.mark.parametrize(("case", "query", "tile"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_last_bits_depend_on_the_selections_of_the_same_tile_of_a_key_list_alone(
    case: Case, query: int, tile: range
) -> None:
    """A query's sums follow the order of its tile's list, which contains the keys of earlier and later queries."""
    found = []
    for changed in (False, True):
        given = problem(case)
        if changed:
            with torch.no_grad():
                given.indexer.queries[:, query] *= -3.0
        selection = select(case, given, "triton")
        mask = mask_of(selection, given.k.shape[1])
        found.append((mask, results(case, given, selection, "triton")))
    (mask, before), (mask_after, after) = found
    assert (mask != mask_after).any(-1).any(0).nonzero().flatten().tolist() == [query]
    others = [each for each in range(LENGTH) if each != query]
    beside = [each for each in others if each in tile]
    elsewhere = [each for each in others if each not in tile]
    for name in ("lse", "out", "q", "rows"):
        old, new = (
            found[name].transpose(1, 2) if name == "lse" else found[name] for found in (before, after)
        )
        assert torch.equal(old[:, elsewhere], new[:, elsewhere]), name
        torch.testing.assert_close(old[:, beside], new[:, beside], rtol=1e-5, atol=2e-6)
    if beside:
        assert not torch.equal(before["out"][:, :query], after["out"][:, :query])


def _refused() -> dict[str, tuple[str, Callable[[], Any]]]:
    case = Case()
    given = problem(case)
    packed = select(case, given, "reference")
    ema = torch.tensor(EMA, device=DEVICE)
    q, k, v, indexer = given.q, given.k, given.v, given.indexer

    def chosen(geometry: Geometry = given.geometry, **named: Any) -> Selection:
        named = {"implementation": "reference"} | named
        return gsa_kernels.select(indexer, RULE, ema, geometry, **named)

    def attend(
        selection: Selection | None, geometry: Geometry = given.geometry, name: Any = "reference"
    ) -> Any:
        return sparse_attention(q, k, v, selection, geometry, implementation=name)

    return {
        "another implementation": (
            "implementation is 'cuda'; pass 'triton' or 'reference'",
            lambda: attend(None, name="cuda"),
        ),
        "another kernel": ("kernel is 'dense'", lambda: chosen(kernel="dense")),
        "rows of all queries": ("has 40 rows; pass 32: the queries", lambda: chosen(Geometry(query_start=8))),
        "queries beyond the keys": ("query_start is 40", lambda: chosen(Geometry(query_start=40))),
        "documents of others": (
            "document_starts has shape",
            lambda: chosen(Geometry(torch.zeros(2, 3, dtype=torch.int32, device=DEVICE))),
        ),
        "documents of one sequence alone": (
            r"document_starts has shape \(1, 40\)",
            lambda: attend(None, Geometry(torch.zeros(1, 40, dtype=torch.int32, device=DEVICE))),
        ),
        "keys of others": ("k has shape", lambda: attend(None, Geometry(query_start=8))),
        "a selection of others": (
            "selection.packed_mask has shape",
            lambda: attend(dataclasses.replace(packed, packed_mask=pack_mask(torch.ones(2, 9, 40).bool()))),
        ),
        "lists from elsewhere": (
            "selection is of 40 queries from position 16",
            lambda: attend(select(Case("gathered", 16), problem(Case("gathered", 16)), "reference")),
        ),
        "two formats": ("both None", lambda: dataclasses.replace(packed, packed_mask=None)),
        "documents as int64": (
            "document_starts has dtype torch.int64",
            lambda: Geometry(torch.zeros(2, 40).long()),
        ),
        "a sample without draw": ("draw is None", lambda: RowSample(0.5)),
        "a fraction of thirds": ("row_fraction is 0.7", lambda: RowSample(0.7)),
        "a share of none": ("share is", lambda: RowSample(share=(2, 2))),
        "a rule upside down": ("k_max is 1", lambda: BudgetRule(4, 2, 1)),
        "no temperature": (
            "inverse_temperature is 0",
            lambda: dataclasses.replace(indexer, inverse_temperature=0),
        ),
        "relu with biases": ("score_bias is given", lambda: dataclasses.replace(indexer, activation="relu")),
        "keys of another size": (
            "keys has shape",
            lambda: dataclasses.replace(indexer, keys=torch.zeros(2, 40, 8, device=DEVICE)),
        ),
    }


def test_what_does_not_fit_is_refused() -> None:
    for message, call in _refused().values():
        with pytest.raises(ValueError, match=message):
            call()


def test_auto_chooses_by_length_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    given, case = problem(Case()), Case()
    short = select(case, given, "triton")
    assert short.format == "packed_mask"
    mask = mask_of(short, LENGTH)
    named = select(Case("gathered"), given, "triton")
    assert named.format == "key_lists"
    # This counts independently: keys that any query of a tile of 32 selects, over the causal keys of its last query.
    tiles = [mask[:, start : start + 32].any(1).sum().item() for start in range(0, LENGTH, 32)]
    assert named.key_lists is not None
    assert named.key_lists.density().item() == pytest.approx(sum(tiles) / (BATCH * (32 + LENGTH)))

    monkeypatch.setattr(limits, "GATHERED_FROM_TOKENS", LENGTH)
    for budgets, wanted in ((LENGTH // RULE.k_base, "key_lists"), (LENGTH // RULE.k_base + 1, "packed_mask")):
        monkeypatch.setattr(limits, "GATHERED_BUDGETS", budgets)
        assert select(case, given, "triton").format == wanted
    assert select(Case("masked"), given, "triton").format == "packed_mask"


@pytest.mark.parametrize("limit", ["CANDIDATES_ABOVE_TOKENS", "PACKED_MASK_MAX_TOKENS"])
def test_lists_of_long_sequences_hold_the_same_selection(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, ema = problem(Case()), torch.tensor(EMA, device=DEVICE)
    how: dict[str, Any] = {"implementation": "triton", "kernel": "gathered", "with_log_sum": True}
    sources, select_keys = [], operations_triton.select_keys

    def recorded(*arguments: Any, **options: Any) -> Selection:
        sources.append(options["candidates_from"])
        return select_keys(*arguments, **options)

    monkeypatch.setattr(operations_triton, "select_keys", recorded)
    short = gsa_kernels.select(given.indexer, RULE, ema, given.geometry, **how)
    monkeypatch.setattr(limits, limit, LENGTH - 1)
    long = gsa_kernels.select(given.indexer, RULE, ema, given.geometry, **how)
    assert sources == ([None, limits.CANDIDATES_FROM] if limit == "CANDIDATES_ABOVE_TOKENS" else [None])
    assert short.log_sum is not None
    assert (long.format, long.log_sum) == ("key_lists", None)
    assert torch.equal(mask_of(long, LENGTH), mask_of(short, LENGTH))
    assert torch.equal(long.budget, short.budget)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_other_work_is_launched_once_for_each_format(
    implementation: types.Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, ema, calls = problem(Case()), torch.tensor(EMA, device=DEVICE), []
    read = HostCounts.read
    monkeypatch.setattr(HostCounts, "read", lambda counts: calls.append("wait") or read(counts))

    def chosen(kernel: limits.Kernel) -> Selection:
        how: dict[str, Any] = {"implementation": implementation, "overlap_with": lambda: calls.append(kernel)}
        return gsa_kernels.select(given.indexer, RULE, ema, given.geometry, kernel=kernel, **how)

    kernels: list[limits.Kernel] = ["masked", "gathered", "auto"]
    found = [chosen(kernel) for kernel in kernels]
    assert [each.format for each in found] == ["packed_mask", "key_lists", "packed_mask"]
    with torch.no_grad():
        sparse_attention(given.q, given.k, given.v, found[1], given.geometry, implementation=implementation)
    assert calls == ["masked", "gathered", "auto"], "attention does not wait for the lengths of the lists"
    monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", LENGTH - 1)
    chosen("auto")
    if implementation == "triton":  # the host waits, but not before it has launched the other work
        assert calls[3:5] == ["auto", "wait"]
    else:
        assert calls[3:] == ["auto"]


def test_kernels_take_no_activation_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation that only the reference has, and that `check_activation` would accept, raises an error."""
    monkeypatch.setattr(types, "check_activation", lambda *_, **__: None)
    given = problem(Case())
    selection = select(Case(), given, "triton")
    _, lse = sparse_attention(given.q, given.k, given.v, selection, given.geometry, implementation="triton")
    object.__setattr__(given.indexer, "activation", "softplus")
    ema = torch.tensor(EMA, device=DEVICE)
    for call in (
        lambda: gsa_kernels.select(given.indexer, RULE, ema, given.geometry, implementation="triton"),
        lambda: indexer_loss(
            given.indexer, given.q, given.k, lse, selection, given.geometry, implementation="triton"
        ),
    ):
        with pytest.raises(ValueError, match=r"activation is 'softplus', which the kernels do not have"):
            call()
