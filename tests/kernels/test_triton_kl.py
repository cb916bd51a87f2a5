"""The Triton indexer KL against the torch reference in fp64: on a GPU, or small in Triton's interpreter."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

pytest.importorskip("triton")


from gsa_kernels import indexer_kl, indexer_scores, renormalise_target  # noqa: E402
from gsa_kernels.indexer_loss.op import indexer_kl_loss  # noqa: E402
from gsa_kernels.indexer_loss.triton_launch import Blocks  # noqa: E402
from gsa_kernels.sampling import SampledRows  # noqa: E402

CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the kernels are compiled for the GPU"))
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
)
device_of = pytest.mark.parametrize("device", [CPU, GPU])

# Small tiles: a sequence of 100 then has several row tiles, key tiles and segments.
SMALL = Blocks(rows=32, stats_keys=32, stats_warps=8, grad_keys=32, grad_warps=8, segment=32)
# 64 keys: with fewer Triton sums two heads in fp32 wrongly (gsa_kernels/hopper/miscompile_guard.py).
STACKED = replace(SMALL, stats_keys=64, grad_keys=64, segment=64, stacked=True)
NAMES = ("q_idx", "k_idx", "weight_logits", "score_bias", "weight_bias", "inverse_temperature")


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """torch.empty is filled with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Problem:
    inputs: dict[str, torch.Tensor]
    target: torch.Tensor
    support: torch.Tensor
    activation: str
    words: torch.Tensor | None
    document_starts: torch.Tensor | None
    block: int = 1

    def target_rows(self, rows: SampledRows) -> torch.Tensor:
        """Off the support there is NaN: it must not be read."""
        part = rows.rows(self.target.device)
        return self.target[:, part].masked_fill(~self.support[:, part], float("nan"))


def pack_words(mask: torch.Tensor) -> torch.Tensor:
    """bool [B, L, Lk] -> int32 [B, L, ceil(Lk / 32)], bit s % 32 of word s // 32."""
    missing = -mask.shape[2] % 32
    bits = torch.nn.functional.pad(mask, (0, missing)).unflatten(2, (-1, 32)).long()
    return (bits << torch.arange(32, device=mask.device)).sum(-1).to(torch.int32)


def make_problem(
    length: int,
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    heads: int = 4,
    dim: int = 16,
    seed: int = 0,
    activation: str = "sigmoid",
    biases: bool = True,
    sparse: bool = False,
    documents: bool = False,
    size: float = 1.0,
    beta: float = 1.7,
    block: int = 1,
) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    rows = -(-length // block)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=rng)).to(device, dtype)

    inputs = {
        "q_idx": normal(batch, rows, heads, dim),
        "k_idx": normal(batch, length, dim),
        "weight_logits": normal(batch, rows, heads),
        "inverse_temperature": torch.tensor(beta, device=device),
    }
    if biases and activation == "sigmoid":
        inputs["score_bias"] = normal(heads, dtype=torch.float32)
        inputs["weight_bias"] = normal(heads, dtype=torch.float32)
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, length, length)
    starts = None
    if documents:
        ids = (torch.rand(batch, length, generator=rng) < 0.06).cumsum(1)
        visible = visible & (ids[:, :, None] == ids[:, None, :])
        starts = visible.int().argmax(-1).to(device, torch.int32)
    support = visible
    if sparse:
        chosen = torch.rand(batch, length, length, generator=rng) < 0.4
        support = visible & (chosen | torch.eye(length, dtype=torch.bool))
    target = torch.rand(batch, length, length, generator=rng)[:, ::block] ** 6 * 4
    support = support[:, ::block].to(device)
    words = pack_words(support) if sparse else None
    return Problem(inputs, target.to(device), support, activation, words, starts, block)


def reference(
    problem: Problem, dtype: torch.dtype | None, row_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """KL of each row and the gradients of their (weighted) sum; in the inputs' own dtypes if None."""
    leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in problem.inputs.items()}
    scores = indexer_scores(
        leaves["q_idx"],
        leaves["k_idx"],
        leaves["weight_logits"],
        score_bias=leaves.get("score_bias"),
        weight_bias=leaves.get("weight_bias"),
        activation=problem.activation,
    )
    target = renormalise_target(problem.target.to(scores.dtype), problem.support)
    rows = indexer_kl(scores, target, problem.support, leaves["inverse_temperature"])
    (rows if row_weights is None else rows * row_weights).sum().backward()
    return rows.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def compute(problem: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in problem.inputs.items()}
    arguments = dict(leaves)
    inputs = [arguments.pop(name) for name in NAMES[:3]]
    total, rows = indexer_kl_loss(
        *inputs,
        options.pop("target_rows", problem.target_rows),
        **arguments,
        activation=problem.activation,
        words=problem.words,
        document_starts=problem.document_starts,
        selection_block=problem.block,
        return_rows=True,
        **options,
    )
    total.backward()
    return total.detach(), rows, {name: leaf.grad for name, leaf in leaves.items()}


def check(problem: Problem, *, row_weights: torch.Tensor | None = None, **options: Any) -> None:
    total, rows, grads = compute(problem, **options)
    exact_rows, exact_grads = reference(problem, torch.float64, row_weights)
    same_rows, same_grads = reference(problem, None, row_weights)
    weights = 1 if row_weights is None else row_weights
    exact, same = (exact_rows * weights).sum(), (same_rows * weights).sum()
    # Halves on the GPU use the hardware's tanh: about 1e-5 of a score.
    approximate = problem.inputs["q_idx"].dtype != torch.float32
    tolerance = max(2 * (same - exact).abs(), (1e-4 if approximate else 1e-6) * exact + 1e-6)
    assert (total - exact).abs() <= tolerance
    if row_weights is None:
        torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-2 if approximate else 1e-4, atol=1e-4)

    for name, want in exact_grads.items():
        got = grads[name].double()
        assert grads[name].dtype == problem.inputs[name].dtype
        error, same_error = (got - want).norm(), (same_grads[name].double() - want).norm()
        # The sums run in another order, and a scalar's reference may be exact by chance: hence the floor.
        floor = 3e-6 * want.norm() + 1e-6
        if approximate and problem.inputs[name].dtype == torch.float32:
            floor = floor + 2e-3 * want.norm()  # biases and beta, in fp32, of rounded halves
        assert error <= 2 * same_error + floor, f"{name}: {error} against {same_error} of {want.norm()}"
        if want.norm() > 1e-3 and want.numel() > 1:
            assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.9999, name


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("length", [1, 17, 33, 100])
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_value_and_gradients(device: str, length: int, sparse: bool) -> None:
    check(make_problem(length, device=device, sparse=sparse), blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_documents(device: str, sparse: bool) -> None:
    problem = make_problem(100, device=device, sparse=sparse, documents=True)
    assert problem.document_starts is not None
    assert (problem.document_starts[:, -1] > 64).any()
    check(problem, blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
@pytest.mark.parametrize(("block", "length"), [(16, 1), (16, 600), (32, 33), (128, 300)])
def test_rows_of_blocks(device: str, block: int, length: int, sparse: bool) -> None:
    """A row per block of queries, in chunks of one tile of rows: several segments in a row tile."""
    problem = make_problem(length, device=device, batch=1, heads=2, sparse=sparse, block=block)
    check(problem, blocks=SMALL, row_chunk_bytes=1)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_rows_of_blocks_in_documents(device: str, sparse: bool) -> None:
    problem = make_problem(400, device=device, heads=2, sparse=sparse, documents=True, block=16)
    assert problem.document_starts is not None
    assert (problem.document_starts % 16 > 0).any()
    check(problem, blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_rows_of_blocks_in_long_sequences(block: int, sparse: bool, documents: bool) -> None:
    for length in (1000, 3001):
        check(
            make_problem(
                length,
                device="cuda",
                dtype=torch.bfloat16,
                dim=64,
                sparse=sparse,
                documents=documents,
                block=block,
            ),
            row_chunk_bytes=2**20,
        )


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_halves(device: str, dtype: torch.dtype, sparse: bool) -> None:
    check(make_problem(70 if device == "cpu" else 333, device=device, dtype=dtype, dim=64, sparse=sparse))


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (100, {"sparse": True}),
        (100, {"documents": True, "heads": 3, "dim": 24}),
        (70, {"sparse": True, "documents": True, "heads": 1, "biases": False}),
        (330, {"heads": 2, "block": 16, "batch": 1, "sparse": True}),
        (70, {"dtype": torch.bfloat16, "dim": 64, "sparse": True}),
        (33, {"activation": "relu", "beta": 0.6}),
        (50, {"size": 6.0, "beta": 5.0}),
    ],
    ids=["sparse", "documents", "one head", "blocks", "bf16", "relu", "saturated"],
)
def test_heads_side_by_side(device: str, length: int, options: dict[str, Any]) -> None:
    """The form of the kernels for bf16, mostly in fp32 and so to more digits, and a target of halves."""
    problem = make_problem(length, device=device, **options)
    problem.target = problem.target.half().float()
    check(problem, blocks=STACKED, target_rows=lambda *rows: problem.target_rows(*rows).half())


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("heads", "dim", "options"),
    [
        (1, 64, {"sparse": True}),
        (2, 128, {"documents": True}),
        (3, 24, {"sparse": True, "documents": True}),
        (4, 64, {"documents": True}),
        (4, 64, {"sparse": True, "documents": True}),
        (4, 64, {"activation": "relu", "beta": 0.6}),
        (8, 32, {"sparse": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bf16_in_its_own_tiles(device: str, heads: int, dim: int, options: dict[str, Any]) -> None:
    check(make_problem(150, device=device, dtype=torch.bfloat16, heads=heads, dim=dim, batch=1, **options))


def test_fp16_is_refused_side_by_side() -> None:
    problem = make_problem(20, device="cpu", dtype=torch.float16)
    with pytest.raises(ValueError, match="pass others for fp16"):
        compute(problem, blocks=STACKED)


@device_of
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_relu(device: str, dtype: torch.dtype) -> None:
    check(make_problem(70, device=device, dtype=dtype, activation="relu", beta=0.6), blocks=SMALL)


@device_of
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 24)])
def test_other_shapes(device: str, heads: int, dim: int) -> None:
    check(make_problem(50, device=device, heads=heads, dim=dim, biases=False))


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
def test_saturated_scores(device: str) -> None:
    check(make_problem(50, device=device, size=6.0, beta=5.0), blocks=SMALL)


@device_of
@pytest.mark.parametrize("blocks", [SMALL, STACKED], ids=["head by head", "side by side"])
def test_rows_without_target_or_support(device: str, blocks: Blocks) -> None:
    """Both give 0, in value and gradient. Row 0 has one visible key: its KL is 0 in any case."""
    problem = make_problem(50, device=device, sparse=True)
    problem.support[:, 40] = False
    problem.words = pack_words(problem.support)
    problem.target[:, 7] = 0
    _, rows, grads = compute(problem, blocks=blocks)
    for row in (7, 40):
        assert (rows[:, row] == 0).all()
        assert (grads["q_idx"][:, row] == 0).all()
        assert (grads["weight_logits"][:, row] == 0).all()
    assert rows[:, 0].abs().max() < 1e-6
    check(problem, blocks=blocks)


@device_of
def test_number_as_temperature(device: str) -> None:
    problem = make_problem(33, device=device, beta=2.5)
    inputs = [problem.inputs[name] for name in NAMES[:3]]
    biases = {name: problem.inputs[name] for name in ("score_bias", "weight_bias")}
    got = indexer_kl_loss(*inputs, problem.target_rows, inverse_temperature=2.5, blocks=SMALL, **biases)
    rows, _ = reference(problem, torch.float64)
    assert isinstance(got, torch.Tensor)
    assert not got.requires_grad
    torch.testing.assert_close(got.double(), rows.sum(), rtol=1e-6, atol=1e-6)


@device_of
def test_one_element_temperature_and_upstream_scale(device: str) -> None:
    problem = make_problem(33, device=device)
    _, _, once = compute(problem, blocks=SMALL)
    leaves = {n: t.detach().clone() for n, t in problem.inputs.items()}
    leaves["inverse_temperature"] = leaves["inverse_temperature"].reshape(1)
    for name in ("q_idx", "inverse_temperature"):
        leaves[name].requires_grad_()
    inputs = [leaves.pop(name) for name in NAMES[:3]]
    loss = indexer_kl_loss(*inputs, problem.target_rows, blocks=SMALL, **leaves)
    assert isinstance(loss, torch.Tensor)
    (0.25 * loss).backward()
    assert inputs[1].grad is None
    torch.testing.assert_close(inputs[0].grad, 0.25 * once["q_idx"], rtol=0, atol=0)
    assert leaves["inverse_temperature"].grad is not None
    torch.testing.assert_close(
        leaves["inverse_temperature"].grad, 0.25 * once["inverse_temperature"].reshape(1), rtol=0, atol=0
    )


@device_of
@pytest.mark.parametrize("documents", [False, True])
def test_chunks_change_nothing(device: str, documents: bool) -> None:
    """To the last bit: tiles are added in the same order, whatever chunk they are in."""
    problem = make_problem(100, device=device, sparse=True, documents=documents)
    calls: list[tuple[int, int]] = []

    def target_rows(rows: SampledRows) -> torch.Tensor:
        calls.append((rows.start, rows.count))
        return problem.target_rows(rows)

    total, _, grads = compute(problem, blocks=SMALL)
    chunked_total, _, chunked = compute(
        problem, blocks=SMALL, target_rows=target_rows, row_chunk_bytes=4 * 2 * 100 * 40
    )
    assert calls == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert torch.equal(total, chunked_total)
    for name, grad in grads.items():
        assert torch.equal(grad, chunked[name]), name


@device_of
def test_runs_agree_to_the_bit(device: str) -> None:
    problem = make_problem(64 if device == "cpu" else 700, device=device, dtype=torch.float16)
    first, second = compute(problem), compute(problem)
    assert torch.equal(first[0], second[0])
    for name in first[2]:
        assert torch.equal(first[2][name], second[2][name]), name


@device_of
def test_no_gradient_to_the_target(device: str) -> None:
    problem = make_problem(20, device=device)
    problem.target.requires_grad_()
    total, _, _ = compute(problem, target_rows=lambda rows: problem.target[:, rows.rows()])
    assert problem.target.grad is None
    q_idx, k_idx, weight_logits = (problem.inputs[name] for name in NAMES[:3])
    frozen = indexer_kl_loss(
        q_idx,
        k_idx,
        weight_logits,
        lambda rows: problem.target[:, rows.rows()],
        **{name: problem.inputs[name] for name in NAMES[3:]},
    )
    assert isinstance(frozen, torch.Tensor)
    assert not frozen.requires_grad
    torch.testing.assert_close(frozen, total)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("length", [1000, 1536])
def test_long_sequences(length: int, documents: bool) -> None:
    """Several segments at the block shapes of the benchmark."""
    check(
        make_problem(length, device="cuda", dtype=torch.bfloat16, dim=64, sparse=True, documents=documents),
        row_chunk_bytes=2**22,
    )


def test_errors() -> None:
    problem = make_problem(10, device="cpu")
    q_idx, k_idx, weight_logits = (problem.inputs[name] for name in NAMES[:3])
    for changed, message in (
        ({"row_fraction": 0.0}, "row_fraction"),
        ({"row_fraction": 0.4, "seed": 1}, "row_fraction"),
        ({"row_fraction": 0.5}, "seed"),
        ({"words": torch.zeros(2, 10, 2, dtype=torch.int32)}, "words"),
        ({"words": torch.zeros(2, 10, 1)}, "int32"),
        ({"inverse_temperature": torch.ones(2)}, "inverse_temperature"),
        ({"activation": "tanh"}, "activation"),
        ({"selection_block": 16}, "q_idx has shape"),
        ({"activation": "relu", "score_bias": torch.zeros(4)}, "score_bias"),
    ):
        with pytest.raises(ValueError, match=message):
            indexer_kl_loss(q_idx, k_idx, weight_logits, problem.target_rows, **changed)
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        indexer_kl_loss(q_idx.double(), k_idx, weight_logits, problem.target_rows)
    with pytest.raises(ValueError, match="float32"):
        indexer_kl_loss(q_idx, k_idx, weight_logits, lambda rows: problem.target.double())
