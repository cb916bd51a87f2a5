"""Creates selection problems, and compares selections with a stable sort of the kernels' scores."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gsa_kernels import packed_mask
from gsa_kernels import reference as ops
from gsa_kernels.selection import op
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

EMA = 0.02
RULE = BudgetRule(k_base=12, k_min=4, k_max=20)
FULL_RULE = BudgetRule(k_base=2048, k_min=256, k_max=4096)
BY_REGISTERS, BY_GROUPS = 32768, 32
"""Values of REGISTER_KEYS; longer rows are selected by groups."""


@dataclass
class Case:
    indexer: Indexer
    geometry: Geometry

    @property
    def q(self) -> torch.Tensor:
        return self.indexer.queries

    @property
    def k(self) -> torch.Tensor:
        return self.indexer.keys

    @property
    def w(self) -> torch.Tensor:
        return self.indexer.head_weight_logits

    @property
    def ema(self) -> torch.Tensor:
        return torch.tensor(EMA, device=self.q.device)

    def select(
        self,
        rule: BudgetRule = RULE,
        window: int = 0,
        select: Callable[..., Selection] = op.select_keys,
        **options: Any,
    ) -> Selection:
        return select(self.indexer, rule, self.ema, replace(self.geometry, local_window=window), **options)

    def scores(self) -> torch.Tensor:
        return op.score_rows(self.indexer, range(self.q.shape[1]), self.geometry)

    def reference(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        x = self.indexer
        biases = {"score_bias": x.score_bias, "weight_bias": x.head_weight_bias}
        biases = {name: None if bias is None else bias.to(dtype) for name, bias in biases.items()}
        tensors = (x.queries.to(dtype), x.keys.to(dtype), x.head_weight_logits.to(dtype))
        return ops.indexer_scores(*tensors, **biases, activation=x.activation)

    def causal(self, rows: range | None = None) -> torch.Tensor:
        """Return bool [B, rows, Lk]."""
        start, (batch, num_keys, _) = self.geometry.query_start, self.k.shape
        rows = rows or range(self.q.shape[1])
        keys = torch.arange(num_keys, device=self.k.device)
        positions = start + torch.arange(rows.start, rows.stop, device=self.k.device)
        mask = (keys <= positions[:, None]).expand(batch, -1, -1)
        starts = self.geometry.document_starts
        return mask if starts is None else mask & (keys >= starts[:, rows.start : rows.stop, None])

    def queries_from(self, start: int, stop: int) -> "Case":
        """Return a chunk of the queries, and the keys up to its last query."""
        x, starts = self.indexer, self.geometry.document_starts
        chunk = replace(
            x, queries=self.q[:, start:stop], keys=self.k[:, :stop], head_weight_logits=self.w[:, start:stop]
        )
        return Case(chunk, Geometry(None if starts is None else starts[:, start:stop], start))


def make_case(
    device: str,
    length: int,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    activation: str = "sigmoid",
    biases: bool = False,
    documents: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed + length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    given = (draw(heads), draw(heads)) if biases else (None, None)
    starts = None
    if documents:
        first = torch.rand(batch, length, generator=generator) < 0.1
        first[:, 0] = True
        starts = torch.where(first, torch.arange(length), 0).cummax(1).values
        starts = starts.to(device=device, dtype=torch.int32)
    tensors = (draw(batch, length, heads, dim), draw(batch, length, dim), draw(batch, length, heads))
    return Case(Indexer(*tensors, *given, activation), Geometry(starts))  # type: ignore[arg-type]


def check(
    case: Case, selection: Selection, rule: BudgetRule = RULE, window: int = 0, rows: range | None = None
) -> None:
    """Check some or all rows: variance up to rounding, budget given the variance, and selection given the scores."""
    rows = rows or range(case.q.shape[1])
    here, num_keys = slice(rows.start, rows.stop), case.k.shape[1]
    causal = case.causal(rows)
    scores = torch.where(causal, op.score_rows(case.indexer, rows, case.geometry), 0)
    found = selection.variance[:, here]
    torch.testing.assert_close(found, ops.score_moments(scores, causal)[1], rtol=1e-5, atol=1e-12)
    budget = ops.adaptive_budget(found, case.ema, causal.sum(-1), **asdict(rule))
    assert torch.equal(selection.budget[:, here], budget.int())
    positions = case.geometry.query_start + torch.arange(rows.start, rows.stop, device=scores.device)
    near = ops.local_window_mask(num_keys, window, query_positions=positions)
    wanted = ops.select_top_k(scores, causal, budget) | (near & causal)
    assert selection.packed_mask is not None
    # This also compares the bits beyond the last key.
    assert torch.equal(selection.packed_mask[:, here], packed_mask.pack_mask(wanted))


def assert_same_bits(found: Selection, wanted: Selection, queries: slice = slice(None)) -> None:
    for name in ("packed_mask", "budget", "variance"):
        assert torch.equal(getattr(found, name)[:, queries], getattr(wanted, name)[:, queries]), name


def two_levels(case: Case) -> None:
    """Give every third key a high score and the others a low one, so that all tie."""
    case.k[:] = case.k[:, :1]
    case.k[:, ::3] *= -1


def all_equal(case: Case) -> None:
    case.k[:] = 0


def saturated(case: Case) -> None:
    """Set sigmoids to 0 and 1, with few distinct sums."""
    case.q.mul_(1e3)


def check_variance_of_like_scores(case: Case, **options: Any) -> None:
    """Check the variance of scores near 2 that differ by a factor of 1e-5."""
    case.q.mul_(1e-4)
    causal = case.causal()
    _, exact = ops.score_moments(torch.where(causal, case.scores(), 0).double(), causal)
    torch.testing.assert_close(case.select(**options).variance.double(), exact, rtol=1e-5, atol=0)


def check_no_bit_changes(case: Case, cut: int, **options: Any) -> None:
    """Check equal bits with other chunks, and with other tokens after the queries."""
    first = case.select(**options, window=3)
    assert_same_bits(case.select(**options, window=3, row_chunk_bytes=1), first)  # one tile of rows at a time
    for tensor in (case.q, case.k, case.w):
        tensor[:, cut:] = tensor[:, cut:].flip(1) * 3
    changed = case.select(**options, window=3)
    assert_same_bits(changed, first, slice(cut))
    assert not torch.equal(first.variance, changed.variance)
