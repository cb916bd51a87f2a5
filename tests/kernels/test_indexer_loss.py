"""Compares Triton's indexer loss, as the public API computes it, with the fp64 reference. The kernels run on a GPU or
in the interpreter. test_indexer_loss_errors.py tests refused inputs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from covering import Case, covered
from kernel_devices import GPU
from loss_problems import FORMS, Problem, assert_same, check, differentiate, make_problem, through_api

from gsa_kernels import operations_triton, sampling
from gsa_kernels.loss import triton_launch
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import BF16_BLOCKS, Blocks
from gsa_kernels.reference import renormalise_target
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Indexer, RowSample

on_gpu = pytest.mark.parametrize("device", [GPU])
BF16 = torch.bfloat16

# A sequence of 70 tokens has several of these tiles, and several segments.
SMALL = Blocks(rows=32, score_keys=32, score_warps=8, grad_keys=32, grad_warps=8, segment=32)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill torch.empty with NaN or the largest integer, and shorten stretches of rows."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def cut(monkeypatch: pytest.MonkeyPatch, blocks: Blocks | None, chunk_bytes: int | None = None) -> None:
    """Set block shapes and chunk size of the API's loss from now on."""
    options: dict[str, Any] = {"blocks": blocks, "row_chunk_bytes": chunk_bytes}
    monkeypatch.setattr(operations_triton, "triton_indexer_loss", partial(triton_indexer_loss, **options))


@covered(
    "case",
    attended=[
        *("dense", "dense, documents", "packed mask", "packed mask, documents, log-sum"),
        *("key lists", "key lists, documents, log-sum"),
    ],
    kernels=["bf16", "own", "small"],
    length=[1, 40, 70],
    heads=[(4, 1), (6, 2), (5, 1), (2, 2)],
    head_size=[32, 256],
    indexer=[(1, 16), (3, 24), (4, 16)],
    activation=["sigmoid", "unbiased", "relu"],
    query_start=[0, 64],
    rows=["all", "half", "share", "share of half"],
    one_chunk=[True, False],
)
def test_value_and_gradients(device: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bf16 cases use the bf16 kernels' block sizes. The other cases use fp32, where more digits can be compared. In
    some cases only a sample of the queries has a loss. These cases have at least three stretches of `STRETCH_ROWS`
    queries, and a sample consists of whole stretches."""
    form, *options = case["attended"].split(", ")
    bf16 = case["kernels"] == "bf16"
    cut(monkeypatch, SMALL if case["kernels"] == "small" else None, None if case["one_chunk"] else 1)
    samples = {
        "all": RowSample(),
        "half": RowSample(0.5, draw=3),
        "share": RowSample(share=(1, 2)),
        "share of half": RowSample(
            0.5, draw=2, share=(1, 2)
        ),  # from the first stretch, so it has the third, too
    }
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 64 if bf16 else 32)
    length = case["length"] if case["rows"] == "all" else 70
    if bf16 and length > 1:  # These tiles are larger, and a few rows do not average out rounding.
        length = 150 if device == "cpu" else 350
    problem = make_problem(
        form,
        length,
        device,
        dtype=BF16 if bf16 else torch.float32,
        batch=1 if form == "key lists" else 2,
        documents="documents" in options,
        log_sum="log-sum" in options,
        beta=0.6 if case["activation"] == "relu" else 1.7,
        **{name: case[name] for name in ("heads", "head_size", "indexer", "activation", "query_start")},
    )
    check(problem, samples[case["rows"]])


@pytest.mark.parametrize(
    ("form", "indexer", "documents"),
    [
        ("packed mask", (1, 64), False),
        ("packed mask", (2, 128), True),
        ("packed mask", (4, 64), False),
        ("packed mask", (8, 32), True),
        ("key lists", (4, 64), True),
    ],
    ids=str,
)
def test_bf16_of_other_widths(device: str, form: str, indexer: tuple[int, int], documents: bool) -> None:
    check(make_problem(form, 150, device, dtype=BF16, indexer=indexer, batch=1, documents=documents))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (RowSample(), {"indexer": (4, 64), "query_start": 100}),
        (RowSample(), {"indexer": (8, 64), "activation": "relu", "documents": True, "log_sum": True}),
        (RowSample(0.5, draw=1), {"indexer": (8, 128), "activation": "relu", "documents": True}),
        (RowSample(), {"indexer": (3, 128), "log_sum": True}),
    ],
    ids=["sigmoid", "relu", "sample", "three heads"],
)
def test_bf16_in_chunks(
    device: str, rows: RowSample, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither chunks nor repetitions change a bit."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 64)
    problem = make_problem("packed mask", 250 if device == "cpu" else 1600, device, dtype=BF16, **options)
    cut(monkeypatch, BF16_BLOCKS)
    got = check(problem, rows)
    loss = through_api(problem, "triton", rows)
    assert_same(differentiate(problem, loss), got)
    cut(monkeypatch, BF16_BLOCKS, 1)
    assert_same(differentiate(problem, loss), got)


@pytest.mark.parametrize("form", ["packed mask", "key lists"])
def test_saturated_scores(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, SMALL)
    check(make_problem(form, 50, device, size=6.0, beta=5.0, batch=1))


@on_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [*range(1, 9), 12, 16])
def test_groups_of_heads_in_bf16(device: str, group: int, form: str) -> None:
    """The target is a sum over the query heads of each key-value head."""
    for heads, head_size in (((2 * group, 2), 128), ((group, 1), 64), ((group, 1), 256)):
        check(
            make_problem(
                form,
                301,
                device,
                dtype=BF16,
                indexer=(4, 64),
                heads=heads,
                head_size=head_size,
                documents=True,
            )
        )


@on_gpu
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1000, 1536, 3001])
def test_long_sequences(
    device: str, length: int, form: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At training shapes there are several segments and chunks. Two repetitions agree in bits."""
    if length > 2000 and form in ("packed mask", "key lists"):
        pytest.skip("the reference would take long")
    cut(monkeypatch, None, 2**22)
    problem = make_problem(
        form, length, device, dtype=BF16, indexer=(4, 64), documents=documents, log_sum=documents
    )
    assert_same(check(problem), differentiate(problem, through_api(problem, "triton", RowSample())))


@pytest.mark.parametrize(
    ("form", "log_sum"), [("packed mask", False), ("packed mask", True), ("key lists", False)]
)
def test_rows_without_target_or_attended_keys(
    device: str, form: str, log_sum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows (queries) without a target, and rows without attended keys, have a loss and gradients of 0. If the
    selection's log-sum is given, every row has a target, so only rows without attended keys are tested."""
    cut(monkeypatch, SMALL, 1)
    problem = make_problem(form, 50, device, batch=1, log_sum=log_sum)
    mask = problem.mask.clone()
    mask[:, 40] = False
    problem = problem.attending_to(mask)
    empty = [40]
    if not log_sum:
        problem.lse[..., 7] = 1e4  # all probabilities are 0
        empty.append(7)
    got = check(problem)
    for row in empty:
        assert (got.rows[:, row] == 0).all()
        assert (got.grads["queries"][:, row] == 0).all()
        assert (got.grads["head_weight_logits"][:, row] == 0).all()


@pytest.mark.parametrize("form", ["packed mask", "key lists"])
def test_temperature_scale_and_frozen_tensors(
    device: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature may be a number or have one dimension. The upstream gradient scales all gradients."""
    cut(monkeypatch, SMALL)
    problem = make_problem(form, 33, device, batch=1)
    once = differentiate(problem, through_api(problem, "triton", RowSample()))
    queries, beta = (problem.tensors[name].clone() for name in ("queries", "inverse_temperature"))
    beta = beta.reshape(1).requires_grad_()

    def loss(indexer: Indexer) -> torch.Tensor:
        return through_api(problem, "triton", RowSample())(indexer, problem.q, problem.k)[0]

    total = loss(replace(problem.indexer, queries=queries.requires_grad_(), inverse_temperature=beta))
    grads = torch.autograd.grad(total, (queries, beta), torch.tensor(0.25, device=device))
    assert torch.equal(grads[0], 0.25 * once.grads["queries"])
    assert torch.equal(grads[1], 0.25 * once.grads["inverse_temperature"].reshape(1))
    frozen = loss(replace(problem.indexer, inverse_temperature=1.7))
    assert not frozen.requires_grad
    assert torch.equal(frozen, once.total)


@pytest.mark.parametrize("form", ["packed mask", "key lists"])
def test_chunks_and_repetitions_change_nothing(
    device: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the queries in chunks gives bitwise identical results, because the order of sums over tiles does not
    change. With key lists, the keys' gradients may differ by rounding, because each chunk adds its own sum."""
    problem = make_problem(form, 70, device, documents=True, batch=1)
    calls: list[int] = []

    def counted(name: str) -> None:
        make = getattr(operations_triton, name)

        def made(
            q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, *given: Any, **options: Any
        ) -> torch.Tensor:
            target: torch.Tensor = make(q, k, lse, *given, **options)
            calls.append(target.shape[1])
            return target

        monkeypatch.setattr(operations_triton, name, made)

    counted("head_sum_probs_rows" if form == "packed mask" else "head_sum_probs_lists")
    loss = through_api(problem, "triton", RowSample())
    cut(monkeypatch, SMALL)
    whole = differentiate(problem, loss)
    assert_same(differentiate(problem, loss), whole)
    assert calls == [70, 70]
    cut(monkeypatch, SMALL, 1)
    calls.clear()
    chunked = differentiate(problem, loss)
    assert calls == [32, 32, 6]
    assert_same(chunked, whole, near=() if form == "packed mask" else ("keys",))


def test_the_sums_of_selection_and_attention_spare_a_pass(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the caller passes the log-sum-exps of attention and of the selected scores, the loss does not launch the
    `stats` kernel. An error of 1e-3 in the log-sum-exps of the scores changes the loss by less than 1e-6 per row."""
    cut(monkeypatch, SMALL)
    names = ["scores", "queries", "keys"]
    kernels: list[list[str]] = []
    launches = triton_launch.chunk_launches

    def recorded(*arguments: Any) -> dict[str, Any]:
        made = launches(*arguments)
        kernels.append(list(made))
        return made

    monkeypatch.setattr(triton_launch, "chunk_launches", recorded)
    problem = make_problem("packed mask", 64, device, batch=1, log_sum=True)
    loss = partial(through_api, implementation="triton", rows=RowSample())
    got = differentiate(problem, loss(problem))
    selection = problem.selection
    assert selection is not None
    assert selection.log_sum is not None
    off = replace(problem, selection=replace(selection, log_sum=selection.log_sum + 1e-3))
    wrong = differentiate(problem, loss(off))
    differentiate(problem, loss(replace(problem, selection=replace(selection, log_sum=None))))
    assert kernels == [names, names, ["stats", *names]]
    assert 0 < (wrong.total - got.total).abs() < 64 * 1e-6
    difference = (wrong.grads["keys"] - got.grads["keys"]).norm() / got.grads["keys"].norm()
    assert 1e-5 < difference < 1e-2


def of_target(problem: Problem, target: Any, row_sum: float | None = None, **options: Any) -> Any:
    """Compute the loss with a target that is a tensor of all rows or a function of the rows."""
    selection = problem.selection
    assert selection is not None
    log_sum = selection.log_sum if row_sum is not None else None
    attended = Attended(selection.packed_mask, log_sum, problem.geometry)

    def of_rows(rows: SampledRows) -> torch.Tensor:
        given: torch.Tensor = target[:, rows.rows(target.device)]
        return given

    made = Target(of_rows if isinstance(target, torch.Tensor) else target, row_sum)
    return lambda indexer, q, k: triton_indexer_loss(indexer, made, attended, **options)


def test_value_near_its_minimum(device: str) -> None:
    """The target differs from the softmax of the scores by about 1%. Therefore the KL is much smaller than the log-sums
    from which it is computed. Still, the rounding of the log-sums must not change the KL by more than 0.003%."""
    problem = make_problem("packed mask", 100, device, batch=1, log_sum=True)
    q = problem.scores().masked_fill(~problem.mask, float("-inf")).softmax(-1)
    noise = 1 + 0.012 * torch.randn(100, 100, generator=torch.Generator().manual_seed(5)).to(device)
    target = renormalise_target((q * noise).float(), problem.mask)
    p = renormalise_target(target.double(), problem.mask)
    exact = torch.where(p > 0, p * (p.log() - q.log()), 0).nan_to_num(0.0).sum()
    assert 2e-5 < exact / 100 < 2e-4
    for row_sum in (None, 1.0):
        total = differentiate(problem, of_target(problem, target, row_sum, blocks=SMALL)).total
        torch.testing.assert_close(total.double(), exact, rtol=3e-5, atol=0)
