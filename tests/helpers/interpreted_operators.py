"""Speeds up Triton's interpreter: a single numpy call replaces each common operator, cast or indexing operation. All
other cases go through Triton's own checks, so code that Triton's compiler refuses still raises an error."""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

NUMBERS = frozenset({int, float, bool})
NAMES = {"fp32": "float32", "fp64": "float64"}
"""Types with a different name in triton.language."""
COMPARISONS = frozenset({np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal})
BITWISE = frozenset({np.bitwise_and, np.bitwise_or, np.bitwise_xor})
SHIFTS = frozenset({np.left_shift, np.right_shift})
AT_ONCE = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__rsub__": np.subtract,
    "__mul__": np.multiply, "__rmul__": np.multiply, "__and__": np.bitwise_and, "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor, "__lshift__": np.left_shift, "__rshift__": np.right_shift, "__lt__": np.less,
    "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip
"""Maps operators of tensors to the operation on their elements."""
OFFSETS = ("int32", "int64")
"""Types that are added to pointers. With one of each, numpy's result has 64 bits, as in Triton."""
WHOLE_NUMBERS = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})
BY_NUMPY = WHOLE_NUMBERS | {"fp32", "fp64"}
"""Types that numpy casts to each other as Triton does."""
ALL = slice(None)

Call = Callable[..., Any]


def operators_at_once(members: dict[str, Call]) -> dict[str, Call]:
    """Return fast operators of tensors by name; `members` are Triton's operators, for all other cases."""
    found = {name: _at_once(name, operator, members[name]) for name, operator in AT_ONCE.items()}
    return found | {
        "__getitem__": _new_axes_at_once(members["__getitem__"]),
        "to": _to_at_once(members["to"]),
    }


def _at_once(name: str, operator: Any, whole: Call) -> Call:
    """Return a fast version of `whole`, one of Triton's operators. For common operands, such as two tensors of one type
    or a tensor and a number, the result has the values and type that `whole` returns. For all other operands, the
    fast version calls `whole`."""
    compares, reflected, adds = (
        operator in COMPARISONS,
        name in ("__radd__", "__rsub__", "__rmul__"),
        operator is np.add,
    )
    types, mixed = {"int32", "int64", "uint32"}, frozenset(OFFSETS)
    if operator not in SHIFTS:
        types |= {"int1"} if operator in BITWISE else {"fp32", "fp64"}
    if operator in SHIFTS or operator in BITWISE:
        mixed = frozenset()
    builder = interpreter.interpreter_builder

    def call(self: Any, other: Any, **kwargs: Any) -> Any:
        kind, dtype, shaped = type(other), self.dtype, self.type
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        own = dtype.name
        is_offset = adds and dtype.is_ptr()
        if kind is core.tensor:
            of_other = other.dtype.name
            if is_offset:
                if of_other not in OFFSETS:
                    return whole(self, other, **kwargs)
            elif of_other != own:
                if own not in mixed or of_other not in mixed:
                    return whole(self, other, **kwargs)
                dtype = core.int64
            elif own not in types:
                return whole(self, other, **kwargs)
            handle, sizes = other.handle, other.type.sizes
            if shaped.sizes != sizes:
                shaped = block(dtype, joined(shaped.sizes, sizes))
            elif dtype is core.int64:
                shaped = block(dtype, sizes)
        elif kind in NUMBERS and (is_offset or own in types):
            handle = constant_of(other, "int32" if is_offset else own)
            if handle is None or (compares and kind is float and _may_be_fp64(other)):
                return whole(self, other, **kwargs)
        else:
            return whole(self, other, **kwargs)
        if is_offset:
            return core.tensor(builder.create_addptr(self.handle, handle), shaped)
        left, right = self.handle.data, handle.data
        found = operator(right, left) if reflected else operator(left, right)
        if compares:
            return _tensor_of(found, core.int1, block(core.int1, shaped.sizes))
        return _tensor_of(found, dtype, shaped)

    return call


def _new_axes_at_once(whole: Call) -> Call:
    """Return a fast version of `x[:, None]` and similar indices."""

    def call(self: Any, slices: Any, **kwargs: Any) -> Any:
        left, shape = list(self.type.sizes), []
        if type(slices) is not tuple or len(slices) - slices.count(None) != len(left) or not left:
            return whole(self, slices, **kwargs)
        for part in slices:
            if part is None:
                shape.append(1)
            elif type(part) is slice and part == ALL:
                shape.append(left.pop(0))
            else:
                return whole(self, slices, **kwargs)
        return _tensor_of(self.handle.data[slices], self.dtype, block(self.dtype, tuple(shape)))

    return call


def _to_at_once(whole: Call) -> Call:
    def to(self: Any, wanted: Any, *options: Any, **kwargs: Any) -> Any:
        if options or kwargs:
            return whole(self, wanted, *options, **kwargs)
        return interpreter.interpreter_semantic.cast(
            self, wanted.value if type(wanted) is core.constexpr else wanted
        )

    return to


def cast_at_once(whole: Call) -> Call:
    """Return a fast version of the `cast` in Triton's semantics."""

    def cast(self: Any, source: Any, wanted: Any, fp_downcast_rounding: Any = None) -> Any:
        name, dtype = source.dtype.name, wanted.scalar
        if name == dtype.name:
            return source
        sizes = source.type.sizes
        if (
            fp_downcast_rounding is not None
            or dtype.name not in BY_NUMPY
            or (name not in BY_NUMPY and name != "int1")
            or (wanted.sizes and not sizes)
        ):
            return whole(self, source, wanted, fp_downcast_rounding)
        data = source.handle.data.astype(interpreter._get_np_dtype(dtype))
        return _tensor_of(data, dtype, block(dtype, sizes))

    return cast


def to_tensor_at_once(whole: Call) -> Call:
    """Return a fast version of Triton's `to_tensor`, which the interpreter calls at each assignment. The fast version
    returns tensors unchanged. It converts each number only once, and then reuses the result."""
    numbers = lru_cache(maxsize=4096, typed=True)(
        lambda number: whole(interpreter.interpreter_semantic, number)
    )

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is core.tensor:
            return value
        if kind in NUMBERS:
            known = numbers(value)
            return core.tensor(known.handle, known.type)
        return whole(self, value, check_type)

    return to_tensor


def _tensor_of(data: Any, dtype: Any, kind: Any) -> Any:
    """Build a tensor as its constructors do; numpy gave `data` the size of its type."""
    handle = interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor = core.tensor.__new__(core.tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, kind, dtype
    return tensor


@lru_cache(maxsize=4096, typed=True)
def constant_of(number: int | float, name: str) -> Any:
    """Return a handle of this type; None if the number would get another type or an error."""
    dtype = getattr(core, NAMES.get(name, name))
    if not fits(number, dtype):
        return None
    data = np.array([number or 0], dtype=interpreter._get_np_dtype(dtype))  # no zero is negative
    return interpreter.TensorHandle(data, dtype)


def _may_be_fp64(number: float) -> bool:
    """Return whether the number is outside fp32's normal range, so that Triton may compare in fp64."""
    return 0 < abs(number) < 2.0**-126 or 3e38 < abs(number) < math.inf


_blocks: dict[tuple[str, tuple[int, ...]], Any] = {}


def block(dtype: Any, sizes: tuple[int, ...]) -> Any:
    """Return the immutable type of tensors of this shape."""
    key = dtype.name, sizes
    if key not in _blocks:
        _blocks[key] = core.block_type(dtype, list(sizes)) if sizes else dtype
    return _blocks[key]


@cache
def joined(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return np.broadcast_shapes(left, right)


def fits(number: Any, dtype: Any) -> bool:
    """Return whether the number converts to this type without an error or another common type."""
    if dtype.is_floating():
        return dtype.name in ("fp32", "fp64")
    if type(number) is float or dtype.is_ptr() or dtype.is_int1():
        return False
    return bool(dtype.get_int_min_value() <= number <= dtype.get_int_max_value())
