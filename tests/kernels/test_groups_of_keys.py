"""Compares Triton's results and gradients with the reference for groups of keys that are selected together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("triton")

from gsa_kernels import api, limits, sampling
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 32


@dataclass(frozen=True)
class Case:
    size: int
    length: int = 64
    """Number of keys. The keys from `query_start` on have queries."""
    kernel: limits.Kernel = "auto"
    rule: BudgetRule = field(default_factory=lambda: BudgetRule(k_base=16, k_min=9, k_max=22))
    activation: str = "sigmoid"
    dense: bool = False
    rows: RowSample = field(default_factory=RowSample)
    documents: tuple[tuple[int, ...], ...] = ()
    """First positions of the documents of both sequences."""
    window: int = 0
    query_start: int = 0

    def starts(self) -> torch.Tensor | None:
        """int32 [B, keys]"""
        if not self.documents:
            return None
        rows = [[max(f for f in firsts if f <= t) for t in range(self.length)] for firsts in self.documents]
        return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    @property
    def geometry(self) -> Geometry:
        starts = self.starts()
        starts = None if starts is None else starts[:, self.query_start :]
        return Geometry(starts, self.query_start, local_window=self.window, key_group_size=self.size)


DOCUMENTS = ((0, 7, 9, 30, 45), (0, 33))
CASES = {
    "pairs, packed mask": Case(2),
    "fours, key lists": Case(4, kernel="gathered"),
    "fours, the printed rule": Case(4, length=68, rule=BudgetRule(16, 8, 24, "direct")),
    "eights, fixed budget, short last group": Case(8, length=99, rule=BudgetRule(24, 8, 64, "off")),
    "whole words": Case(32, length=160, rule=BudgetRule(64, 64, 64)),
    "groups of two words, short last": Case(64, length=350, rule=BudgetRule(128, 64, 128), window=70),
    "groups of two words, documents": Case(
        64, length=390, rule=BudgetRule(128, 64, 128), documents=((0, 100), (0, 150, 161))
    ),
    "groups of two words, documents, key lists": Case(
        64, length=390, rule=BudgetRule(128, 64, 128), documents=((0, 100), (0, 150, 161)), kernel="gathered"
    ),
    "all causal keys": Case(4, dense=True),
    "all causal keys, documents, short last group": Case(4, length=67, dense=True, documents=DOCUMENTS),
    "documents, window": Case(4, length=75, documents=DOCUMENTS, window=6),
    "documents, window, key lists": Case(
        4, length=75, documents=DOCUMENTS, window=6, kernel="gathered", activation="relu"
    ),
    "short last group, key lists": Case(8, length=67, rule=BudgetRule(16, 8, 24), kernel="gathered"),
    "later queries": Case(4, length=84, query_start=36, documents=DOCUMENTS, window=3),
    "later queries, key lists": Case(4, length=84, query_start=36, window=9, kernel="gathered"),
    "later queries, all causal keys": Case(4, length=84, query_start=4, dense=True),
    "a share of the rows": Case(2, length=136, rows=RowSample(share=(1, 2))),
    "a share of the tiles": Case(2, length=136, rows=RowSample(share=(1, 2)), kernel="gathered"),
    "half of the rows of all keys": Case(2, length=135, rows=RowSample(0.5, draw=3), dense=True),
}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indexer: Indexer
    leaves: dict[str, torch.Tensor]


def problem(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    generator, leaves = torch.Generator().manual_seed(case.length + case.size), {}

    def leaf(name: str, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        leaves[name] = values.requires_grad_()
        return leaves[name]

    length, gated = case.length, case.activation == "sigmoid"
    queries = length - case.query_start
    indexer = Indexer(
        leaf("queries", BATCH, queries, 2, 16),
        leaf("keys", BATCH, length, 16),
        leaf("weights", BATCH, queries, 2),
        leaf("score_bias", 2) if gated else None,
        leaf("weight_bias", 2) if gated else None,
        case.activation,  # type: ignore[arg-type]
        leaf("beta", 1),
    )
    indexer.inverse_temperature.data.fill_(1.3)  # type: ignore[union-attr]
    q, k = leaf("q", BATCH, queries, HEADS, SIZE), leaf("k", BATCH, length, KV_HEADS, SIZE)
    return Problem(q, k, leaf("v", BATCH, length, KV_HEADS, SIZE), indexer, leaves)


def select(case: Case, given: Problem, implementation: api.Implementation) -> Selection:
    ema = torch.tensor(0.01, device=DEVICE)
    return api.select(
        given.indexer, case.rule, ema, case.geometry, implementation=implementation, kernel=case.kernel
    )


def mask_of(selection: Selection, case: Case) -> torch.Tensor:
    rows = torch.arange(case.length - case.query_start, device=DEVICE)
    return unpack_mask(selection.packed_rows(rows), case.length)


def results(
    case: Case, given: Problem, selection: Selection | None, implementation: api.Implementation
) -> dict[str, torch.Tensor]:
    """Output, loss, its rows, and every gradient of a sum of both."""
    geometry = case.geometry
    out, lse = api.sparse_attention(
        given.q, given.k, given.v, selection, geometry, implementation=implementation
    )
    loss, rows = api.indexer_loss(
        given.indexer, given.q, given.k, lse, selection, geometry, case.rows, implementation=implementation
    )
    upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    total = (out * upstream).sum() + 0.7 * loss
    gradients = torch.autograd.grad(total, list(given.leaves.values()), retain_graph=True)
    found = dict(zip(given.leaves, gradients, strict=True))
    return {"out": out, "loss": loss, "rows": rows} | found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_selection_attention_and_loss_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)
    given, chosen, wanted_chosen = problem(case), None, None
    if not case.dense:
        chosen, wanted_chosen = (select(case, given, name) for name in ("triton", "reference"))
        assert chosen.format == ("key_lists" if case.kernel == "gathered" else "packed_mask")
        mask = mask_of(chosen, case)
        assert torch.equal(mask, mask_of(wanted_chosen, case))
        assert torch.equal(chosen.budget, wanted_chosen.budget)
        torch.testing.assert_close(chosen.variance, wanted_chosen.variance)
        if wanted_chosen.density is not None:
            assert chosen.density == pytest.approx(wanted_chosen.density)
        assert mask.sum() < case.length * (case.length + 1) // 2 * BATCH
    ours = results(case, given, chosen, "triton")
    wanted = results(case, given, wanted_chosen, "reference")
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


@pytest.mark.parametrize("kernel", ["masked", "gathered"])
def test_the_loss_of_bf16_agrees(kernel: limits.Kernel) -> None:
    """The target is fp16; both use the same selection."""
    case = Case(4, kernel=kernel)
    given = problem(case, torch.bfloat16)
    chosen = select(case, given, "triton")
    ours, wanted = (results(case, given, chosen, name) for name in ("triton", "reference"))
    assert not api.can_fuse_indexer_loss(given.q, given.k, chosen)
    for name, value in wanted.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            ours[name].float(),
            value.float(),
            rtol=0,
            atol=3e-2 * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_long_rows_are_selected_as_key_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the packed mask."""
    case = Case(4, length=321, rule=BudgetRule(16, 8, 32), documents=((0,), (0, 6, 157, 161, 300)))
    given = problem(case)
    wanted = mask_of(select(case, given, "reference"), case)
    monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", 256)
    monkeypatch.setattr(limits, "CANDIDATES_FROM", 64)
    chosen = select(case, given, "triton")
    assert chosen.format == "key_lists"
    assert torch.equal(mask_of(chosen, case), wanted)


def test_other_sizes_are_refused() -> None:
    shapes = ((BATCH, 48, 2, 16), (BATCH, 48, 16), (BATCH, 48, 2))
    indexer = Indexer(*(torch.zeros(shape, device=DEVICE) for shape in shapes))
    ema = torch.zeros((), device=DEVICE)
    arguments = (indexer, BudgetRule(12, 3, 12), ema, Geometry(key_group_size=3))
    with pytest.raises(ValueError, match=r"key_group_size 3; pass one of .*implementation='reference'"):
        api.select(*arguments, implementation="triton")
