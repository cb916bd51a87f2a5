"""Creates problems of the indexer loss: inputs, attended keys, and expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_lists import lists_of

from gsa_kernels import api
from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.reference import indexer_scores
from gsa_kernels.types import Geometry, Indexer, RowSample, Selection

FORMS = ("dense", "packed mask", "key lists")
"""Forms of the attended keys."""

Loss = Callable[[Indexer, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps indexer, q and k to the loss and the KL of its rows."""


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    indexer: Indexer
    mask: torch.Tensor
    """bool [B, L, Lk]"""
    selection: Selection | None
    geometry: Geometry

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        names = (
            "queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias", "inverse_temperature",
        )  # fmt: skip
        found = {name: getattr(self.indexer, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def attending_to(self, mask: torch.Tensor) -> Problem:
        """Return the same problem with another mask, and what follows from it."""
        scores = self.scores().masked_fill(~mask, float("-inf"))
        logits = torch.einsum("bthd,bshd->bhts", self.q.double(), _per_head(self.q, self.k))
        logits = (logits * self.q.shape[-1] ** -0.5).masked_fill(~mask[:, None], float("-inf"))
        selection = self.selection
        if selection is not None:
            log_sum = None if selection.log_sum is None else scores.logsumexp(-1).float()
            masked = selection.packed_mask is not None
            of_form = {"packed_mask": pack_mask(mask)} if masked else {"key_lists": lists_of(mask)}
            selection = replace(selection, **of_form, log_sum=log_sum)
        return replace(self, mask=mask, selection=selection, lse=logits.logsumexp(-1).float())

    def scores(self) -> torch.Tensor:
        """Compute beta I in fp64."""
        x = {name: tensor.double() for name, tensor in self.tensors.items()}
        beta = x.pop("inverse_temperature")
        projections = (x.pop(name) for name in ("queries", "keys", "head_weight_logits"))
        biases = {"score_bias": x.get("score_bias"), "weight_bias": x.get("head_weight_bias")}
        return beta * indexer_scores(*projections, **biases, activation=self.indexer.activation)


def _per_head(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)


def make_problem(
    form: str,
    length: int,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    heads: tuple[int, int] = (4, 1),
    head_size: int = 32,
    indexer: tuple[int, int] = (4, 16),
    activation: str = "sigmoid",
    documents: bool = False,
    query_start: int = 0,
    log_sum: bool = False,
    size: float = 1.0,
    beta: float = 1.7,
) -> Problem:
    """Let every query attend to itself and a random part of its causal keys.

    Args:
        heads: number of query heads and of key heads
        indexer: number of indexer heads, and their size
        activation: `sigmoid`, `unbiased` (sigmoid without biases) or `relu`
        log_sum: whether to pass the log-sum, as selection does up to PACKED_MASK_MAX_TOKENS keys
        size: scale of the indexer's tensors
    """
    rng = torch.Generator().manual_seed(length)
    num_keys = query_start + length

    def normal(*shape: int, size: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=rng)).to(device, dtype)

    def bias() -> torch.Tensor | None:
        return normal(indexer[0], size=size, dtype=torch.float32) if activation == "sigmoid" else None

    mask, starts = _attended_set(form, batch, length, query_start, documents, rng)
    nothing = torch.zeros(batch, length, device=device)
    selection = None
    if form != "dense":  # `attending_to` completes it
        masked = form == "packed mask"
        packed = nothing.int()[..., None] if masked else None
        lists: Any = None if masked else "later"
        selection = Selection(packed, lists, nothing.int(), nothing, log_sum=nothing if log_sum else None)
    problem = Problem(
        normal(batch, length, heads[0], head_size),
        normal(batch, num_keys, heads[1], head_size),
        nothing,
        Indexer(
            normal(batch, length, *indexer, size=size),
            normal(batch, num_keys, indexer[1], size=size),
            normal(batch, length, indexer[0], size=size),
            bias(),
            bias(),
            "relu" if activation == "relu" else "sigmoid",
            torch.tensor(beta, device=device),
        ),
        mask,
        selection,
        Geometry(starts.to(device) if documents else None, query_start),
    )
    return problem.attending_to(mask.to(device))


def _attended_set(
    form: str, batch: int, length: int, query_start: int, documents: bool, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [B, L, Lk], and the documents' starts, int32 [B, L]."""
    num_keys = query_start + length
    keys = torch.arange(num_keys)
    positions = keys[query_start:, None]
    first = torch.rand(batch, num_keys, generator=rng) < 0.05
    starts = torch.where(first, keys, 0).cummax(1).values[:, query_start:]
    causal = (keys <= positions).expand(batch, length, num_keys)
    if documents:
        causal = causal & (keys >= starts[..., None])
    if form == "dense":
        return causal, starts.int()
    chosen = torch.rand(batch, length, num_keys, generator=rng) < 0.4
    return (chosen | (positions == keys)) & causal, starts.int()


@dataclass(frozen=True)
class Results:
    total: torch.Tensor
    rows: torch.Tensor
    grads: dict[str, torch.Tensor]


def differentiate(problem: Problem, loss: Loss, dtype: torch.dtype | None = None) -> Results:
    """Return the loss and its gradients, by default in the inputs' dtypes. Check that attention gets no gradient."""
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in problem.tensors.items()}
    q, k = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (problem.q, problem.k))
    total, rows = loss(replace(problem.indexer, **leaves), q, k)
    total.backward()
    assert q.grad is None
    assert k.grad is None
    assert not rows.requires_grad
    return Results(
        total.detach(), rows, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    )


def through_api(problem: Problem, implementation: Any, rows: RowSample) -> Loss:
    def loss(indexer: Indexer, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = (problem.lse, problem.selection, problem.geometry, rows)
        return api.indexer_loss(indexer, q, k, *given, implementation=implementation)

    return loss


def check(problem: Problem, rows: RowSample | None = None, loss: Loss | None = None) -> Results:
    """Check that errors are within twice the reference's errors in the same dtype, both against the fp64 reference."""
    rows = rows or RowSample()
    got = differentiate(problem, loss or through_api(problem, "triton", rows))
    reference = through_api(problem, "reference", rows)
    exact, same = differentiate(problem, reference, torch.float64), differentiate(problem, reference)
    assert_near(problem, got, exact, same)
    return got


def assert_near(problem: Problem, got: Results, exact: Results, same: Results) -> None:
    # bf16 has a target in fp16. On the GPU it uses the hardware's tanh, with an error of about 1e-5 of a score.
    approximate = problem.q.dtype != torch.float32
    allowed = max(2 * (same.total - exact.total).abs(), (2e-4 if approximate else 1e-6) * exact.total + 1e-6)
    assert (got.total - exact.total).abs() <= allowed
    tolerance = {"rtol": 1e-2 if approximate else 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got.rows.double(), exact.rows, **tolerance, equal_nan=True)
    assert got.grads.keys() == exact.grads.keys() == problem.tensors.keys()
    for name, want in exact.grads.items():
        value = got.grads[name].double()
        assert got.grads[name].dtype == problem.tensors[name].dtype
        error, of_reference = (value - want).norm(), (same.grads[name].double() - want).norm()
        # A scalar's reference may be exact by chance, but the kernels add in another order. In bf16 both round at
        # different places, and a few rows do not average this out.
        # A given log-sum is rounded, so a probability of 1 and a gradient of 0 are not exact.
        floor = (1e-3 if approximate else 3e-6) * want.norm() + 3e-6
        if approximate and problem.tensors[name].dtype == torch.float32:
            # Biases and beta are fp32 sums over all pairs of rounded terms, which may cancel.
            floor = floor + 2e-3 * want.norm() + 1e-3 * exact.grads["inverse_temperature"].norm()
        assert error <= 2 * of_reference + floor, f"{name}: {error} against {of_reference} of {want.norm()}"
        if want.norm() > 1e-3 and want.numel() > 1:
            assert torch.nn.functional.cosine_similarity(value.flatten(), want.flatten(), 0) > 0.9999, name


def assert_same(got: Results, want: Results, near: tuple[str, ...] = ()) -> None:
    assert torch.equal(got.total, want.total)
    assert torch.equal(got.rows.nan_to_num(-1.0), want.rows.nan_to_num(-1.0))
    for name, gradient in want.grads.items():
        if name in near:
            torch.testing.assert_close(got.grads[name], gradient)
        else:
            assert torch.equal(got.grads[name], gradient), name
