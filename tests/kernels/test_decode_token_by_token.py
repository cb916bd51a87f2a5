"""Compares decoding token by token with the forward pass of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import Case, make_case, poisoned_buffers  # noqa: F401 - pytest finds it here

from gsa_kernels import api
from gsa_kernels.decode import op
from gsa_kernels.types import BudgetRule, Geometry, Implementation, Indexer

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


def forward_pass(
    case: Case, rows: dict[str, torch.Tensor], row: int, length: int, rule: BudgetRule, geometry: Geometry
) -> torch.Tensor:
    """Return [length, H, D] of one sequence."""
    start = 0 if case.cache.starts is None else int(case.cache.starts[row])
    kept = (slice(row, row + 1), slice(start, start + length))
    of_tokens = {name: each[row : row + 1, :length] for name, each in rows.items()}
    indexer = replace(
        case.indexer,
        queries=of_tokens["index_queries"],
        keys=case.indexer.keys[kept],
        head_weight_logits=of_tokens["index_weights"],
    )
    selection = api.select(indexer, rule, case.ema, geometry, implementation="reference")
    k, v = case.cache.k[kept], case.cache.v[kept]
    inputs = (of_tokens["q"], k, v, selection, geometry, of_tokens["gate"])
    return api.sparse_attention(*inputs, implementation="reference")[0][0]


GEOMETRIES: dict[str, tuple[Geometry, dict[str, Any]]] = {
    "padding": (Geometry(), {"starts": [5, 0, 1, 9]}),
    "window": (Geometry(local_window=6), {"settled": True, "mode": "direct"}),
    "fixed budget": (Geometry(local_window=5), {"starts": [0, 7, 3, 0], "mode": "off"}),
    "relu": (Geometry(), {"starts": [5, 0, 3, 9], "activation": "relu", "ema": 8.0}),
    "parts": (Geometry(local_window=3), {"mode": "direct", "splits": 4}),
}


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_token_by_token(device: str, name: str, implementation: Implementation) -> None:
    """The batch has a short sequence, an unused slot and two long sequences. Cache entries outside the sequences are
    NaN."""
    geometry, options = GEOMETRIES[name]
    rule = BudgetRule(8, 1, 12, options.get("mode", "inverse"))
    first, steps = torch.tensor([1, 0, 28, 32]), 4
    room = int(first.max()) + steps + 9
    sigmoid = options.get("activation", "sigmoid") == "sigmoid"
    sizes = {"k_max": rule.k_max, "splits": options.get("splits"), "gate": True}
    sizes |= {"activation": "sigmoid" if sigmoid else "relu", "biases": sigmoid}
    whole = make_case(device, [room] * 4, room, **sizes)
    starts = torch.tensor(options.get("starts", [0] * 4), dtype=torch.int32, device=device)
    whole = replace(whole, ema=whole.ema * options.get("ema", 1.0)).with_new(starts=starts)
    generator, slots = torch.Generator().manual_seed(1), torch.arange(room, device=device)
    of_one = {"q": whole.q, "gate": whole.gate, "index_queries": whole.indexer.queries[:, 0]}
    of_one["index_weights"] = whole.indexer.head_weight_logits[:, 0]
    rows = {
        name: torch.randn(4, room, *each.shape[1:], generator=generator).to(device)
        for name, each in of_one.items()
        if each is not None
    }
    wanted = {
        row: forward_pass(whole, rows, row, int(first[row]) + steps, rule, geometry) for row in (0, 2, 3)
    }
    budgets = set()
    for step in range(steps):
        lengths = torch.where(first > 0, first + step, 0).int().to(device)
        there = (slots >= starts[:, None]) & (slots < (starts + lengths)[:, None])
        k, v = (x.masked_fill(~there[..., None, None], float("nan")) for x in (whole.cache.k, whole.cache.v))
        keys = whole.indexer.keys.masked_fill(~there[..., None], float("nan"))
        newest = (torch.arange(4, device=device), (lengths - 1).clamp(min=0).long())
        x = {name: each[newest] for name, each in rows.items()}
        of_step = (x["index_queries"][:, None], keys, x["index_weights"][:, None])
        biases = (whole.indexer.score_bias, whole.indexer.head_weight_bias)
        indexer = Indexer(*of_step, *biases, whole.indexer.activation)
        cache = replace(whole.cache, k=k, v=v, lengths=lengths, settled=options.get("settled", False))
        out = api.decode_step(
            x["q"], indexer, cache, rule, whole.ema, geometry, x["gate"], implementation=implementation
        )
        for row, of_row in wanted.items():
            torch.testing.assert_close(out[row], of_row[lengths[row] - 1], rtol=1e-5, atol=1e-5)
        assert out[1].eq(0).all()
        budgets |= set(cache.selection.counts[2:].tolist()) - {0}
        if implementation == "triton":  # a layer that takes this selection
            attended = op.decode_attend(x["q"], cache, geometry.local_window, x["gate"])
            assert torch.equal(attended, out)
    assert (len(budgets) > 1) == (rule.adaptive_k != "off")
    assert max(budgets) < first[3] - 1  # some keys are left out
