"""Tokens to decode, and what their selection and attention are compared with."""

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from poison import poison_buffers

import gsa_kernels as ops

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

from gsa_kernels.decode import op, state  # noqa: E402

EMA = 0.02
RULE: dict[str, Any] = {"k_base": 12, "k_min": 4, "k_max": 20, "mode": "inverse"}


@pytest.fixture
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_buffers(monkeypatch, op, state, make=("empty", "empty_like"))


@dataclass(frozen=True)
class Case:
    """One token of each sequence, and the caches."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    ema: torch.Tensor
    indexer: dict[str, Any]
    gate: torch.Tensor | None

    def state(self, k_max: int, splits: int | None = None) -> tuple[op.DecodeSelection, op.DecodeWorkspace]:
        batch, heads, dim = self.q.shape
        sizes = {"heads": heads, "kv_heads": self.k.shape[2], "head_size": dim}
        device = self.q.device
        workspace = state.new_workspace(batch, self.k.shape[1], **sizes, device=device, splits=splits)
        return state.new_selection(batch, k_max, device=device), workspace

    def visible(self) -> torch.Tensor:
        return torch.arange(self.k.shape[1], device=self.q.device) < self.lengths[:, None]


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
    options: dict[str, Any] = {"activation": activation}
    if biases:
        options |= {"score_bias": draw(hi), "weight_bias": draw(hi)}
    return Case(
        q=draw(batch, query_heads, dim),
        k=k,
        v=v,
        q_idx=draw(batch, hi, di),
        k_idx=k_idx,
        weights=draw(batch, hi),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        ema=torch.tensor(EMA, device=device),
        indexer=options,
        gate=draw(batch, query_heads, dim) if gate else None,
    )


def selected_mask(selection: op.DecodeSelection, max_length: int) -> torch.Tensor:
    """bool [B, L_max]; also that the indices ascend."""
    mask = torch.zeros(len(selection.counts), max_length, dtype=torch.bool, device=selection.counts.device)
    for row, count in enumerate(selection.counts.tolist()):
        indices = selection.indices[row, :count].long()
        assert bool((indices.diff() > 0).all())
        mask[row, indices] = True
    return mask


def check_selection(case: Case, selection: op.DecodeSelection, scores: torch.Tensor, **rule: Any) -> None:
    """Scores and variance to rounding; budget, given the variance, and selection, given the scores, exactly."""
    visible = case.visible()
    max_length = visible.shape[1]
    scores = torch.where(visible, scores[:, :max_length], 0)
    half = case.q_idx.dtype != torch.float32
    doubles = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in case.indexer.items()}
    inputs = (case.q_idx.double(), case.k_idx.double(), case.weights.double())
    exact = ops.decode_top_k(*inputs, case.lengths, case.ema, **doubles, **rule)
    difference = torch.where(visible, scores - exact.scores, 0).abs().max()
    # The tanh of the hardware is good to 2^-11 of each head's weight; scores of ReLU may be large.
    scale = max(1.0, exact.scores.abs().max().item())
    assert difference <= case.q_idx.shape[1] * scale * (2**-11 if half else 2e-6)
    _, variance = ops.score_moments(scores[:, None], visible[:, None])
    torch.testing.assert_close(selection.variance, variance[:, 0], rtol=1e-5, atol=1e-12)
    lengths = case.lengths[:, None]
    budget = ops.adaptive_budget(selection.variance[:, None], case.ema, lengths, **rule)
    assert torch.equal(selection.counts, budget[:, 0].int())
    wanted = ops.select_top_k(scores[:, None], visible[:, None], budget)[:, 0]
    assert torch.equal(selected_mask(selection, max_length), wanted)


def check_attention(case: Case, out: torch.Tensor, selected: torch.Tensor, window: int) -> None:
    """Within twice the error of torch in the same dtype, both against fp64."""
    assert out.dtype == case.q.dtype
    assert bool(out.isfinite().all())

    def attend(dtype: torch.dtype) -> torch.Tensor:
        visible = case.visible()
        q = case.q.to(dtype)
        k, v = (x.to(dtype).masked_fill(~visible[..., None, None], 0) for x in (case.k, case.v))
        distance = case.lengths[:, None] - 1 - torch.arange(k.shape[1], device=k.device)
        mask = (selected | (distance < window)) & visible
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (k, v))
        logits = torch.einsum("bhd,bkhd->bhk", q, k) * q.shape[-1] ** -0.5
        probs = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        result = torch.einsum("bhk,bkhd->bhd", probs, v)
        return result if case.gate is None else result * torch.sigmoid(case.gate.to(dtype))

    exact = attend(torch.float64)
    doubles = (x.double() for x in (case.q, case.k, case.v))
    gate = None if case.gate is None else case.gate.double()
    reference = ops.decode_attention(
        *doubles, case.lengths, selected, local_window=window, output_gate_logits=gate
    )
    torch.testing.assert_close(reference, exact)
    floor = 4 * torch.finfo(out.dtype).eps * max(1.0, exact.abs().max().item())
    allowed = 2 * (attend(out.dtype).double() - exact).abs().max() + floor
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def run(
    case: Case, selection: op.DecodeSelection, workspace: op.DecodeWorkspace, window: int = 0, **options: Any
) -> torch.Tensor:
    inputs = (case.q, case.k, case.v, case.q_idx, case.k_idx, case.weights, case.lengths, case.ema)
    options = {**case.indexer, **RULE, "local_window": window, "output_gate_logits": case.gate, **options}
    return op.decode_step(*inputs, selection, workspace, **options)


def check(case: Case, window: int = 0, splits: int | None = None, **changes: Any) -> op.DecodeSelection:
    rule = {**RULE, **changes}
    selection, workspace = case.state(rule["k_max"], splits)
    out = run(case, selection, workspace, window, **rule)
    check_selection(case, selection, workspace.scores, **rule)
    selected = selected_mask(selection, case.k.shape[1])
    check_attention(case, out, selected, window)
    # A second call, with the workspace as the first one left it, gives the same bits.
    again = replace(selection, indices=torch.zeros_like(selection.indices))
    assert torch.equal(run(case, again, workspace, window, **rule), out)
    assert torch.equal(selected_mask(again, case.k.shape[1]), selected)
    return selection
