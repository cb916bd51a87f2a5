"""The indexer KL over key lists against torch in fp64: on a GPU, or small in the interpreter."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

pytest.importorskip("triton")


from random_lists import lists_of, make_mask  # noqa: E402

from gsa_kernels import indexer_kl, indexer_scores, renormalise_target, sum_over_blocks  # noqa: E402
from gsa_kernels.indexer_loss import gathered  # noqa: E402
from gsa_kernels.indexer_loss.gathered import gathered_indexer_kl_loss  # noqa: E402
from gsa_kernels.indexer_loss.op import indexer_kl_loss  # noqa: E402
from gsa_kernels.indexer_loss.triton_gathered_launch import GatheredBlocks  # noqa: E402
from gsa_kernels.key_lists.format import KeyLists  # noqa: E402

CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the kernels are compiled for the GPU"))
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
)
device_of = pytest.mark.parametrize("device", [CPU, GPU])
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

# Small steps: a list of 70 entries then has several steps and segments.
SMALL = GatheredBlocks(16, 8, 16, 8, segment=32, stats_stages=1)
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
    """[B, L, L] of every query"""

    mask: torch.Tensor
    lists: KeyLists
    activation: str
    block: int

    @property
    def support(self) -> torch.Tensor:
        return self.mask[:, :: self.block]

    def row_target(self) -> torch.Tensor:
        return sum_over_blocks(self.target, self.block)

    def target_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        """Off the support there is NaN: it must not be read."""
        rows = self.lists.queries if self.block == 1 else 1
        target = self.row_target().masked_fill(~self.support, float("nan"))
        target = torch.nn.functional.pad(target, (0, 0, 0, -target.shape[1] % rows), value=float("nan"))
        target = target.unflatten(1, (-1, rows))
        share = max(1, self.block // self.lists.queries)
        out = torch.full((*tiles.shape, self.lists.max_count, rows), float("nan"), device=tiles.device)
        out = out.expand(len(target), *out.shape).clone()
        for b in range(len(target)):
            for i, tile in enumerate(tiles.tolist()):
                start = int(self.lists.key_starts[b, tile * share])
                count = int(self.lists.counts[b, tile * share])
                keys = self.lists.keys[start : start + count].long()
                out[b, i, :count] = target[b, tile][:, keys].T
        return out if self.block == 1 else out[..., 0]


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
    block: int = 1,
    queries: int = 32,
    documents: bool = False,
    size: float = 1.0,
    beta: float = 1.7,
) -> Problem:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=rng)).to(device, dtype)

    rows = -(-length // block)
    inputs = {
        "q_idx": normal(batch, rows, heads, dim),
        "k_idx": normal(batch, length, dim),
        "weight_logits": normal(batch, rows, heads),
        "inverse_temperature": torch.tensor(beta, device=device),
    }
    if biases and activation == "sigmoid":
        inputs["score_bias"] = normal(heads, dtype=torch.float32)
        inputs["weight_bias"] = normal(heads, dtype=torch.float32)
    queries = min(block, queries) if block > 1 else queries
    mask = make_mask(length, batch, block, max(1, block), documents, seed).to(device)
    lists = lists_of(mask, queries, max(1, block // queries), seed)
    target = torch.rand(batch, length, length, generator=rng).to(device) ** 6 * 4
    return Problem(inputs, torch.where(mask, target, 0), mask, lists, activation, block)


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
    target = renormalise_target(problem.row_target().to(scores.dtype), problem.support)
    rows = indexer_kl(scores, target, problem.support, leaves["inverse_temperature"])
    (rows if row_weights is None else rows * row_weights).sum().backward()
    return rows.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def compute(problem: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in problem.inputs.items()}
    arguments = dict(leaves)
    inputs = [arguments.pop(name) for name in NAMES[:3]]
    total, rows = gathered_indexer_kl_loss(
        *inputs,
        options.pop("target_tiles", problem.target_tiles),
        problem.lists,
        **arguments,
        activation=problem.activation,
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


def assert_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for name in first[2]:
        assert torch.equal(first[2][name], second[2][name]), name


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("length", "block", "queries"),
    [(1, 1, 32), (77, 1, 32), (40, 1, 16), (50, 16, 16), (70, 32, 32), (100, 64, 32)],
)
def test_value_and_gradients(device: str, length: int, block: int, queries: int) -> None:
    check(make_problem(length, device=device, block=block, queries=queries), blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("block", [1, 64])
def test_documents(device: str, block: int) -> None:
    check(make_problem(80, device=device, block=block, documents=True), blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("block", [1, 32])
def test_half(device: str, block: int) -> None:
    length = 50 if device == "cpu" else 333
    for dtype in (torch.float16, torch.bfloat16):
        check(make_problem(length, device=device, dtype=dtype, dim=64, block=block, batch=1))


@device_of
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_relu(device: str, dtype: torch.dtype) -> None:
    check(make_problem(50, device=device, dtype=dtype, activation="relu", beta=0.6), blocks=SMALL)


@device_of
@pytest.mark.parametrize(("heads", "dim", "block"), [(1, 32, 1), (3, 24, 1), (3, 24, 16)])
def test_other_shapes(device: str, heads: int, dim: int, block: int) -> None:
    check(make_problem(40, device=device, heads=heads, dim=dim, block=block, biases=False), blocks=SMALL)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
def test_saturated_scores(device: str) -> None:
    check(make_problem(50, device=device, size=6.0, beta=5.0), blocks=SMALL)


@device_of
def test_rows_without_target_or_support(device: str) -> None:
    """Both give 0, in value and gradient."""
    problem = make_problem(45, device=device, batch=1)
    problem.mask[:, 40] = False
    problem.lists = lists_of(problem.mask, 32, 1)
    problem.target[:, 7] = 0
    _, rows, grads = compute(problem, blocks=SMALL)
    for row in (7, 40):
        assert (rows[:, row] == 0).all()
        assert (grads["q_idx"][:, row] == 0).all()
        assert (grads["weight_logits"][:, row] == 0).all()
    check(problem, blocks=SMALL)


@device_of
@pytest.mark.parametrize("block", [1, 32])
def test_chunks_and_runs_agree(device: str, block: int) -> None:
    """To the last bit but for the keys' gradients, whose sums are cut at the chunks; run to run in all."""
    problem = make_problem(70, device=device, heads=2, block=block, batch=1)
    calls: list[list[int]] = []

    def target_tiles(tiles: torch.Tensor) -> torch.Tensor:
        calls.append(tiles.tolist())
        return problem.target_tiles(tiles)

    whole = compute(problem, blocks=SMALL)
    chunked = compute(problem, blocks=SMALL, target_tiles=target_tiles, scratch_bytes=1)
    assert calls == [[0], [1], [2]]
    torch.testing.assert_close(chunked[2].pop("k_idx"), whole[2]["k_idx"])
    assert_same(chunked, (whole[0], whole[1], {n: g for n, g in whole[2].items() if n != "k_idx"}))
    assert_same(compute(problem, blocks=SMALL), whole)


@device_of
@pytest.mark.parametrize("block", [1, 32])
def test_equals_the_loss_over_bits(device: str, block: int) -> None:
    problem = make_problem(50, device=device, block=block, batch=1)
    total, rows, grads = compute(problem, blocks=SMALL)
    support = problem.support
    bits = torch.nn.functional.pad(support, (0, -support.shape[2] % 32)).unflatten(2, (-1, 32)).long()
    words = (bits << torch.arange(32, device=device)).sum(-1).to(torch.int32)
    leaves = {n: t.detach().clone().requires_grad_() for n, t in problem.inputs.items()}
    target = problem.row_target()
    other_total, other_rows = indexer_kl_loss(
        *(leaves[name] for name in NAMES[:3]),
        lambda rows: target[:, rows.rows(device)],
        **{name: leaves[name] for name in NAMES[3:]},
        words=words,
        selection_block=block,
        return_rows=True,
    )
    other_total.backward()
    torch.testing.assert_close(total, other_total)
    torch.testing.assert_close(rows, other_rows, rtol=1e-5, atol=1e-6)
    for name, leaf in leaves.items():
        torch.testing.assert_close(grads[name], leaf.grad, rtol=1e-4, atol=1e-6)


@device_of
def test_number_as_temperature_and_upstream_scale(device: str) -> None:
    problem = make_problem(33, device=device, batch=1)
    _, _, once = compute(problem, blocks=SMALL)
    leaves = {n: t.detach().clone() for n, t in problem.inputs.items()}
    leaves["inverse_temperature"] = 1.7
    leaves["q_idx"].requires_grad_()
    inputs = [leaves.pop(name) for name in NAMES[:3]]
    loss = gathered_indexer_kl_loss(*inputs, problem.target_tiles, problem.lists, blocks=SMALL, **leaves)
    assert isinstance(loss, torch.Tensor)
    (0.25 * loss).backward()
    assert inputs[1].grad is None
    torch.testing.assert_close(inputs[0].grad, 0.25 * once["q_idx"], rtol=0, atol=0)
    with torch.no_grad():
        value = gathered_indexer_kl_loss(*inputs, problem.target_tiles, problem.lists, blocks=SMALL, **leaves)
    assert torch.equal(value, loss)


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize("block", [1, 32])
def test_row_fraction_is_unbiased(device: str, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Over all draws of one tile of three the mean is the whole; left-out rows are NaN."""
    problem = make_problem(66, device=device, heads=2, block=block, batch=1)
    seen = []
    mean = {name: torch.zeros_like(tensor) for name, tensor in problem.inputs.items()}
    for first in range(3):
        monkeypatch.setattr(gathered, "systematic", lambda *_, first=first: (first, 3))
        total, rows, grads = compute(problem, blocks=SMALL, row_fraction=1 / 3, seed=0)
        tile = torch.arange(rows.shape[1], device=device) // (32 if block == 1 else 1)
        assert torch.equal(rows.isnan()[0], tile != first)
        torch.testing.assert_close(total, 3 * rows.nansum())
        seen.append(total)
        for name in mean:
            mean[name] += grads[name] / 3
    monkeypatch.undo()
    whole, _, grads = compute(problem, blocks=SMALL)
    parts = [compute(problem, blocks=SMALL, share=(rank, 4)) for rank in range(4)]
    assert parts[3][0] == 0  # no tile is left for it
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for name in mean:
        total = sum(part[2][name] for part in parts)
        torch.testing.assert_close(total, grads[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.stack(seen).mean(), whole)
    for name in mean:
        torch.testing.assert_close(mean[name], grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("length", [1000, 1536])
def test_long_lists(device: str, length: int, block: int, documents: bool) -> None:
    """Several segments and chunks at the block shapes of the benchmark."""
    problem = make_problem(
        length, device=device, dtype=torch.bfloat16, dim=64, block=block, documents=documents
    )
    check(problem, scratch_bytes=2**25)
    assert_same(compute(problem, scratch_bytes=2**25), compute(problem, scratch_bytes=2**25))


def test_errors() -> None:
    problem = make_problem(10, device="cpu")
    inputs = [problem.inputs[name] for name in NAMES[:3]]
    for changed, message in (
        ({"row_fraction": 0.0}, "row_fraction"),
        ({"row_fraction": 0.4, "seed": 1}, "row_fraction"),
        ({"row_fraction": 0.5}, "seed"),
        ({"selection_block": 10}, "q_idx"),
        ({"inverse_temperature": torch.ones(2)}, "inverse_temperature"),
        ({"activation": "relu", "score_bias": torch.zeros(4)}, "score_bias"),
    ):
        with pytest.raises(ValueError, match=message):
            gathered_indexer_kl_loss(*inputs, problem.target_tiles, problem.lists, **changed)
    with pytest.raises(ValueError, match="float32"):
        gathered_indexer_kl_loss(*inputs, lambda tiles: problem.target_tiles(tiles).double(), problem.lists)
    longer = make_problem(12, device="cpu")
    with pytest.raises(ValueError, match="sequences of 10"):
        gathered_indexer_kl_loss(
            *(longer.inputs[name] for name in NAMES[:3]), problem.target_tiles, problem.lists
        )
    blocked = [inputs[0][:, :1], inputs[1], inputs[2][:, :1]]
    with pytest.raises(ValueError, match="selection_block is 48"):
        gathered_indexer_kl_loss(*blocked, problem.target_tiles, problem.lists, selection_block=48)
