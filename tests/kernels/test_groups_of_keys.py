"""Compares Triton's results and gradients with the reference for groups of keys that are selected together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("triton")

from gsa_kernels import api, limits, sampling
from gsa_kernels.indexer.pool import group_firsts, pool_keys
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_kernels.selection.triton_group_keys import packed_keys_of_groups
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 32


@dataclass(frozen=True)
class Case:
    pool: int
    length: int = 64
    kernel: limits.Kernel = "auto"
    rule: BudgetRule = field(default_factory=lambda: BudgetRule(k_base=16, k_min=9, k_max=22))
    activation: str = "sigmoid"
    dense: bool = False
    rows: RowSample = field(default_factory=RowSample)


CASES = {
    "pairs, packed mask": Case(2),
    "pairs, words and a part of one": Case(2, length=74),
    "fours, packed mask, relu": Case(4, activation="relu"),
    "fours, key lists": Case(4, kernel="gathered"),
    "fours, the printed rule": Case(4, length=68, rule=BudgetRule(16, 8, 24, "direct")),
    "eights, fixed budget": Case(8, length=96, rule=BudgetRule(24, 8, 64, "off")),
    "whole words": Case(32, length=160, rule=BudgetRule(64, 64, 64)),
    "two groups alone": Case(16, length=32, rule=BudgetRule(16, 16, 32)),
    "all causal keys": Case(4, dense=True),
    "a share of the rows": Case(2, length=136, rows=RowSample(share=(1, 2)), kernel="gathered"),
    "half of the rows of all keys": Case(2, length=136, rows=RowSample(0.5, seed=3), dense=True),
}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indexer: Indexer
    leaves: dict[str, torch.Tensor]


def problem(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    generator, leaves = torch.Generator().manual_seed(case.length + case.pool), {}

    def leaf(name: str, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        leaves[name] = values.requires_grad_()
        return leaves[name]

    length, gated = case.length, case.activation == "sigmoid"
    starts = torch.zeros(BATCH, length, dtype=torch.int32, device=DEVICE)
    pooled = pool_keys(leaf("keys", BATCH, length, 16), group_firsts(starts, case.pool), case.pool)
    indexer = Indexer(
        leaf("queries", BATCH, length, 2, 16),
        pooled,
        leaf("weights", BATCH, length, 2),
        leaf("score_bias", 2) if gated else None,
        leaf("weight_bias", 2) if gated else None,
        case.activation,  # type: ignore[arg-type]
        leaf("beta", 1),
    )
    indexer.inverse_temperature.data.fill_(1.3)  # type: ignore[union-attr]
    q, k = leaf("q", BATCH, length, HEADS, SIZE), leaf("k", BATCH, length, KV_HEADS, SIZE)
    return Problem(q, k, leaf("v", BATCH, length, KV_HEADS, SIZE), indexer, leaves)


def select(case: Case, given: Problem, implementation: api.Implementation) -> Selection:
    ema = torch.tensor(0.01, device=DEVICE)
    geometry = Geometry(indexer_pool=case.pool)
    return api.select(
        given.indexer, case.rule, ema, geometry, implementation=implementation, kernel=case.kernel
    )


def mask_of(selection: Selection, length: int) -> torch.Tensor:
    return unpack_mask(selection.packed_rows(torch.arange(length, device=DEVICE)), length)


def results(
    case: Case, given: Problem, selection: Selection | None, implementation: api.Implementation
) -> dict[str, torch.Tensor]:
    """Return output, loss, its rows, and every gradient of a sum of both."""
    geometry = Geometry(indexer_pool=case.pool)
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
    two_groups = case.length == 2 * case.pool  # there is no choice
    if not case.dense:
        chosen, wanted_chosen = (select(case, given, name) for name in ("triton", "reference"))
        assert chosen.format == ("key_lists" if case.kernel == "gathered" else "packed_mask")
        mask = mask_of(chosen, case.length)
        assert torch.equal(mask, mask_of(wanted_chosen, case.length))
        assert torch.equal(chosen.budget, wanted_chosen.budget)
        torch.testing.assert_close(chosen.variance, wanted_chosen.variance)
        assert chosen.density == wanted_chosen.density
        assert mask.sum() < case.length * (case.length + 1) // 2 * BATCH or two_groups
    ours = results(case, given, chosen, "triton")
    wanted = results(case, given, wanted_chosen, "reference")
    for name, value in wanted.items():
        if name == "rows" and case.rows != RowSample():  # with Triton the first group's queries have no row
            assert ours[name][:, case.pool :].isnan().any()
        torch.testing.assert_close(
            ours[name],
            value,
            rtol=2e-4,
            atol=2e-5,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert (wanted["loss"] > 0) != two_groups


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


def test_long_rows_are_selected_by_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the packed mask, rows use candidates, and lists come from masks of chunks of queries."""
    case = Case(4, length=320, rule=BudgetRule(16, 8, 32))
    given = problem(case)
    wanted = mask_of(select(case, given, "reference"), case.length)
    monkeypatch.setattr(limits, "PACKED_MASK_MAX_TOKENS", 256)
    monkeypatch.setattr(limits, "CANDIDATES_FROM", 64)
    monkeypatch.setattr(limits, "SELECTION_CHUNK_BYTES", 4 * BATCH * 128 * case.length // 8)
    chosen = select(case, given, "triton")
    assert chosen.format == "key_lists"
    assert torch.equal(mask_of(chosen, case.length), wanted)


@pytest.mark.parametrize("pool", limits.KEY_POOLS[1:])
def test_groups_become_their_keys(pool: int) -> None:
    """Bits are random, including the highest bit of words, for some of the queries."""
    length = 4 * 32 if pool < 32 else 6 * 32
    groups, sequences = length // pool - 1, 2 * pool
    generator = torch.Generator().manual_seed(pool)
    chosen = torch.rand(sequences, groups, groups, generator=generator) < 0.7
    chosen = chosen.to(DEVICE).tril()
    rows = range(32, length - 3)
    ours = packed_keys_of_groups(pack_mask(chosen), pool, rows)
    for query in rows:
        of_query = torch.zeros(2, rows.stop, dtype=torch.bool, device=DEVICE)
        own = query // pool * pool
        of_query[:, own : query + 1] = True
        if own > 0:
            group = chosen.unflatten(0, (2, pool))[:, query % pool, own // pool - 1, : own // pool]
            of_query[:, :own] = group.repeat_interleave(pool, -1)
        assert torch.equal(unpack_mask(ours[:, query - rows.start], rows.stop), of_query), query


@pytest.mark.parametrize(
    ("geometry", "rule", "length", "words"),
    [
        (Geometry(indexer_pool=3), BudgetRule(12, 3, 12), 48, ["indexer_pool is 3"]),
        (Geometry(indexer_pool=4), BudgetRule(16, 4, 16), 50, ["50 tokens", "indexer_pool 4"]),
        (Geometry(indexer_pool=4), BudgetRule(16, 4, 16), 4, ["4 tokens", "two or more whole groups"]),
        (Geometry(indexer_pool=4, local_window=2), BudgetRule(16, 4, 16), 48, ["local_window is 2"]),
        (Geometry(indexer_pool=4), BudgetRule(15, 4, 16), 48, ["k_base 15", "multiple of 4"]),
        (Geometry(indexer_pool=4), BudgetRule(16, 4, 16, dense_below=9), 48, ["dense_below 9"]),
        (
            Geometry(torch.zeros(BATCH, 48, dtype=torch.int32), indexer_pool=4),
            BudgetRule(16, 4, 16),
            48,
            ["document_starts"],
        ),
    ],
)
def test_what_the_kernels_do_not_have_is_refused(
    geometry: Geometry, rule: BudgetRule, length: int, words: list[str]
) -> None:
    indexer = Indexer(
        torch.zeros(BATCH, length, 2, 16), torch.zeros(BATCH, length, 16), torch.zeros(BATCH, length, 2)
    )
    with pytest.raises(ValueError, match="implementation='reference'") as error:
        api.select(indexer, rule, torch.tensor(0.0), geometry, implementation="triton")
    for word in words:
        assert word in str(error.value)


def test_groups_are_of_whole_sequences_and_single_queries() -> None:
    for wrong in ({"selection_block": 16, "local_window": 16}, {"query_start": 14}):
        with pytest.raises(ValueError, match="indexer_pool is 4"):
            Geometry(indexer_pool=4, **wrong)  # type: ignore[arg-type]
