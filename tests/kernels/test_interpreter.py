"""Tests bf16 and NaN in the patched interpreter (helpers/interpreter.py), on which the other tests rely."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU")


@triton.jit
def _round_kernel(x, rounded, squares, halves, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    value = tl.load(x + place).to(tl.bfloat16)
    tl.store(rounded + place, value)
    square = value * value
    tl.store(squares + place, square)
    tl.store(halves + place, tl.where(value > square, value, square).to(tl.float16))


@triton.jit
def _product_kernel(a, b, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    place = index[:, None] * SIZE + index[None, :]
    tl.store(out + place, tl.dot(tl.load(a + place), tl.trans(tl.load(b + place))))


def test_bf16_is_rounded_to_the_nearest_and_calculated_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.logspace(-41, 4, 4096)
    x[:5] = torch.tensor([0.0, float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8])  # two ties
    rounded, squares = torch.empty(2, 4096, dtype=torch.bfloat16)
    halves = torch.empty(4096, dtype=torch.float16)
    _round_kernel[(1,)](x, rounded, squares, halves, SIZE=4096)
    wanted = x.bfloat16()
    square = wanted * wanted
    for found, value in (
        (rounded, wanted),
        (squares, square),
        (halves, torch.where(wanted > square, wanted, square).half()),
    ):
        torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


def test_products_of_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 32, 32, generator=generator).bfloat16()
    out = torch.empty(32, 32)
    _product_kernel[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out, a.float() @ b.float().T)


@triton.jit
def _extremes_kernel(x, y, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    left, right = tl.load(x + place), tl.load(y + place)
    tl.store(out + place, tl.maximum(left, right))
    tl.store(out + SIZE + place, tl.minimum(left, right))
    tl.store(out + 2 * SIZE + place, tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * SIZE + place, tl.minimum(left, right, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4 * SIZE + place, tl.max(left, 0) + tl.zeros([SIZE], tl.float32))
    tl.store(out + 5 * SIZE + place, tl.min(left, 0) + tl.zeros([SIZE], tl.float32))


def test_extremes_of_a_number_and_a_nan_match_a_gpu() -> None:
    nan = float("nan")
    x, y = torch.tensor([nan, 1.0, nan, 3.0]), torch.tensor([2.0, nan, nan, 4.0])
    out = torch.empty(6, 4)
    _extremes_kernel[(1,)](x, y, out, SIZE=4)
    wanted = [[2, 1, nan, 4], [2, 1, nan, 3], [nan, nan, nan, 4], [nan, nan, nan, 3], [3] * 4, [1] * 4]
    torch.testing.assert_close(out, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _operators_kernel(x, y, out, truths, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Operands are a column and a row, numbers, constants and pointers."""
    index = tl.arange(0, SIZE)
    left, right = tl.load(x + index)[:, None], tl.load(y + index)[None, :]
    place = index[:, None] * SIZE + index[None, :]
    block = SIZE * SIZE
    tl.store(out + place, left + right)
    tl.store(out + block + place, left - right)
    tl.store(out + 2 * block + place, left * right)
    tl.store(out + 3 * block + place, 3 - left * STEP + right)
    tl.store(truths + place, (left < right) & (left != 2))
    tl.store(truths + block + place, (left >= right) | (right == STEP))
    tl.store(truths + 2 * block + place, (left <= 0.0) ^ (right > 1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
def test_operators_at_once_are_torchs(dtype: torch.dtype) -> None:
    nan, largest = float("nan"), 2**31 - 1
    x = torch.tensor(
        [2, -1, 0, largest] if not dtype.is_floating_point else [2.0, nan, -0.0, 1e-40], dtype=dtype
    )
    y = torch.tensor(
        [2, 7, -3, largest] if not dtype.is_floating_point else [0.0, nan, 7.0, 1e38], dtype=dtype
    )
    out = torch.empty(4, 4, 4, dtype=dtype)
    truths = torch.empty(3, 4, 4, dtype=torch.bool)
    _operators_kernel[(1,)](x, y, out, truths, SIZE=4, STEP=7)
    left, right = x[:, None], y[None, :]
    wanted = [left + right, left - right, left * right, 3 - left * 7 + right]
    torch.testing.assert_close(out, torch.stack(wanted), rtol=0, atol=0, equal_nan=True)
    said = [(left < right) & (left != 2), (left >= right) | (right == 7), (left <= 0) ^ (right > 1)]
    assert torch.equal(truths, torch.stack(said))


@triton.jit
def _shifts_kernel(x, y, out, SIZE: tl.constexpr, BITS: tl.constexpr):
    index = tl.arange(0, SIZE)
    value, bits = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, value >> BITS)
    tl.store(out + SIZE + index, value << BITS)
    tl.store(out + 2 * SIZE + index, value >> bits)
    tl.store(out + 3 * SIZE + index, (value.to(tl.uint32, bitcast=True) >> BITS).to(tl.int32))


def test_shifts_at_once_keep_the_sign_of_what_has_one() -> None:
    x, y = torch.tensor([5, -5, 2**31 - 1, -(2**31)]).int(), torch.tensor([0, 1, 30, 31]).int()
    out = torch.empty(4, 4, dtype=torch.int32)
    _shifts_kernel[(1,)](x, y, out, SIZE=4, BITS=2)
    assert torch.equal(out, torch.stack([x >> 2, x << 2, x >> y, ((x.long() & 0xFFFFFFFF) >> 2).int()]))


@triton.jit
def _casts_kernel(x, y, wide, out, SIZE: tl.constexpr):
    """Operands have 32 and 64 bits, with casts and new axes of tensors of two elements."""
    index = tl.arange(0, SIZE)
    value, long = tl.load(x + index), tl.load(y + index)
    tl.store(wide + index, value * long)
    tl.store(wide + SIZE + index, long - value)
    tl.store(wide + 2 * SIZE + index, (value < long).to(tl.int64))
    tl.store(wide + 3 * SIZE + index, (value.to(tl.float32) / 2).to(tl.int64) + value.to(tl.int8))
    square = value[:, None].to(tl.float64) * value[None, :]
    cube = square[:, None, :] + index[None, :, None].to(tl.float32)
    tl.store(
        out + (index[:, None] * SIZE + index[None, :])[:, None, :] + index[None, :, None] * SIZE * SIZE, cube
    )


def test_casts_and_new_axes_at_once_are_torchs() -> None:
    x, y = torch.tensor([5, -7, 2**31 - 1, -(2**31)]).int(), torch.tensor([2**40, -1, 3, -(2**31)])
    wide, out = torch.empty(4, 4, dtype=torch.int64), torch.empty(4, 4, 4, dtype=torch.float64)
    _casts_kernel[(1,)](x, y, wide, out, SIZE=4)
    halves = (x.float() / 2).long() + x.to(torch.int8)
    assert torch.equal(wide, torch.stack([x * y, y - x, (x < y).long(), halves]))
    square = x[:, None].double() * x
    assert torch.equal(out, square + torch.arange(4.0)[:, None, None])
