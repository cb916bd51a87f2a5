"""Chooses block shapes, allocates scratch memory and launches the indexer loss kernels for one chunk of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton.language as tl

from gsa_kernels.attention.triton_tiles import count_multiprocessors
from gsa_kernels.checks import kernels_use_sigmoid
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_reduce_keys import add_partials_by_key, equal_tiles, find_key_hits
from gsa_kernels.limits import GRADIENT_KEYS, TILE_QUERIES, ceil_div, count_key_parts, next_power_of_2
from gsa_kernels.loss import triton_scores as kinds
from gsa_kernels.loss.triton_grad import score_pass_kernel
from gsa_kernels.loss.triton_grad_products import grad_keys_kernel, grad_queries_kernel, totals_kernel
from gsa_kernels.sampling import SampledRows


@dataclass(frozen=True)
class Blocks:
    """Holds block shapes: the rows and keys of a tile, the keys of a program (`segment`), and the warps.

    `segment` is a multiple of `score_keys`, and `score_keys` is a multiple of `grad_keys`.
    """

    rows: int
    score_keys: int
    """Keys per tile of both passes over the scores."""
    score_warps: int
    grad_keys: int
    """Keys per tile of the kernels for the queries' and keys' gradients."""
    grad_warps: int
    segment: int
    score_stages: int = 2
    grad_stages: int = 2

    @property
    def score(self) -> dict[str, int]:
        return {"BN": self.score_keys, "num_warps": self.score_warps, "num_stages": self.score_stages}

    @property
    def grad(self) -> dict[str, int]:
        return {"BN": self.grad_keys, "num_warps": self.grad_warps, "num_stages": self.grad_stages}


@dataclass(frozen=True)
class Inputs:
    """Holds the tensors that every chunk of rows reads. All are contiguous, with the shapes of
    `triton_indexer_loss`."""

    q_idx: torch.Tensor
    k_idx: torch.Tensor
    weight_logits: torch.Tensor
    score_bias: torch.Tensor | None
    weight_bias: torch.Tensor | None
    beta: torch.Tensor
    packed_mask: torch.Tensor | None
    document_starts: torch.Tensor | None
    """[B, R], for the rows' queries."""

    kind: int
    query_start: int = 0
    target_sum: float | None = None
    log_sum: torch.Tensor | None = None
    """[B, R], used together with `target_sum` only."""
    key_lists: KeyLists | None = None

    @property
    def columns(self) -> int:
        """Columns of the target: keys, or entries of the longest key list, up to a multiple of a tile."""
        if self.key_lists is None:
            return self.k_idx.shape[1]
        return list_columns(self.key_lists)


def list_columns(lists: KeyLists) -> int:
    """Return the number of columns of a target over key lists: a multiple of COLUMNS, so that rows are
    memory-aligned."""
    return ceil_div(lists.max_count, COLUMNS) * COLUMNS


COLUMNS = 64


@dataclass(frozen=True)
class Outputs:
    """Holds the results, filled chunk by chunk. The gradients are None if only the value is wanted."""

    kl_rows: torch.Tensor
    """KL of each row, [B, R] fp32, NaN for rows that are not sampled."""

    partial_sums: torch.Tensor
    """[1 + 3 HI, B, ceil(R / SUMMED_ROWS)] fp32: the KL, then the gradients of beta, w_j and b_j for each head j.
    `totals` adds them."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    """fp32 [parts, B, L, DI]. Each part is the sum over HI / parts heads. Over key lists there is one part, in which DI
    is padded to a power of two."""
    dw: torch.Tensor | None

    adds_keys: bool = True
    """Whether kernels add to dk, which the caller then initialises to 0. If False, a single chunk writes all of dk."""


SUMMED_ROWS = 16
"""Neighbouring rows whose sums are one element of `partial_sums`."""


def new_outputs(
    inputs: Inputs,
    blocks: Blocks,
    *,
    with_gradients: bool,
    sampled: bool,
    one_chunk: bool,
) -> Outputs:
    """Allocate the results.

    Args:
        sampled: some rows may not be computed; their gradients are 0
        one_chunk: all rows are in one chunk
    """
    q_idx, k_idx, logits = inputs.q_idx, inputs.k_idx, inputs.weight_logits
    batch, rows, heads, _ = q_idx.shape
    device, fp32 = q_idx.device, torch.float32
    shapes: list[tuple[Sequence[int], torch.dtype]] = [
        ((1 + 3 * heads if with_gradients else 1, batch, ceil_div(rows, SUMMED_ROWS)), fp32)
    ]
    if with_gradients:
        shapes += [(q_idx.shape, q_idx.dtype), (logits.shape, logits.dtype)]
    if sampled:
        sums, *of_rows = zeros_together(shapes, device)
    else:
        sums, *of_rows = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    dq, dw = of_rows or (None, None)
    dk = None
    if with_gradients and inputs.key_lists is not None:
        dk = torch.zeros(1, *k_idx.shape[:2], padded_size(k_idx), dtype=fp32, device=device)
    elif with_gradients:
        programs = batch * ceil_div(k_idx.shape[1], blocks.grad_keys)
        parts = count_key_parts(programs, heads, count_multiprocessors(device))
        dk = (torch.empty if one_chunk else torch.zeros)(parts, *k_idx.shape, dtype=fp32, device=device)
    if sampled:
        kl_rows = torch.full((batch, rows), float("nan"), device=device)
    else:
        kl_rows = torch.empty(batch, rows, dtype=fp32, device=device)
    return Outputs(kl_rows, sums, dq, dk, dw, not one_chunk)


def zeros_together(
    shapes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> list[torch.Tensor]:
    """Allocate tensors of zeros in one buffer, which takes one launch."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in shapes]
    aligned = [ceil_div(size, ALIGNMENT) * ALIGNMENT for size in sizes]
    parts = torch.zeros(sum(aligned), dtype=torch.uint8, device=device).split(aligned)
    return [
        part[:size].view(dtype).view(*shape)
        for part, size, (shape, dtype) in zip(parts, sizes, shapes, strict=True)
    ]


ALIGNMENT = 16
"""Bytes. Triton loads aligned tensors in larger pieces."""


FP32_WARPS = 8
"""Triton 3.6 miscompiles the fp32 kernels for 4 warps (H200, document_starts without a packed mask). The KL is then
infinite."""


BF16_BLOCKS = Blocks(64, 64, 8, GRADIENT_KEYS[2], 4, segment=512, score_stages=3, grad_stages=3)
FP32_BLOCKS = Blocks(32, 32, FP32_WARPS, GRADIENT_KEYS[4], FP32_WARPS, 256, score_stages=1, grad_stages=1)
"""Products of fp32 do not use the matrix units. With more rows, keys or stages they spill registers."""


LIST_BLOCKS = replace(BF16_BLOCKS, rows=TILE_QUERIES, score_keys=128, score_warps=4, grad_keys=128)
"""Blocks for bf16 over key lists. A tile of rows has one list."""


def choose_blocks(inputs: Inputs) -> Blocks:
    """Return block shapes that fit registers and shared memory (docs/kernels.md, Tuning)."""
    if inputs.q_idx.dtype == torch.float32:
        return FP32_BLOCKS
    return BF16_BLOCKS if inputs.key_lists is None else LIST_BLOCKS


def padded_size(k_idx: torch.Tensor) -> int:
    return max(16, int(next_power_of_2(k_idx.shape[-1])))


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised memory, because every element is written before it is read."""
    return torch.empty(shape, dtype=dtype, device=device)


def run_chunk(
    inputs: Inputs, outputs: Outputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks
) -> None:
    """Run all kernels for the rows of a chunk.

    Args:
        target: fp32 or fp16 [B, rows, columns], last dimension contiguous
    """
    fp32_on_gpu = inputs.q_idx.dtype == torch.float32 and inputs.q_idx.device.type == "cuda"
    if fp32_on_gpu and min(blocks.score_warps, blocks.grad_warps) < FP32_WARPS:
        raise ValueError(
            f"blocks has {blocks.score_warps} and {blocks.grad_warps} warps; pass at least {FP32_WARPS} for fp32"
        )
    for launch in chunk_launches(inputs, outputs, target, chunk, blocks).values():
        launch()


def chunk_launches(
    inputs: Inputs, outputs: Outputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks
) -> dict[str, Callable[[], object]]:
    """Return the kernels of `run_chunk` by name, in the order in which they must run."""
    assert chunk.every == 1 or chunk.stretch % blocks.rows == 0 or blocks.rows % chunk.stretch == 0, "rows_of"
    assert blocks.score_keys % blocks.grad_keys == 0, "whole tiles of G are written"
    batch, _, heads, _ = inputs.q_idx.shape
    tiles = ceil_div(chunk.count, blocks.rows)
    lists, num_keys = None, inputs.query_start + chunk.row(chunk.count - 1) + 1  # with a causal row
    if inputs.key_lists is not None:
        assert blocks.rows == TILE_QUERIES, "a tile of rows has one list"
        lists, num_keys = lists_of_chunk(inputs.key_lists, chunk), inputs.columns
    segments = ceil_div(num_keys, blocks.segment)
    grid, fp32 = (segments, tiles, batch), torch.float32
    allocate = partial(scratch, device=inputs.q_idx.device)
    sums_given = inputs.log_sum is not None and inputs.target_sum is not None
    with_gradients, padded = outputs.dq is not None, tiles * blocks.rows
    stride = ceil_div(num_keys, blocks.score_keys) * blocks.score_keys
    arguments = _arguments(inputs, outputs, target, chunk, blocks) | {
        "list_keys": None if lists is None else lists.keys,
        "list_words": None if lists is None else lists.words,
        "list_starts": None if lists is None else lists.starts,
        "list_counts": None if lists is None else lists.counts,
        "row_stats": allocate(3, 0 if sums_given else segments, batch, padded, dtype=fp32),
        "log_sum": inputs.log_sum if sums_given else None,
        "inverse_target_sum": 1 / inputs.target_sum if inputs.target_sum is not None else 1.0,
        "kl_parts": allocate(segments, batch, padded, dtype=fp32),
        # fp16 halves the traffic. It has more digits than the bf16 operands of the products.
        "grad_scores": allocate(
            batch,
            padded,
            stride if with_gradients else 0,
            dtype=fp32 if inputs.q_idx.dtype == fp32 else torch.float16,
        ),
        "grad_stride": stride,
    }
    launches: dict[str, Callable[[], object]] = {}
    if not sums_given:
        launches["stats"] = _launch(score_pass_kernel, grid, arguments, FIRST=True, **blocks.score)
    launches["scores"] = _launch(score_pass_kernel, grid, arguments, FIRST=False, **blocks.score)
    row_grid = (heads if with_gradients else 1, tiles, batch)
    launches["queries"] = _launch(grad_queries_kernel, row_grid, arguments, **blocks.grad)
    if outputs.dk is not None and lists is None:
        parts, written_keys = outputs.dk.shape[0], num_keys if outputs.adds_keys else inputs.k_idx.shape[1]
        key_grid = (parts, ceil_div(written_keys, blocks.grad_keys), batch)
        launches["keys"] = _launch(grad_keys_kernel, key_grid, arguments, HEADS=heads // parts, **blocks.grad)
    elif outputs.dk is not None and lists is not None:
        dk, of_lists = outputs.dk[0], lists
        partials = allocate(batch * tiles * num_keys, dk.shape[-1], dtype=fp32)
        key_grid = (1, ceil_div(num_keys, blocks.grad_keys), batch * tiles)
        arguments |= {"dk": partials, "ADDS": False}
        launches["keys"] = _launch(grad_keys_kernel, key_grid, arguments, HEADS=heads, **blocks.grad)

        def add_keys() -> None:
            hits = find_key_hits(of_lists, equal_tiles(of_lists, num_keys))
            add_partials_by_key(partials[None], hits, dk[:, :, None])

        launches["add keys"] = add_keys
    return launches


def lists_of_chunk(lists: KeyLists, chunk: SampledRows) -> KeyLists:
    """Return the lists of the chunk's tiles only, [B, tiles]."""
    first, tiles = chunk.start // TILE_QUERIES, ceil_div(chunk.count, TILE_QUERIES)
    if tiles == lists.counts.shape[1]:
        return lists
    index = slice(first, first + (tiles - 1) * chunk.every + 1, chunk.every)
    starts, counts = (x[:, index].contiguous() for x in (lists.starts, lists.counts))
    return replace(lists, starts=starts, counts=counts)


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **own: Any
) -> Callable[[], object]:
    """Prepare a launch with the arguments that the kernel names."""
    taken = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    return partial(kernel[grid], **{**taken, **own})


def _arguments(
    inputs: Inputs, outputs: Outputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks
) -> dict[str, Any]:
    """Return the arguments that have the same name and value in all kernels."""
    heads, dim = inputs.q_idx.shape[2:]
    names = (
        "q_idx",
        "k_idx",
        "weight_logits",
        "beta",
        "score_bias",
        "weight_bias",
        "packed_mask",
        "document_starts",
    )
    given = {name: getattr(inputs, name) for name in names} | {"target": target}
    given |= {name: getattr(outputs, name) for name in ("kl_rows", "partial_sums", "dq", "dk", "dw")}
    return {
        # q_idx replaces a tensor that does not exist; the kernel does not touch it.
        **{name: inputs.q_idx if tensor is None else tensor for name, tensor in given.items()},
        "target_stride_b": target.stride(0),
        "target_stride_row": target.stride(1),
        "R": inputs.q_idx.shape[1],
        "L": inputs.k_idx.shape[1],
        "columns": inputs.columns,
        "W": inputs.packed_mask.shape[2] if inputs.packed_mask is not None else 0,
        "query_start": inputs.query_start or None,  # None is a compile-time constant for 0
        "row_start": chunk.start,
        "num_rows": chunk.count,
        "scale": dim**-0.5,
        "HI": heads,
        "DI": dim,
        "BLOCK_D": padded_size(inputs.q_idx),
        "BM": blocks.rows,
        "BR": SUMMED_ROWS,
        "SEGMENT": blocks.segment,
        "STRETCH": chunk.stretch,
        "SPACING": chunk.spacing,
        "KIND": inputs.kind,
        "PRECISION": "ieee" if inputs.q_idx.dtype == torch.float32 else "tf32",
        "SCORE_BIAS": inputs.score_bias is not None,
        "WEIGHT_BIAS": inputs.weight_bias is not None,
        "HAS_MASK": inputs.packed_mask is not None,
        "HAS_STARTS": inputs.document_starts is not None,
        "ADDS": outputs.adds_keys,
        "WITH_GRADIENTS": outputs.dq is not None,
    }


class Totals(NamedTuple):
    """Holds sums over all rows. A gradient that is not wanted is None. The gradient of an absent bias is None, too."""

    kl: torch.Tensor
    """0-d fp32."""
    d_beta: torch.Tensor | None
    """[HI] fp64, the part of each head."""
    d_weight_bias: torch.Tensor | None
    d_score_bias: torch.Tensor | None


def totals(inputs: Inputs, outputs: Outputs) -> Totals:
    """Compute the totals in one launch, in fp64 and a fixed order."""
    heads, with_gradients = inputs.q_idx.shape[2], outputs.dq is not None
    rows, size = outputs.partial_sums.shape[0], outputs.partial_sums[0].numel()
    biases = (inputs.weight_bias, inputs.score_bias)
    result = Totals(
        inputs.q_idx.new_empty((), dtype=torch.float32),
        inputs.q_idx.new_empty(heads, dtype=torch.float64) if with_gradients else None,
        *(torch.empty_like(bias) if with_gradients and bias is not None else None for bias in biases),
    )
    block = min(next_power_of_2(size), 2048)
    totals_kernel[(rows,)](outputs.partial_sums, *result, size, HI=heads, BLOCK=block, num_warps=4)
    return result


def score_kind(dtype: torch.dtype, activation: str, device: torch.device) -> int:
    """Return which form of the score the kernels compute (triton_scores.py), exact for fp32 and fast for bf16."""
    constant: tl.constexpr
    if not kernels_use_sigmoid(activation):
        constant = kinds.RELU
    elif dtype == torch.float32:
        constant = kinds.SIGMOID
    else:
        constant = kinds.TANH if device.type == "cuda" else kinds.TANH_PLAIN
    return int(constant.value)
