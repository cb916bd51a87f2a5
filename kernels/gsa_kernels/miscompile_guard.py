"""Finds kernels that Triton compiles to wrong sums, and raises an error before such a kernel runs.

A sum (`tt.reduce`) can divide its axis among several warps. Each warp then stores a partial sum in shared memory, at an
address that depends on the warp's coordinate along the axis. In Triton 3.6 and 3.7, `delinearize` (Utility.cpp)
computes wrong coordinates if an axis uses bits of the warp index that are not adjacent. Layouts of reshaped matrix
products can be of this kind, depending on the GPU.

For example, bits 0 and 2 of the warp index can select rows, and bit 1 heads. In a sum over heads, Triton wrongly
stores all heads' partial sums at one address. The result contains only one of these sums, plus old memory contents.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

logger = logging.getLogger(__name__)

SUM = '"tt.reduce"('
TYPED_SUM = re.compile(
    re.escape(SUM) + r"[^\n]*<\{axis = (\d+) : i32.*?\}\) : \((tensor<[\dx]+\w+, (#[^\n]*?)>)(?:, tensor|\))",
    re.DOTALL,
)
"""Matches a `tt.reduce`: its axis, and the type and layout of its first operand."""

Layout = dict[str, list[list[int]]]
"""Gives what each bit of a `register`, `lane` or `warp` number adds to the coordinates."""


def refuse_wrong_sums() -> None:
    """Check every Triton kernel of this process when it is loaded for its first launch.

    If `wrong_sums` finds a wrong sum in a kernel, the launch of this kernel raises RuntimeError. If the module cannot
    parse the kernel's text, because it comes from another Triton version, a warning says that the kernel is not
    checked. A second call of this function changes nothing.
    """
    triton.knobs.runtime.kernel_load_start_hook.add(_check_kernel)


def wrong_sums(ttgir: str) -> list[str]:
    """Return the types of all operands that would be summed wrongly, in Triton's notation.

    Args:
        ttgir: the kernel in the TritonGPU dialect, from `CompiledKernel.asm`
    """
    layouts = {
        name: {part: _bases(body, part) for part in ("register", "lane", "warp")}
        for name, body in re.findall(r"^(#\w+) = #ttg\.linear<\{(.*)\}>", ttgir, re.MULTILINE)
    }
    wrong = []
    for axis, operand, layout in TYPED_SUM.findall(ttgir):
        bases = _resolve(layout, layouts)
        if bases is not None and _misplaces(bases, int(axis)):
            wrong.append(f"{operand} over axis {axis}")
    return wrong


def _check_kernel(module: Any, function: Any, name: str, files: Mapping[str, str], key: str) -> None:
    for path in (path for file, path in files.items() if file.endswith(".ttgir")):
        text = Path(path).read_text()
        if text.count(SUM) != len(TYPED_SUM.findall(text)):
            logger.warning("Triton %s: kernel %s is not checked for wrong sums", triton.__version__, name)
        if wrong := wrong_sums(text):
            raise RuntimeError(
                f"Triton {triton.__version__} compiles the kernel {name} to wrong sums on this GPU, of {wrong[0]}; "
                "run without it (training: gsa.attention_impl=reference), and please report this"
            )


def _bases(body: str, part: str) -> list[list[int]]:
    """Parse `lane = [[0, 1], [2, 0]]` in the text of a layout."""
    found = re.search(rf"\b{part} = (\[.*?\])(?:, \w+ =|$)", body)
    assert found is not None, body
    bases: list[list[int]] = ast.literal_eval(found.group(1))
    return bases


def _resolve(layout: str, layouts: Mapping[str, Layout]) -> Layout | None:
    """Return the linear layout, or the slice of a linear layout, with this name. Return None for other layouts. Triton
    compiles their sums correctly, because each axis uses adjacent bits."""
    if sliced := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
        dim, parent = int(sliced.group(1)), _resolve(sliced.group(2), layouts)
        if parent is None:
            return None
        return {part: [basis[:dim] + basis[dim + 1 :] for basis in bases] for part, bases in parent.items()}
    return layouts.get(layout)


def _misplaces(layout: Layout, axis: int) -> bool:
    """Return whether a sum over the axis is wrong in this layout.

    A sum is wrong if the lane bits of its axis are not adjacent. A sum that crosses warps is also wrong if Triton
    computes the coordinate of a warp or lane from bits of the wrong axis.
    """
    if not any(basis[axis] for basis in layout["warp"]):
        return _scattered([_axis_of(basis) for basis in layout["lane"]], axis)
    for part in ("warp", "lane"):
        counted = [dim for dim in map(_axis_of, layout[part]) if dim is not None]
        side_by_side = [dim for first in dict.fromkeys(counted) for dim in counted if dim == first]
        if [dim == axis for dim in counted] != [dim == axis for dim in side_by_side]:
            return True
    return _scattered([_axis_of(basis) for basis in layout["lane"]], axis)


def _axis_of(basis: list[int]) -> int | None:
    """Return the axis of a basis vector; None for a copy."""
    return next((dim for dim, step in enumerate(basis) if step), None)


def _scattered(axes: list[int | None], axis: int) -> bool:
    bits = [bit for bit, dim in enumerate(axes) if dim == axis]
    return bool(bits) and bits[-1] - bits[0] + 1 != len(bits)
