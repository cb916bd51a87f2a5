"""Attention whose backward pass also gives the indexer's gradients: inputs, and what the results are compared with."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

pytest.importorskip("triton")

from test_triton_attention import pack  # noqa: E402

from gsa_kernels import indexer_kl, indexer_scores, renormalise_target, sparse_attention  # noqa: E402
from gsa_kernels.attention.op import masked_attention  # noqa: E402
from gsa_kernels.devices import on_hopper  # noqa: E402
from gsa_kernels.hopper.fused_indexer_loss import attention_with_indexer_loss  # noqa: E402

ON_HOPPER = CUDA and on_hopper(torch.device("cuda"))
CPU = pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the kernels are compiled for CUDA here"))
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper")]
)
devices = pytest.mark.parametrize("device", [CPU, GPU])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)

ATTENDED = ("q", "k", "v", "output_gate_logits")
INDEXER = ("q_idx", "k_idx", "weight_logits", "score_bias", "weight_bias", "inverse_temperature")
LOSS_SCALE = 0.375

TARGET_EPS = 2.0**-10
"""The target is fp16: its parts are rounded, on a GPU also their sums of two heads, and what the loss adds up of them.
Half of this each, here and there more or less."""


@dataclass
class Case:
    inputs: dict[str, torch.Tensor]
    """Without the gate or the biases where there are none."""
    mask: torch.Tensor
    """bool [B, L, Lk], S_t."""
    document_starts: torch.Tensor | None
    grad: torch.Tensor
    """Of the output."""
    activation: str
    query_start: int

    @property
    def words(self) -> torch.Tensor:
        return pack(self.mask)


def make_case(
    length: int,
    *,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    head_size: int = 32,
    indexer_heads: int = 2,
    indexer_size: int = 16,
    activation: str = "sigmoid",
    gated: bool = True,
    documents: bool = False,
    query_start: int = 0,
    single: bool = False,
) -> Case:
    """Every query selects a random part of what it sees and itself; `single`: one key, mostly another one."""
    rng = torch.Generator().manual_seed(length)
    num_keys = query_start + length

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    inputs = {
        "q": normal(batch, length, heads, head_size),
        "k": normal(batch, num_keys, kv_heads, head_size),
        "v": normal(batch, num_keys, kv_heads, head_size),
        "output_gate_logits": normal(batch, length, heads, head_size),
        "q_idx": normal(batch, length, indexer_heads, indexer_size),
        "k_idx": normal(batch, num_keys, indexer_size),
        "weight_logits": normal(batch, length, indexer_heads),
        "score_bias": normal(indexer_heads, dtype=torch.float32),
        "weight_bias": normal(indexer_heads, dtype=torch.float32),
        "inverse_temperature": torch.tensor(1.7 if activation == "sigmoid" else 0.6, device=device),
    }
    if not gated:
        del inputs["output_gate_logits"]
    if activation == "relu":
        del inputs["score_bias"], inputs["weight_bias"]
    keys, positions = torch.arange(num_keys), query_start + torch.arange(length)
    visible = (keys <= positions[:, None]).expand(batch, length, num_keys)
    starts = None
    if documents:
        starts = torch.zeros(batch, length, dtype=torch.int32)
        for b in range(batch):
            for cut in (num_keys // 3 + b, num_keys // 2 + 2 * b, num_keys - 5):
                starts[b, positions >= cut] = cut
        visible = visible & (keys >= starts[..., None])
        starts = starts.to(device)
    chance = torch.rand(visible.shape, generator=rng)
    if single:
        best = torch.where(visible, chance, -1.0).argmax(-1, keepdim=True)
        mask = torch.zeros_like(visible).scatter_(-1, best, True)
    else:
        mask = visible & ((chance < 0.6) | (keys == positions[:, None]))
    return Case(inputs, mask.to(device), starts, normal(*inputs["q"].shape), activation, query_start)


@dataclass
class Results:
    out: torch.Tensor
    rows: torch.Tensor | None
    """KL of each query, [B, L]; None where nobody asked."""
    grads: dict[str, torch.Tensor]

    def items(self) -> dict[str, torch.Tensor]:
        rows = {} if self.rows is None else {"rows": self.rows}
        return {"out": self.out, **rows, **self.grads}


def distil(case: Case, loss_scale: float = LOSS_SCALE, **options: Any) -> Results:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.inputs.items()}
    seen: list[torch.Tensor] = []
    out, lse = attention_with_indexer_loss(
        **leaves,  # type: ignore[arg-type]
        **{
            "words": case.words,
            "loss_scale": loss_scale,
            "activation": case.activation,
            "document_starts": case.document_starts,
            "query_start": case.query_start,
            "on_rows": seen.append,
            **options,
        },
    )
    assert not lse.requires_grad
    assert seen == []
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad)
    if options.get("on_rows", seen) is None:
        return Results(out.detach(), None, dict(zip(leaves, grads, strict=True)))
    assert len(seen) == 1
    assert not seen[0].requires_grad
    return Results(out.detach(), seen[0], dict(zip(leaves, grads, strict=True)))


def attend(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`masked_attention` alone."""
    leaves = {name: case.inputs[name].detach().requires_grad_() for name in ATTENDED if name in case.inputs}
    out, _ = masked_attention(
        **leaves, words=case.words, document_starts=case.document_starts, query_start=case.query_start
    )
    grads = torch.autograd.grad(out, list(leaves.values()), case.grad)
    return out.detach(), dict(zip(leaves, grads, strict=True))


def reference(case: Case, dtype: torch.dtype | None) -> Results:
    """In this dtype, by the references; if None in the inputs' own, attention as it is written in torch."""
    leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in case.inputs.items()}
    q, k, v = (leaves[name] for name in ATTENDED[:3])
    attention = sparse_attention(q, k, v, case.mask, return_probs=True)
    out, probs = attention.out, attention.head_sum_probs
    assert probs is not None
    if dtype is None:
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~case.mask[:, None], float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), values)
    if "output_gate_logits" in leaves:
        out = out * torch.sigmoid(leaves["output_gate_logits"])
    scores = indexer_scores(
        *(leaves[name] for name in INDEXER[:3]),
        score_bias=leaves.get("score_bias"),
        weight_bias=leaves.get("weight_bias"),
        activation=case.activation,  # type: ignore[arg-type]
    )
    target = renormalise_target(probs, case.mask)
    rows = indexer_kl(scores, target, case.mask, leaves["inverse_temperature"])
    loss = LOSS_SCALE * rows.sum()
    grads = torch.autograd.grad(
        [out, loss], list(leaves.values()), [case.grad.to(out.dtype), torch.ones_like(loss)]
    )
    return Results(out.detach(), rows.detach(), dict(zip(leaves, grads, strict=True)))


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(got[name], want), name


def check(case: Case, **options: Any) -> Results:
    """Errors at most twice those of torch in the same dtype; of attention's results the largest, as in its own
    tests, and of the indexer's the norm, as in those of its loss."""
    results = distil(case, **options)
    got, exact, same = (
        each.items() for each in (results, reference(case, torch.float64), reference(case, None))
    )
    attended = [name for name in ("out", *ATTENDED) if name in exact]
    largest = max(1.0, *(exact[name].abs().max().item() for name in attended))
    for name, want in exact.items():
        value, errors = got[name], [x[name].double() - want for x in (got, same)]
        if name in case.inputs:
            assert value.dtype == case.inputs[name].dtype, name
        if name in attended:
            error, of_torch = (x.abs().max() for x in errors)
            floor = 4 * torch.finfo(value.dtype).eps * largest
        else:
            error, of_torch = (x.norm() for x in errors)
            # biases and beta are in fp32, of rounded halves
            in_full = name in case.inputs and value.dtype == torch.float32
            floor = (2 if in_full else 1) * TARGET_EPS * want.norm() + 1e-5
        assert error <= 2 * of_torch + floor, (
            f"{name}: {error} against {of_torch}, at most {want.abs().max()}"
        )
    return results


def assert_attention_is_untouched(case: Case, got: Results) -> None:
    """To the bit that of the kernels which do nothing else."""
    out, grads = attend(case)
    assert torch.equal(got.out, out)
    assert_equal({name: got.grads[name] for name in grads}, grads)


def name_of(value: object) -> str:
    """Of a parameter; of options their names."""
    return "-".join(value) if isinstance(value, dict) else str(value)


def log_sum_of(case: Case) -> torch.Tensor:
    """What selection gives of a sigmoid indexer."""
    scores = indexer_scores(
        *(case.inputs[name].double() for name in INDEXER[:3]),
        score_bias=case.inputs["score_bias"].double(),
        weight_bias=case.inputs["weight_bias"].double(),
    )
    scores = scores * case.inputs["inverse_temperature"].double()
    return scores.masked_fill(~case.mask, float("-inf")).logsumexp(-1).float()
