"""Patches Triton's interpreter for the tests: three times as fast, and right for bf16 and NaN.

The interpreter of Triton 3.7 is slow for four reasons. First, it repeats integer operations in 64 bits to find
overflows, although it reports overflows only in debug mode. Second, each call of a device function lists all members of
triton.language. Third, each operation rebuilds tables of types and shapes. Fourth, each operation makes a dozen Python
calls before it calls numpy. The patch avoids this work (see also interpreted_operators.py).

The interpreter is also wrong for bf16. It stores a bf16 value as a 16-bit integer, and adds and multiplies these
integers as if they were the values. It casts fp32 to bf16 by truncation, without rounding. After the patch, matrix
products, casts and operations of two bf16 tensors are right. As on a GPU, kernels must cast to fp32 before functions of
a single tensor (such as exp) and before sums along an axis.
"""

import dataclasses
import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter

from helpers.interpreted_operators import (
    NUMBERS,
    block,
    cast_at_once,
    constant_of,
    fits,
    joined,
    operators_at_once,
    to_tensor_at_once,
)

ROUND_TO_NEAREST = interpreter._ir.ROUNDING_MODE.RTNE
FP8 = {core.float8e4nv: torch.float8_e4m3fn, core.float8e5: torch.float8_e5m2}
PLAIN = frozenset(
    {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}
)
"""Types that are not compiler constants and contain none."""


def mend_interpreter() -> None:
    """Patch the interpreter for the life of this process, before a kernel has run in it."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "in debug mode the check for overflows is real"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _remember_numpy_types()
    _remember_builtins()
    _remember_shapes()
    _leave_shapes_to_numpy()
    _multiply_in_fp64()
    _calculate_bf16()
    _compare_as_a_gpu()


def _remember_numpy_types() -> None:
    find_np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = find_np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._get_np_dtype = get_np_dtype


def _remember_builtins() -> None:
    @cache
    def builtins_of(package: Any) -> dict[str, Any]:
        found = {name: member for name, member in inspect.getmembers(package) if core.is_builtin(member)}
        members = {name: interpreted(member) for name, member in found.items()}
        if package is core.tensor:
            members |= operators_at_once(members)
        return members

    checking = core.builtin(
        lambda: None
    ).__code__  # code of functions that ask for `_semantic` before each call

    def interpreted(member: Any) -> Any:
        own = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return own(*args, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        members = builtins_of(package)
        first = next(iter(members), None)
        if first is None or getattr(package, first) is members[first]:
            return  # the calling kernel has replaced all of them
        for name, member in members.items():
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_builtin
    patched: set[Any] = set()  # functions that this launch has called
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = call_function


def _remember_shapes() -> None:
    """Cache the shapes of tensors, which are read-only."""
    unwrap = core._unwrap_if_constexpr

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    make_whole_block = core.block_type.__init__
    blocks: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int, str]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([s if type(s) is int else unwrap_if_constexpr(s) for s in shape])
        if key not in blocks:
            make_whole_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty, self.sizes = element_ty, key[1]
        self.shape, self.numel, self.name = blocks[key]

    @cache
    def describe(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.element_ty if type.sizes else type

    core.dtype.sizes = ()
    core.dtype.__eq__ = equal
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.tensor.__init__ = make_tensor
    core.tensor.numel = property(lambda self: describe(self.type.sizes)[0])
    core.tensor.shape = property(lambda self: describe(self.type.sizes)[1])
    core.block_type.__init__ = make_block


def _leave_shapes_to_numpy() -> None:
    """Let numpy broadcast operands instead of expanding them first.

    This patch covers four pairs of operands: two tensors of one type, a tensor and a number, a pointer and an offset,
    and an int32 and an int64 tensor. Each operand is declared with the result's shape. The operand's numpy array is not
    expanded, because numpy broadcasts it. Triton handles all other operands.
    """
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    halves, widths = ("fp16", "bf16"), ("int32", "int64")

    def of_shape(tensor: Any, shape: tuple[int, ...]) -> Any:
        if tensor.type.sizes == shape:
            return tensor
        return core.tensor(tensor.handle, block(tensor.dtype, shape))

    def in_64_bits(tensor: Any) -> Any:
        if tensor.dtype.name == "int64":
            return tensor
        handle = interpreter.TensorHandle(tensor.handle.data.astype(np.int64), core.int64)
        return core.tensor(handle, block(core.int64, tensor.type.sizes))

    def operands(
        self: Any,
        left: Any,
        right: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic: bool = True,
        division: bool = False,
    ) -> tuple[Any, Any]:
        kinds = type(left) is core.tensor, type(right) is core.tensor
        if kinds == (True, True):
            one, other = left.dtype, right.dtype
            same = one.name == other.name and not one.is_ptr() and not (division and one.name in halves)
            offset = left_pointer and one.is_ptr() and other.is_int()
            if same or offset:
                shape = joined(left.type.sizes, right.type.sizes)
                return of_shape(left, shape), of_shape(right, shape)
            if arithmetic and one.name in widths and other.name in widths:
                shape = joined(left.type.sizes, right.type.sizes)
                return of_shape(in_64_bits(left), shape), of_shape(in_64_bits(right), shape)
        elif arithmetic and kinds[0] and type(right) in NUMBERS and fits(right, left.dtype):
            return left, core.tensor(constant_of(right, left.dtype.name), left.type)
        elif arithmetic and kinds[1] and type(left) in NUMBERS and fits(left, right.dtype):
            return core.tensor(constant_of(left, right.dtype.name), right.type), right
        return check(self, left, right, left_pointer, right_pointer, arithmetic, division)

    semantic.cast = cast_at_once(semantic.cast)
    semantic.to_tensor = to_tensor_at_once(semantic.to_tensor)
    semantic.binary_op_type_checking_impl = operands


def _multiply_in_fp64() -> None:
    """Compute matrix products in fp64 and round them to fp32. The order in which numpy adds depends on shapes and
    processor. In fp64 this order changes a sum so little that the value rounded to fp32 rarely changes."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        assert d.dtype.scalar == core.float32, d.dtype
        product = np.matmul(*(_in_fp32(x).data.astype(np.float64) for x in (a, b)))
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, core.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _calculate_bf16() -> None:
    """Compute in fp32, rounded to nearest if the result is bf16."""
    builder = interpreter.InterpreterBuilder
    calculate = builder.binary_op

    def cast(self: Any, source: Any, to_type: Any) -> Any:
        values, wanted = _in_fp32(source).data, to_type.scalar
        if wanted.name == "bf16":
            return _rounded(values.astype(np.float32))
        if wanted in FP8:  # Triton's interpreter loses carries into the exponent, and NaN.
            rounded = torch.from_numpy(np.atleast_1d(values)).to(FP8[wanted]).view(torch.uint8)
            return interpreter.TensorHandle(rounded.numpy().reshape(values.shape), wanted)
        return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(wanted)), wanted)

    def cast_between_floats(self: Any, source: Any, to_type: Any, rounding_mode: Any) -> Any:
        assert rounding_mode in (None, ROUND_TO_NEAREST), rounding_mode
        return cast(self, source, to_type)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.name != "bf16":
            return calculate(self, left, right, operation)
        found = operation(_in_fp32(left).data, _in_fp32(right).data)
        if found.dtype == np.float32:
            return _rounded(found)
        return interpreter.TensorHandle(found, core.int1)

    builder.cast_impl = cast
    builder.create_fp_to_fp = cast_between_floats
    builder.binary_op = binary


def _compare_as_a_gpu() -> None:
    """If one of two numbers is NaN, let their maximum and minimum be the other number, as on a GPU (PTX: max.f32,
    min.f32). Reductions along an axis already do this. Operations that should return the NaN (create_maximumf,
    create_minimumf) are not changed."""
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    reinterpret = builder.create_bitcast

    def bitcast(self: Any, source: Any, to_type: Any) -> Any:
        """Map every NaN to 0x7FFFFFFF, the only NaN of a GPU's arithmetic; a CPU's NaN has either sign."""
        if source.dtype.scalar == core.float32:
            bits = np.where(np.isnan(source.data), np.uint32(0x7FFFFFFF), source.data.view(np.uint32))
            source = interpreter.TensorHandle(bits.view(np.float32), core.float32)
        return reinterpret(self, source, to_type)

    builder.create_bitcast = bitcast


def _in_fp32(handle: Any) -> Any:
    """Convert bf16 to fp32; return others unchanged."""
    if handle.dtype.name != "bf16":
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), core.float32)


def _rounded(values: Any) -> Any:
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    halves = np.where(np.isnan(values), 0x7FC0, halves)
    return interpreter.TensorHandle(halves.astype(np.uint16), core.bfloat16)
