"""Creates tokens to decode, and the expected selection and attention."""

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from poison import poison_buffers

from gsa_kernels import reference as ops

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

from gsa_kernels.decode import op, state  # noqa: E402
from gsa_kernels.types import BudgetRule, Geometry, Indexer  # noqa: E402

EMA = 0.02
RULE = BudgetRule(k_base=12, k_min=4, k_max=20)


@pytest.fixture
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, state, make=("empty", "empty_like"))


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    indexer: Indexer
    cache: state.LayerCache
    ema: torch.Tensor
    gate: torch.Tensor | None

    @property
    def lengths(self) -> torch.Tensor:
        return self.cache.lengths

    @property
    def max_length(self) -> int:
        return self.cache.k.shape[1]

    @property
    def workspace(self) -> state.DecodeWorkspace:
        assert self.cache.workspace is not None
        return self.cache.workspace

    def with_new(self, **changes: Any) -> "Case":
        """Return the same cache with other lengths, another selection or another workspace."""
        return replace(self, cache=replace(self.cache, **changes))

    def causal(self) -> torch.Tensor:
        """Return bool [B, L_max]."""
        return torch.arange(self.max_length, device=self.q.device) < self.lengths[:, None]

    def step(self, rule: BudgetRule = RULE, window: int = 0, out: Any = None) -> torch.Tensor:
        geometry = Geometry(local_window=window)
        return op.decode_step(self.q, self.indexer, self.cache, rule, self.ema, geometry, self.gate, out)

    def selected(self) -> torch.Tensor:
        """Return bool [B, L_max], and check that the indices ascend."""
        selection = self.cache.selection
        mask = torch.zeros(len(self.q), self.max_length, dtype=torch.bool, device=self.q.device)
        for row, count in enumerate(selection.counts.tolist()):
            indices = selection.indices[row, :count].long()
            assert bool((indices.diff() > 0).all())
            mask[row, indices] = True
        return mask


def make_case(
    device: str,
    lengths: list[int],
    max_length: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    indexer: tuple[int, int] = (2, 16),
    dtype: torch.dtype = torch.float32,
    activation: str = "sigmoid",
    biases: bool = False,
    gate: bool = False,
    seed: int = 0,
    k_max: int = RULE.k_max,
    splits: int | None = None,
) -> Case:
    generator = torch.Generator().manual_seed(seed + max_length)
    batch, (query_heads, kv_heads), (hi, di) = len(lengths), heads, indexer

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    k, v = draw(batch, max_length, kv_heads, dim), draw(batch, max_length, kv_heads, dim)
    k_idx = draw(batch, max_length, di)
    for row, length in enumerate(lengths):
        for cache in (k, v, k_idx):
            cache[row, length:] = float("nan")
    given = (draw(hi), draw(hi)) if biases else (None, None)
    q, q_idx, weights = draw(batch, query_heads, dim), draw(batch, 1, hi, di), draw(batch, 1, hi)
    cache = state.LayerCache(
        k,
        v,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        state.new_selection(batch, k_max, device=device),
        state.new_workspace(
            batch,
            max_length,
            heads=query_heads,
            kv_heads=kv_heads,
            head_size=dim,
            device=device,
            splits=splits,
        ),
    )
    return Case(
        q,
        Indexer(q_idx, k_idx, weights, *given, activation),  # type: ignore[arg-type]
        cache,
        torch.tensor(EMA, device=device),
        draw(batch, query_heads, dim) if gate else None,
    )


def check_selection(case: Case, rule: BudgetRule = RULE) -> None:
    """Check scores and variance up to rounding, budget given the variance, and selection given the scores."""
    selection, x = case.cache.selection, case.indexer
    causal = case.causal()
    scores = torch.where(causal, case.workspace.scores[:, : case.max_length], 0)
    names = ("queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias")
    doubles = {n: getattr(x, n).double() for n in names if getattr(x, n) is not None}
    exact = ops.decode_top_k(replace(x, **doubles), case.lengths, rule, case.ema)
    difference = torch.where(causal, scores - exact.scores, 0).abs().max()
    # The hardware's tanh has an error of 2^-11 of each head's weight; scores of ReLU may be large.
    scale = max(1.0, exact.scores.abs().max().item())
    half = x.queries.dtype != torch.float32
    assert difference <= x.queries.shape[2] * scale * (2**-11 if half else 2e-6)
    _, variance = ops.score_moments(scores[:, None], causal[:, None])
    torch.testing.assert_close(selection.variance, variance[:, 0], rtol=1e-5, atol=1e-12)
    lengths = case.lengths[:, None]
    budget = ops.adaptive_budget(selection.variance[:, None], case.ema, lengths, **asdict(rule))
    assert torch.equal(selection.counts, budget[:, 0].int())
    wanted = ops.select_top_k(scores[:, None], causal[:, None], budget)[:, 0]
    assert torch.equal(case.selected(), wanted)


def check_attention(case: Case, out: torch.Tensor, selected: torch.Tensor, window: int) -> None:
    """Check that the error is within twice torch's in the same dtype, both against fp64."""
    assert out.dtype == case.q.dtype
    assert bool(out.isfinite().all())

    def attend(dtype: torch.dtype) -> torch.Tensor:
        causal = case.causal()
        q = case.q.to(dtype)
        k, v = (x.to(dtype).masked_fill(~causal[..., None, None], 0) for x in (case.cache.k, case.cache.v))
        distance = case.lengths[:, None] - 1 - torch.arange(k.shape[1], device=k.device)
        mask = (selected | (distance < window)) & causal
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (k, v))
        logits = torch.einsum("bhd,bkhd->bhk", q, k) * q.shape[-1] ** -0.5
        probs = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        result = torch.einsum("bhk,bkhd->bhd", probs, v)
        return result if case.gate is None else result * torch.sigmoid(case.gate.to(dtype))

    exact = attend(torch.float64)
    floor = 4 * torch.finfo(out.dtype).eps * max(1.0, exact.abs().max().item())
    allowed = 2 * (attend(out.dtype).double() - exact).abs().max() + floor
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def check(case: Case, rule: BudgetRule = RULE, window: int = 0) -> None:
    out = case.step(rule, window)
    check_selection(case, rule)
    selected = case.selected()
    check_attention(case, out, selected, window)
    # A second call with the same workspace gives the same bits.
    again = case.with_new(
        selection=replace(case.cache.selection, indices=torch.zeros_like(case.cache.selection.indices))
    )
    assert torch.equal(again.step(rule, window), out)
    assert torch.equal(again.selected(), selected)
