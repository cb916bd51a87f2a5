"""Decoding of groups of keys (`Geometry.indexer_pool`) against the last row of the forward pass, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import Case, make_case, poisoned_buffers  # noqa: F401 - pytest finds it here

from gsa_kernels import api
from gsa_kernels.decode import op
from gsa_kernels.indexer.pool import group_means, pooled
from gsa_kernels.types import BudgetRule, Geometry, Implementation

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


def forward_pass(case: Case, row: int, rule: BudgetRule, geometry: Geometry) -> torch.Tensor:
    """[H, D] of one sequence's last token, as in training."""
    length, x = int(case.lengths[row]), case.indexer
    start = 0 if case.cache.starts is None else int(case.cache.starts[row])
    entries = slice(start, start + length)

    def of_last(value: torch.Tensor) -> torch.Tensor:
        rows = value.new_zeros(1, length, *value.shape[1:])
        rows[:, -1] = value[row]
        return rows

    queries, weights = of_last(x.queries[:, 0]), of_last(x.head_weight_logits[:, 0])
    indexer = replace(x, queries=queries, head_weight_logits=weights, keys=x.keys[row : row + 1, entries])
    selection = api.select(pooled(indexer, geometry), rule, case.ema, geometry, implementation="reference")
    k, v = (each[row : row + 1, entries] for each in (case.cache.k, case.cache.v))
    gate = None if case.gate is None else of_last(case.gate)
    q = of_last(case.q)
    out, _ = api.sparse_attention(q, k, v, selection, geometry, gate, implementation="reference")
    return out[0, -1]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("pool", "options"),
    [
        (4, {"window": 6, "settled": True}),
        (4, {"starts": [5, 0, 3, 9], "activation": "relu", "ema": 8.0}),
        (16, {"window": 3, "rule": "direct", "splits": 4}),
        (64, {"starts": [1, 2, 0, 0], "window": 70, "rule": "off"}),
    ],
    ids=str,
)
def test_token_by_token(
    device: str, pool: int, options: dict[str, Any], implementation: Implementation
) -> None:
    """From within a group into the next one: a sequence of one group, an unused slot, two with a choice. Past each
    sequence's end, and where no group is whole, the caches hold NaN."""
    rule = BudgetRule(3 * pool, pool, 5 * pool, options.get("rule", "inverse"))
    geometry = Geometry(local_window=options.get("window", 0), indexer_pool=pool)
    first, room = torch.tensor([1, 0, 6 * pool - 2, 9 * pool - 2]), 10 * pool + 6
    sizes = {"k_max": rule.k_max, "splits": options.get("splits"), "pool": pool, "gate": True}
    activation = options.get("activation", "sigmoid")
    whole = make_case(
        device, [room] * 4, room, activation=activation, biases=activation == "sigmoid", **sizes
    )
    starts = torch.tensor(options.get("starts", [0] * 4), dtype=torch.int32, device=device)
    generator, slots, budgets = torch.Generator().manual_seed(pool), torch.arange(room, device=device), []
    group_keys = None
    for step in range(4):
        lengths = torch.where(first > 0, first + step, 0).int().to(device)
        there = (slots >= starts[:, None]) & (slots < (starts + lengths)[:, None])
        k, v = (x.masked_fill(~there[..., None, None], float("nan")) for x in (whole.cache.k, whole.cache.v))
        keys = whole.indexer.keys.masked_fill(~there[..., None], float("nan"))
        if group_keys is None:  # after a prefill
            group_keys = group_means(keys, pool, starts)
            group_keys[torch.arange(group_keys.shape[1], device=device) >= (lengths // pool)[:, None]] = (
                float("nan")
            )
        queries = torch.randn(whole.indexer.queries.shape, generator=generator).to(device)
        case = replace(
            whole,
            ema=whole.ema * options.get("ema", 1 / pool),
            indexer=replace(whole.indexer, queries=queries, keys=keys),
        ).with_new(
            k=k,
            v=v,
            lengths=lengths,
            starts=starts,
            group_keys=group_keys,
            settled=options.get("settled", False) and step > 0,
        )
        out = api.decode_step(
            case.q,
            case.indexer,
            case.cache,
            rule,
            case.ema,
            geometry,
            case.gate,
            implementation=implementation,
        )
        for row in (0, 2, 3):
            wanted = forward_pass(case, row, rule, geometry)
            torch.testing.assert_close(out[row], wanted, rtol=1e-5, atol=1e-5)
        assert out[1].eq(0).all()
        budgets += case.cache.selection.counts[2:].tolist()
        if implementation == "triton":  # a layer that takes this selection
            again = op.decode_attend(case.q, case.cache, geometry.local_window, case.gate, pool=pool)
            assert torch.equal(again, out)
    assert (len(set(budgets)) > 1) == (rule.adaptive_k != "off")
    assert max(budgets) <= 5  # of 8 groups


def test_refuses(device: str) -> None:
    rule = BudgetRule(12, 4, 20)
    case = make_case(device, [30], 30, pool=4)
    for bad, pool, given, message in (
        (case, 3, rule, "indexer_pool is 3 with selection_block 1; pass a power of two"),
        (case.with_new(group_keys=None), 4, rule, "group_keys is None with indexer_pool 4"),
        (case, 8, replace(rule, k_base=16, k_min=8), r"group_keys has shape \(1, 8, 16\)"),
        (case, 4, replace(rule, dense_below=9), "dense_below 9 with indexer_pool 4"),
    ):
        with pytest.raises(ValueError, match=message):
            bad.step(given, pool=pool)
