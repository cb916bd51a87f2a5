"""Lists calls of the API, one for each kind of selection, and compares Triton's results with the reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import gsa_kernels
from gsa_kernels import (
    BudgetRule,
    Geometry,
    Indexer,
    Selection,
    indexer_loss,
    limits,
    sampling,
    sparse_attention,
)
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.types import Implementation, RowSample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 40, 4, 1, 32
WIDE = (24, 2, 256)  # as in Qwen3.5
RULE = BudgetRule(k_base=6, k_min=2, k_max=12)
EMA = 0.01


@dataclass(frozen=True)
class Case:
    kernel: limits.Kernel = "auto"
    query_start: int = 0
    documents: tuple[tuple[int, ...], ...] = ()
    """First positions of the documents of both sequences."""
    local_window: int = 0
    activation: str = "sigmoid"
    dense: bool = False
    rows: RowSample = dataclasses.field(default_factory=RowSample)
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, SIZE)

    def geometry(self) -> Geometry:
        starts = None
        if self.documents:
            positions = range(self.query_start, self.query_start + LENGTH)
            rows = [[max(f for f in firsts if f <= t) for t in positions] for firsts in self.documents]
            starts = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        return Geometry(starts, self.query_start, self.local_window)


DOCUMENTS = ((0, 27), (*range(12), 19))
HALF, SHARE = RowSample(0.5, draw=1), RowSample(0.5, draw=3, share=(0, 2))
CASES = {
    "packed mask, a share of the rows": Case(rows=SHARE, query_start=32),
    "packed mask, documents, relu": Case(
        "masked", 16, documents=DOCUMENTS, local_window=3, activation="relu"
    ),
    "key lists, documents, relu": Case("gathered", 16, documents=DOCUMENTS, activation="relu"),
    "key lists, half of the rows": Case("gathered", rows=HALF),
    "dense": Case(dense=True, documents=DOCUMENTS),
    "dense, later queries, relu": Case(dense=True, query_start=16, activation="relu"),
    "heads of 256, packed mask": Case("masked", 16, documents=DOCUMENTS, local_window=3, heads=WIDE),
    "heads of 256, key lists": Case("gathered", documents=DOCUMENTS, local_window=3, heads=(8, 1, 256)),
    "heads of 256, dense": Case(dense=True, heads=(12, 1, 256)),
}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate_logits: torch.Tensor
    indexer: Indexer
    geometry: Geometry

    def leaves(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in ("q", "k", "v", "gate_logits")}
        names = ("queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias")
        found |= {name: getattr(self.indexer, name) for name in (*names, "inverse_temperature")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def problem(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(DEVICE, dtype).requires_grad_()

    keys = case.query_start + LENGTH
    heads, kv_heads, size = case.heads
    gated = case.activation == "sigmoid"
    indexer = Indexer(
        leaf(BATCH, LENGTH, 2, 16),
        leaf(BATCH, keys, 16),
        leaf(BATCH, LENGTH, 2),
        leaf(2) if gated else None,
        leaf(2) if gated else None,
        case.activation,  # type: ignore[arg-type]
        torch.tensor(1.3, device=DEVICE, requires_grad=True),
    )
    return Problem(
        leaf(BATCH, LENGTH, heads, size),
        leaf(BATCH, keys, kv_heads, size),
        leaf(BATCH, keys, kv_heads, size),
        leaf(BATCH, LENGTH, heads, size),
        indexer,
        case.geometry(),
    )


def select(case: Case, given: Problem, implementation: Implementation) -> Selection:
    ema = torch.tensor(EMA, device=DEVICE)
    return gsa_kernels.select(
        given.indexer,
        RULE,
        ema,
        given.geometry,
        implementation=implementation,
        kernel=case.kernel,
        with_log_sum=case.kernel != "gathered",
    )


def mask_of(selection: Selection, num_keys: int) -> torch.Tensor:
    rows = torch.arange(selection.budget.shape[1], device=DEVICE)
    return unpack_mask(selection.packed_rows(rows), num_keys)


def results(
    case: Case, given: Problem, selection: Selection | None, implementation: Implementation
) -> dict[str, torch.Tensor]:
    """Return output, log-sum-exp, loss, its rows, and the gradients of output plus loss."""
    q, k, v, by = given.q, given.k, given.v, {"implementation": implementation}
    out, lse = sparse_attention(q, k, v, selection, given.geometry, given.gate_logits, **by)
    loss, rows = indexer_loss(given.indexer, q, k, lse, selection, given.geometry, case.rows, **by)
    assert not lse.requires_grad
    assert not rows.requires_grad
    upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    leaves = given.leaves()
    gradients = torch.autograd.grad((out * upstream).sum() + 0.7 * loss, list(leaves.values()))
    return {"out": out, "lse": lse, "loss": loss, "rows": rows} | dict(zip(leaves, gradients, strict=True))


def check_selections(case: Case, ours: Selection, wanted: Selection, num_keys: int) -> None:
    assert ours.format == ("key_lists" if case.kernel == "gathered" else "packed_mask")
    mask = mask_of(ours, num_keys)
    assert torch.equal(mask, mask_of(wanted, num_keys))
    assert mask.sum() < BATCH * LENGTH * (2 * num_keys - LENGTH + 1) // 2
    assert torch.equal(ours.budget, wanted.budget)
    torch.testing.assert_close(ours.variance, wanted.variance)
    assert ours.budget.dtype == wanted.budget.dtype == torch.int32
    if ours.log_sum is not None:
        torch.testing.assert_close(ours.log_sum, wanted.log_sum)
    if case.kernel == "gathered":
        assert ours.key_lists is not None
        assert wanted.key_lists is not None
        assert 0 < ours.key_lists.density() == wanted.key_lists.density() <= 1


def check_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare selection, results and gradients by Triton with those by the reference."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)  # two stretches of the short sequence
    given = problem(case)
    selection = None if case.dense else select(case, given, "triton")
    if selection is not None:
        check_selections(case, selection, select(case, given, "reference"), given.k.shape[1])
    ours, wanted = (results(case, given, selection, each) for each in ("triton", "reference"))
    for name, value in wanted.items():
        torch.testing.assert_close(
            ours[name],
            value,
            rtol=2e-4,
            atol=2e-5,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert wanted["loss"] > 0
    assert wanted["rows"].isnan().any() == (case.rows != RowSample())
