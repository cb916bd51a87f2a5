"""Tests that kernels with wrong sums after compilation by Triton are found and rejected."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from gsa_kernels import miscompile_guard as wrong_sums

HAS_GPU = torch.cuda.is_available()


def reduce_of(operand: str, layout: str, axis: int) -> str:
    return (
        f'#linear = #ttg.linear<{{{layout}, block = []}}>\n%y = "tt.reduce"(%x) <{{axis = {axis} : i32}}> ({{\n'
        f"^bb0(%a: f32, %b: f32):\n  tt.reduce.return %a : f32\n}}) : ({operand}) -> tensor<4xf32, #other> loc(#loc)\n"
    )


@pytest.mark.parametrize(
    ("warps", "lanes", "axis", "found"),
    [
        ("[[4, 0, 0], [0, 1, 0], [8, 0, 0]]", "[[1, 0, 0], [2, 0, 0]]", 1, True),
        ("[[4, 0, 0], [8, 0, 0], [0, 1, 0]]", "[[1, 0, 0], [2, 0, 0]]", 1, False),
        ("[[0, 1, 0], [4, 0, 0], [8, 0, 0]]", "[[1, 0, 0], [2, 0, 0]]", 1, False),
        # The sum runs along the rows, whose second bit also follows the other axis.
        ("[[4, 0, 0], [0, 1, 0], [8, 0, 0]]", "[[1, 0, 0], [2, 0, 0]]", 0, True),
        ("[[4, 0, 0], [0, 1, 0], [8, 0, 0]]", "[[1, 0, 0], [2, 0, 0]]", 2, False),
        # Bits without a coordinate are copies and do not count.
        ("[[4, 0, 0], [0, 0, 0], [8, 0, 0], [0, 1, 0]]", "[[1, 0, 0], [2, 0, 0]]", 1, False),
        # Lanes along an axis that warps share, and lanes within a warp.
        ("[[0, 1, 0]]", "[[1, 0, 0], [0, 2, 0], [2, 0, 0]]", 1, True),
        ("[[8, 0, 0]]", "[[1, 0, 0], [0, 2, 0], [2, 0, 0]]", 1, False),
        ("[[0, 4, 0]]", "[[1, 0, 0], [0, 2, 0], [2, 0, 0]]", 0, True),
    ],
)
def test_a_sum_is_wrong_where_bits_of_its_axis_lie_between_others(
    warps: str, lanes: str, axis: int, found: bool
) -> None:
    layout = f"register = [[0, 0, 1]], lane = {lanes}, warp = {warps}"
    text = reduce_of("tensor<16x4x2xf32, #linear>", layout, axis)
    assert wrong_sums.wrong_sums(text) == ([f"tensor<16x4x2xf32, #linear> over axis {axis}"] if found else [])


def test_slices_several_operands_and_other_layouts() -> None:
    layout = "register = [], lane = [[0, 1, 0, 0]], warp = [[4, 0, 0, 0], [0, 0, 1, 0], [8, 0, 0, 0]]"
    sliced = "#ttg.slice<{dim = 1, parent = #linear}>"
    values = f"tensor<16x4x2xf32, {sliced}>"
    assert wrong_sums.wrong_sums(reduce_of(f"{values}, tensor<16x4x2xi32, {sliced}>", layout, 1)) == [
        f"{values} over axis 1"
    ]
    assert wrong_sums.wrong_sums(reduce_of("tensor<16x4xf32, #blocked>", layout, 1)) == []


def load(folder: Path, text: str) -> None:
    """Load a kernel as Triton does before its first launch."""
    (folder / "kernel.ttgir").write_text(text)
    files = {name: str(folder / name) for name in ("kernel.ttgir", "kernel.json")}
    wrong_sums._check_kernel(None, None, "kernel", files, "key")


def test_a_kernel_is_refused_or_said_to_be_unread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = ("[[4, 0, 0], [8, 0, 0], [0, 1, 0]]", "[[4, 0, 0], [0, 1, 0], [8, 0, 0]]")
    texts = {
        name: reduce_of(
            "tensor<16x4x2xf32, #linear>", f"register = [], lane = [[1, 0, 0]], warp = {warps}", 1
        )
        for name, warps in (("right", right), ("wrong", wrong))
    }
    load(tmp_path, texts["right"])
    assert caplog.text == ""
    with pytest.raises(
        RuntimeError, match="kernel to wrong sums on this GPU, of tensor<16x4x2xf32, #linear> over axis 1"
    ):
        load(tmp_path, texts["wrong"])
    load(tmp_path, texts["right"].replace("axis = 1 : i32", "axes = [1]"))
    assert "kernel kernel is not checked for wrong sums" in caplog.text


@pytest.mark.nightly
def test_what_triton_compiles() -> None:
    """Real layouts are tested: a wrong sum, a similar right sum, and two shipped configs for each GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).parents[1] / "helpers" / "compiled_elsewhere.py"
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    wrong = found.pop("rows, heads, rows")
    assert wrong == ["__main__.sum_of_heads_kernel: tensor<2x32x32xf32, #linear> over axis 0"]
    assert len(found) == 8
    assert not any(found.values()), found


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_wrong_kernel_is_refused_before_it_runs() -> None:
    """The error comes each time, and the kernel is really wrong. If this fails, Triton has fixed its sums."""
    from helpers.compiled_elsewhere import HEADS, ROWS, SIZE, sum_of_heads_kernel

    generator = torch.Generator("cuda").manual_seed(1)
    q, k = (torch.randn(rows, SIZE, device="cuda", generator=generator) for rows in (HEADS * ROWS, 32))
    exact = (q.double().view(HEADS, ROWS, SIZE) @ k.double().t()).sum(0)

    def launch() -> float:
        out = torch.full((ROWS, 32), float("nan"), device="cuda")
        sum_of_heads_kernel[(1,)](q, k, out, HEADS, ROWS, 32, num_warps=8)
        return (out - exact).abs().nan_to_num(9.0).max().item()

    wrong_sums.refuse_wrong_sums()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sum_of_heads_kernel to wrong sums"):
            launch()
    hooks = triton.knobs.runtime.kernel_load_start_hook
    hooks.remove(wrong_sums._check_kernel)
    try:
        assert launch() > 0.1
    finally:
        hooks.add(wrong_sums._check_kernel)
