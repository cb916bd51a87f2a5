"""Compute the layers of `FusedDecoder`'s step with kernels for matrix products with few rows (one row per sequence).

Each kernel starts before the previous kernel ends, and uses the overlap to prefetch its own weights. joined_layers.py
has functions with the same names and arguments in plain torch.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from .kernel_pass_gsa import kernel_module


class Attended(NamedTuple):
    """Holds the attention output [B, H, D] before its gate G1, and the logits of G1."""

    out: torch.Tensor
    gate: torch.Tensor
    awaited: Any
    """An `Awaited` counter, which tells when `out` is ready. The kernel that computes `gate` does not wait for
    `out`."""


def why_not(layers: list[Any], dtype: torch.dtype, batch: int) -> str | None:
    """Return a property of the layers or the batch that the kernels do not support, or None."""
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
        if sizes.index_weight_logit is not None:
            return "an indexer without head weights"
        if sizes.head_dim not in limits.HEAD_SIZES:
            return f"heads of {sizes.head_dim}, of {limits.HEAD_SIZES}"
    return None


def enters_at_once(layers: list[Any], batch: int) -> bool:
    """Return whether `enter` of every layer is one launch, which reads the rotary angles from a table."""
    even = all(sizes.index_head_dim % 2 == 0 or sizes.row == 0 for _, sizes in layers)
    return batch == 1 and even and all(weights.q_norm is None for weights, _ in layers)


def enter(h: torch.Tensor, layer: Any, sizes: Any, cache: Any, slot: torch.Tensor, rotary: Any) -> Any:
    """Multiply h by the joined projections, apply norms, rotary embedding and gate G2, and write keys and values into
    the cache, in two launches. If `rotary` is a table of all angles, launch nothing, and return a function. Each call
    of the returned function does one part of the work, given by `part`, in one launch."""
    norm = kernel_module("row_product.reference").Norm(layer.norm, sizes.eps)
    formats = kernel_module("decode.entry_reference")
    q, k, _, value_gate, gate, index_key, _, index_weights, _ = sizes.parts
    columns = formats.EntrySizes(q, k, value_gate, gate, index_weights, sizes.head_dim, index_key, sizes.eps)
    buffers = formats.EntryCache(*cache)
    norms = None if layer.q_norm is None else (layer.q_norm, layer.k_norm)
    index_norms = None if layer.index_q_norm is None else (layer.index_q_norm, layer.index_k_norm)
    if isinstance(rotary, formats.AngleTable):
        product = formats.JoinedProduct(layer.joined, norm, layer.bias, index_norms)
        enter_row = kernel_module("decode.joined").enter_row
        return partial(enter_row, h, product, columns, rotary, buffers, slot)
    projected = kernel_module("row_product.op").row_product(h, layer.joined, norm, layer.bias)
    return kernel_module("decode.entry").enter_token(
        projected, columns, formats.Angles(*rotary), buffers, slot, norms, index_norms
    )


def leave(h: torch.Tensor, attended: Any, layer: Any, sizes: Any) -> torch.Tensor:
    """Add the outputs of W_O and the MLP to the residual stream, in three launches."""
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
    """Run `leave` of this layer and `enter` of the next layer."""
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
    """Run `leave` of the last layer, and return the logits [B, vocab]. Add 1 to the two counters `advances`."""
    h = leave(h, attended, *left)
    given = kernel_module("row_product.reference").Norm(norm, left[1].eps)
    launch = kernel_module("row_product.triton_product").Launch(advances=advances)
    return kernel_module("row_product.op").row_product(h, head, given, launch=launch)
