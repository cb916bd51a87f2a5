"""Layers of `FusedDecoder`'s step with gsa_kernels' products for few rows.

A sparse layer that selects has eight launches for one sequence without norms of q and k, else nine.

Each starts while the previous one ends, so that the weights stream without a gap. Functions with the same names and
arguments as in joined_layers.py, which computes the same in plain torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .kernel_pass_gsa import kernel_module


class Entry(NamedTuple):
    """The joined product of a layer, not yet multiplied."""

    launch: Callable[..., Any]
    """`enter_row` without its `part`."""


class Attended(NamedTuple):
    """Attention's output [B, H, D] without its gate, and that gate before its sigmoid."""

    out: torch.Tensor
    gate: torch.Tensor
    awaited: Any
    """`Awaited`: marks when the output is ready, since the gate's kernel, the last one, does not wait for it."""


class Parts(NamedTuple):
    """Sections of a layer's joined product, in order of launch, if `enters_at_once`."""

    front: tuple[str, ...]
    beside_selection: tuple[str, ...]
    beside_attention: tuple[str, ...]


def parts(selects: bool, gated: bool) -> Parts:
    """Of a layer: whether it selects in this step, and whether it has G1, which attention needs not: the product with
    W_O applies it. In front is what the next kernel needs.

    A layer that keeps its selection has no use for the indexer's queries: the one sequence is inside its block, and
    whoever makes the block's selection again takes the queries of its first token from the cache.
    """
    if selects:
        return Parts(("index",), ("heads",), ("gate",) if gated else ())
    return Parts(("heads",), (), ("gate", "index key")) if gated else Parts(("heads", "index key"), (), ())


def why_not(layers: list[Any], dtype: torch.dtype, batch: int) -> str | None:
    """What keeps the kernels from taking layers of these weights and sizes; None: nothing."""
    limits = kernel_module("limits")
    if dtype not in (torch.bfloat16, torch.float32):
        return f"weights of {dtype}"
    if batch not in limits.ROW_PRODUCT_ROWS:
        return f"a batch of {batch}, of at most {limits.ROW_PRODUCT_ROWS[-1]}"
    for weights, sizes in layers:
        for name in ("joined", "out", "gate_up", "down"):
            columns = getattr(weights, name).shape[1]
            if columns not in limits.ROW_PRODUCT_COLUMNS:
                most, step = limits.ROW_PRODUCT_COLUMNS[-1], limits.ROW_PRODUCT_COLUMNS.step
                return f"products of {columns} columns, of at most {most} in multiples of {step}"
        if weights.index_q_norm is not None:
            return "norms of the indexer"
        if sizes.index_weight_logit is not None:
            return "an indexer without head weights"
        if sizes.head_dim not in limits.HEAD_SIZES:
            return f"heads of {sizes.head_dim}, of {limits.HEAD_SIZES}"
    return None


def enters_at_once(layers: list[Any], batch: int) -> bool:
    """Whether `enter` of all layers is one launch, which takes the rotary angles from a table."""
    even = all(sizes.index_head_dim % 2 == 0 or sizes.row == 0 for _, sizes in layers)
    return batch == 1 and even and all(weights.q_norm is None for weights, _ in layers)


def embed(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [B] -> their rows of the weight [B, d], while the first layer's product asks for its own."""
    return kernel_module("row_product.look_up").look_up(tokens, weight)


def enter(h: torch.Tensor, layer: Any, sizes: Any, cache: Any, slot: torch.Tensor, rotary: Any) -> Any:
    """The joined product; norms, rotation, gate G2 and the writes into the cache. Two launches, or with a table of all
    angles one, which is still to be launched."""
    norm = kernel_module("row_product.reference").Norm(layer.norm, sizes.eps)
    formats = kernel_module("decode.entry_reference")
    q, k, _, value_gate, gate, index_key, _, index_weights, _ = sizes.parts
    columns = formats.EntrySizes(q, k, value_gate, gate, index_weights, sizes.head_dim, index_key, sizes.eps)
    buffers = formats.EntryCache(*cache)
    if isinstance(rotary, formats.AngleTable):
        product = formats.JoinedProduct(layer.joined, norm, layer.bias)
        enter_row = kernel_module("decode.joined").enter_row
        return Entry(partial(enter_row, h, product, columns, rotary, buffers, slot))
    projected = kernel_module("row_product.op").row_product(h, layer.joined, norm, layer.bias)
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        norms = (layer.q_norm, layer.k_norm)
    return kernel_module("decode.entry").enter_token(
        projected, columns, formats.Angles(*rotary), buffers, slot, norms
    )


def leave(h: torch.Tensor, attended: Any, layer: Any, sizes: Any) -> torch.Tensor:
    """Three launches: W_O with the residual, the gated product, its way back with the residual."""
    row_product = kernel_module("row_product.op").row_product
    norm = kernel_module("row_product.reference").Norm(layer.mlp_norm, sizes.eps)
    if isinstance(attended, Attended):
        out, gate, awaited = attended
        launch = kernel_module("row_product.triton_product").Launch(awaited=awaited)
        h = row_product(out.flatten(1), layer.out, residual=h, x_gate=gate.flatten(1), launch=launch)
    else:
        h = row_product(attended.flatten(1), layer.out, residual=h)
    return row_product(row_product(h, layer.gate_up, norm, gated=True), layer.down, residual=h)


def pass_on(
    h: torch.Tensor,
    attended: Any,
    left: tuple[Any, Any],
    entered: tuple[Any, Any],
    cache: Any,
    slot: torch.Tensor,
    rotary: Any,
) -> tuple[torch.Tensor, Any]:
    """`leave`, and `enter` of the next layer."""
    h = leave(h, attended, *left)
    return h, enter(h, *entered, cache, slot, rotary)


def finish(
    h: torch.Tensor,
    attended: Any,
    left: Any,
    norm: torch.Tensor,
    head: torch.Tensor,
    advances: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`leave`, and the logits [B, vocab]. Of one sequence also `advances`, two counters that become one more."""
    h = leave(h, attended, *left)
    given = kernel_module("row_product.reference").Norm(norm, left[1].eps)
    launch = kernel_module("row_product.triton_product").Launch(advances=advances)
    return kernel_module("row_product.op").row_product(h, head, given, launch=launch)
