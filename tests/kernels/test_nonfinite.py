"""Tests NaN and infinities in the indexer's inputs, on a CUDA device or in the patched interpreter.

A row is a query. If a row's inputs include a NaN, its variance and KL are NaN, and the row selects `k_base` causal
keys. All other rows keep the bits of their results. With key lists, however, rounding may change their KL, because the
rows of a tile share a list.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import api_cases
from api_cases import DOCUMENTS, Case, Problem, mask_of, problem
from covering import covered
from decode_cases import RULE as DECODE_RULE
from decode_cases import make_case as make_decode_case
from selection_cases import RULE as LONG_RULE
from selection_cases import Case as LongCase
from selection_cases import make_case
from test_triton_candidates import guessed, short_rows  # noqa: F401 - pytest finds them here

from gsa_kernels import api
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.selection import op
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.types import Geometry, Indexer

BAD = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
PLACES = ("queries", "keys", "head_weight_logits")
CASES = {
    "packed mask": Case("masked", documents=DOCUMENTS, local_window=3),
    "packed mask, relu": Case("masked", 16, activation="relu"),
    "key lists": Case("gathered"),
    "key lists, relu": Case("gathered", 16, documents=DOCUMENTS, activation="relu"),
}
POSITION = 21
"""Position of the bad token in the first sequence."""


def spoil(indexer: Indexer, place: str, value: float, row: int) -> Indexer:
    """Set one token's vector in one of the tensors, in the first sequence."""
    tensor = getattr(indexer, place).detach().clone()
    tensor[0, row, ..., 0] = value
    return dataclasses.replace(indexer, **{place: tensor.requires_grad_()})


def spoiled(case: Case, place: str, value: float) -> Problem:
    given = problem(case)
    return dataclasses.replace(given, indexer=spoil(given.indexer, place, value, POSITION))


@cache
def undamaged(name: str) -> tuple[Problem, Any, Any, torch.Tensor]:
    """Return a case's unchanged inputs, their selection by Triton and by the reference, and the KL of the rows."""
    case = CASES[name]
    given = problem(case)
    selection = api_cases.select(case, given, "triton")
    return given, selection, api_cases.select(case, given, "reference"), loss(given, selection)[1]


@covered("options", case=list(CASES), value=list(BAD), place=list(PLACES))
def test_selection_and_loss(device: str, options: dict[str, Any]) -> None:
    case, value, place = CASES[options["case"]], BAD[options["value"]], options["place"]
    bad = spoiled(case, place, value)
    clean, before, wanted_before, old_kl = undamaged(options["case"])
    after, wanted = (
        api_cases.select(case, bad, implementation) for implementation in ("triton", "reference")
    )
    seen = ~(wanted.variance == wanted_before.variance)  # NaN counts as changed
    assert 0 < seen.sum() < seen.numel()
    if math.isnan(value):
        assert wanted.variance[seen].isnan().all()
    assert torch.equal(after.variance.isnan(), wanted.variance.isnan())
    assert torch.equal(after.budget[wanted.variance.isnan()], wanted.budget[wanted.variance.isnan()])
    for name in ("variance", "budget"):
        assert torch.equal(getattr(after, name)[~seen], getattr(before, name)[~seen]), name

    num_keys = clean.k.shape[1]
    masks, old_masks = mask_of(after, num_keys), mask_of(before, num_keys)
    assert torch.equal(masks[~seen], old_masks[~seen])
    check_valid(clean.geometry, masks, after.budget)

    kl = loss(bad, after)[1]
    if (
        "key lists" in options["case"]
    ):  # A neighbour's selection changes its tile's list, and so the order of sums.
        torch.testing.assert_close(kl[~seen], old_kl[~seen], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(kl[~seen], old_kl[~seen])
    if math.isnan(value):
        assert torch.equal(kl.isnan(), loss(bad, after, "reference")[1].isnan())
    if math.isnan(value) and place != "keys":
        assert kl[seen].isnan().all()


def check_valid(geometry: Geometry, masks: torch.Tensor, budget: torch.Tensor) -> None:
    """Check that all selected keys are causal. At most `budget` of them may be outside the window. The selection and
    the window together must have at least `budget` keys."""
    num_keys = masks.shape[-1]
    positions = geometry.query_start + torch.arange(masks.shape[1], device=masks.device)
    keys = torch.arange(num_keys, device=masks.device)
    visible = (keys <= positions[:, None]).expand_as(masks)
    if geometry.document_starts is not None:
        visible = visible & (keys >= geometry.document_starts[..., None])
    assert not (masks & ~visible).any()
    near = visible & (keys > positions[:, None] - geometry.local_window)
    assert ((masks & ~near).sum(-1) <= budget).all()
    assert ((masks | near).sum(-1) >= budget).all()


def loss(given: Problem, selection: Any, implementation: api.Implementation = "triton") -> Any:
    q, k, geometry = given.q, given.k, given.geometry
    lse = api.sparse_attention(q, k, given.v, selection, geometry, implementation="reference")[1]
    return api.indexer_loss(given.indexer, q, k, lse, selection, geometry, implementation=implementation)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_the_dense_loss_and_its_gradients(device: str, activation: str, place: str) -> None:
    """In the warm-up every row attends to all keys before it."""
    case = Case(dense=True, documents=DOCUMENTS, activation=activation)
    bad, old = spoiled(case, place, math.nan), loss(problem(case), None)[1]
    total, kl = loss(bad, None)
    wanted = loss(bad, None, "reference")[1]
    assert wanted.isnan().any()
    assert torch.equal(kl.isnan(), wanted.isnan())
    assert torch.equal(kl[~wanted.isnan()], old[~wanted.isnan()])
    assert total.isnan()
    gradient = torch.autograd.grad(total, bad.indexer.queries)[0]
    assert gradient[wanted.isnan()].isnan().flatten(1).any(-1).all()


@cache
def undamaged_long(device: str, way: str, activation: str) -> tuple[LongCase, Any]:
    """Return the case at a size for the interpreter, or in full on a GPU."""
    length = 96 if device == "cpu" else 20480
    case = make_case(device, length, activation=activation, heads=2, dim=16, batch=1)
    return case, select_long(case, case.indexer, way)


@pytest.mark.usefixtures("short_rows")
@covered(
    "options", way=["all scores", "candidates", "lists"], activation=["sigmoid", "relu"], place=list(PLACES)
)
def test_long_rows(device: str, guessed: list[range], options: dict[str, str]) -> None:  # noqa: F811
    """Rows are selected by candidates, and by all scores in groups."""
    way, activation, place = (options[name] for name in ("way", "activation", "place"))
    make, clean = undamaged_long(device, way, activation)
    length = make.indexer.keys.shape[1]
    row = length // 2
    bad = select_long(make, spoil(make.indexer, place, math.nan, row), way)
    assert bool(guessed) == (way == "candidates" or (way == "lists" and device == "cuda"))
    seen = torch.arange(length, device=device) >= row
    if place != "keys":
        seen = torch.arange(length, device=device) == row
    assert torch.equal(bad.variance[0].isnan(), seen)
    visible = torch.arange(1, length + 1, device=device)
    assert torch.equal(bad.budget[0, seen], visible[seen].clamp(max=LONG_RULE.k_base).int())
    rows = torch.arange(0, length, max(length // 512, 1), device=device)
    rows = torch.cat([rows, rows.new_tensor([row - 1, row])])
    masks, old = (unpack_mask(x.packed_rows(rows), length)[0] for x in (bad, clean))
    assert torch.equal(masks[~seen[rows]], old[~seen[rows]])
    assert masks.sum(-1).tolist() == bad.budget[0, rows].tolist()
    assert not (masks & (torch.arange(length, device=device) > rows[:, None])).any()


def select_long(case: LongCase, indexer: Indexer, way: str) -> Any:
    if way == "lists":
        return select_key_lists(indexer, LONG_RULE, case.ema, case.geometry)
    start = 32 if way == "candidates" else 10**9
    return op.select_keys(indexer, LONG_RULE, case.ema, case.geometry, candidates_from=start)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_decoding(device: str, activation: str, place: str) -> None:
    """The first of two sequences has the bad token."""
    case, untouched = (make_decode_case(device, [61, 44], 64, activation=activation) for _ in range(2))
    case = dataclasses.replace(
        case, indexer=spoil(case.indexer, place, math.nan, 17 if place == "keys" else 0)
    )
    with torch.no_grad():
        case.step()
        untouched.step()
    found, clean = case.cache.selection, untouched.cache.selection
    assert found.variance.isnan().tolist() == [True, False]
    assert found.counts[0] == DECODE_RULE.k_base
    assert int(case.selected()[0].sum()) == DECODE_RULE.k_base
    assert not (case.selected() & ~case.causal()).any()
    for name in ("indices", "counts", "variance"):
        count = int(clean.counts[1])
        ours, theirs = getattr(found, name)[1], getattr(clean, name)[1]
        assert torch.equal(ours[:count] if ours.dim() else ours, theirs[:count] if theirs.dim() else theirs)
