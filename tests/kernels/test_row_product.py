"""Compares products of few rows with fp64: interpreted on the CPU, or on a CUDA device."""

from typing import Any

import numpy as np
import pytest
import torch
from covering import covered
from kernel_devices import CUDA, ON_GPU

pytest.importorskip("triton")

from gsa_kernels.devices import interpreted
from gsa_kernels.row_product import op, reference
from gsa_kernels.row_product.look_up import look_up
from gsa_kernels.row_product.tiling import Tiling
from gsa_kernels.row_product.triton_product import Awaited, Launch, pieces
from helpers.corner_programs import run_corners

DEVICE = "cuda" if CUDA else "cpu"
NONE, BIAS, RESIDUAL, GATED = "none", "bias", "residual", "gated"


def operands(
    batch: int, columns: int, count: int, norm: bool, epilogue: str, dtype: torch.dtype, x_gate: bool = False
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch * columns + count)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)

    rows = count * 2 if epilogue == GATED else count
    return {
        "x": 3 * normal(batch, columns),
        "weight": normal(rows, columns) * columns**-0.5,
        "norm": reference.Norm(1 + normal(columns), 1e-5) if norm else None,
        "bias": normal(count) if epilogue in (BIAS, RESIDUAL) else None,
        "residual": normal(batch, count) if epilogue == RESIDUAL else None,
        "gated": epilogue == GATED,
        "x_gate": normal(batch, columns) if x_gate else None,
    }


def check(given: dict[str, Any], tiling: Tiling | None) -> None:
    """Check fp32 to its rounding, and bf16 to the rounding of the result and of x times the norm."""
    wide = {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    wanted = reference.row_product(**wide)
    found = op.row_product(**given, launch=Launch(tiling))
    assert found.dtype == given["x"].dtype
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (2e-6 if found.dtype == torch.float32 else 2**-8)
    assert torch.equal(found, op.row_product(**given, launch=Launch(tiling)))


@covered(
    "options",
    batch=[1, 3, 16],
    columns=[16, 64, 88, 176],
    count=[1, 20, 32],
    norm=[False, True],
    epilogue=[NONE, BIAS, RESIDUAL, GATED],
    dtype=[torch.float32, torch.bfloat16],
    x_gate=[False, True],
    small_tiles=[False, True],
)
def test_product(options: dict[str, Any]) -> None:
    options = dict(options)
    tiling = None
    if options.pop("small_tiles"):  # several rows of x need tiles of 16
        tiling = Tiling(2) if options["batch"] == 1 else Tiling(16, chunk=64, stages=2)
    check(operands(**options), tiling)


def test_a_product_that_awaits_a_counter() -> None:
    """The counting kernel has already ended; tests/gpu/test_chain_on_gpu.py covers one that still runs."""
    given = operands(1, 88, 20, False, RESIDUAL, torch.float32, x_gate=True)
    counter = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    found = op.row_product(**given, launch=Launch(awaited=Awaited(counter, 7)))
    assert torch.equal(found, op.row_product(**given))
    given = operands(2, 88, 20, False, NONE, torch.float32)
    with pytest.raises(ValueError, match="x has 2 rows with something awaited or advanced"):
        op.row_product(**given, launch=Launch(awaited=Awaited(counter, 7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [[6], [0, 3, 3]])
def test_looking_up_rows(tokens: list[int], dtype: torch.dtype) -> None:
    weight = torch.randn(7, 1100, device=DEVICE).to(dtype)
    places = torch.tensor(tokens, device=DEVICE)
    assert torch.equal(look_up(places, weight), weight[places])
    for wrong in ((places.int(), weight), (places, weight.T)):
        with pytest.raises(ValueError, match="pass contiguous tensors, tokens of int64"):
            look_up(*wrong)


def test_counters_advance() -> None:
    given = operands(1, 88, 20, True, NONE, torch.float32)
    counters = tuple(torch.tensor([5], dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.int32))
    found = op.row_product(**given, launch=Launch(Tiling(2), advances=counters))
    assert torch.equal(found, op.row_product(**given, launch=Launch(Tiling(2))))
    assert [counter.item() for counter in counters] == [6, 6]


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize(
    ("columns", "count", "norm", "epilogue", "x_gate"),
    [
        (2048, 6016, True, BIAS, False),
        (2048, 2048, False, RESIDUAL, False),
        (2048, 2048, False, RESIDUAL, True),
        (2048, 5504, True, GATED, False),
        (5504, 2048, False, RESIDUAL, False),
        (8192, 520, True, NONE, False),
    ],
)
@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_GPU)])
def test_sizes_of_a_model(batch, columns, count, norm, epilogue, x_gate, marked):
    check(operands(batch, columns, count, norm, epilogue, torch.bfloat16, x_gate), None)


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_GPU)])
def test_a_chain_reads_what_the_one_before_wrote(marked: None) -> None:
    """A graph of 200 products with early launches, each on the previous result, is replayed repeatedly."""
    weights = [torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16) * 2048**-0.5 for _ in range(8)]
    norm = reference.Norm(torch.ones(2048, device=DEVICE, dtype=torch.bfloat16), 1e-5)
    start = torch.randn(1, 2048, device=DEVICE, dtype=torch.bfloat16)

    def run(chained: bool) -> torch.Tensor:
        x = start
        for place in range(200):
            x = op.row_product(x, weights[place % 8], norm)
            if not chained:
                torch.cuda.synchronize()
        return x

    wanted = run(chained=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(chained=True)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.skipif(not interpreted(), reason="of the interpreter")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_of_more_than_2_to_the_31_elements(batch, gated, monkeypatch):
    """The weight has the size of an output layer. Only two programs run, the first and last, so most of the
    weight's memory is never touched."""
    columns, count = 64, 2**31 // 64 + 32
    run_corners(monkeypatch)
    rows = 2 * count if gated else count
    weight = torch.from_numpy(np.zeros((rows, columns), np.float32))
    weight[-1] = torch.linspace(-1, 1, columns)
    if gated:
        weight[count - 1] = 0.5
    x = torch.linspace(0, 3, batch * columns).view(batch, columns)
    tiling = Tiling(16, chunk=64, stages=2)
    found = op.row_product(x, weight, gated=gated, launch=Launch(tiling))[:, -1]
    wanted = x @ weight[-1]
    if gated:
        wanted = wanted * torch.nn.functional.silu(x @ weight[count - 1])
    torch.testing.assert_close(found, wanted)


def test_pieces_cover_the_columns() -> None:
    assert [pieces(columns) for columns in (16, 2048, 5504, 6144, 8192, 24)] == [
        (16, 0),
        (2048, 0),
        (4096, 2048),
        (4096, 2048),
        (8192, 0),
        (32, 0),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(17, 16)}, "x has 17 rows; pass 1 to 16"),
        (
            {"x": torch.zeros(1, 20), "weight": torch.zeros(4, 20)},
            "x has 20 columns; pass 16 to 8192, a multiple",
        ),
        ({"weight": torch.zeros(4, 24)}, r"weight has shape \(4, 24\)"),
        ({"weight": torch.zeros(3, 16), "gated": True}, "weight has 3 rows"),
        ({"bias": torch.zeros(4), "gated": True}, "gated is True with a bias"),
        ({"weight": torch.zeros(4, 16, dtype=torch.bfloat16)}, "weight is torch.bfloat16"),
        ({"weight": torch.zeros(16, 4).T}, "weight has stride"),
        ({"residual": torch.zeros(1, 5)}, r"residual has shape \(1, 5\)"),
        ({"x_gate": torch.zeros(1, 4)}, r"x_gate has shape \(1, 4\)"),
        ({"x": torch.zeros(1, 16).half(), "weight": torch.zeros(4, 16).half()}, "x has dtype torch.float16"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        op.row_product(**({"x": torch.zeros(1, 16), "weight": torch.zeros(4, 16)} | changes))
