"""Chooses block shapes, allocates scratch memory and launches the indexer loss kernels for one chunk of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gsa_kernels.checks import kernels_use_sigmoid
from gsa_kernels.devices import on_hopper
from gsa_kernels.hopper.triton_stacked_grad import stacked_grad_kernel
from gsa_kernels.hopper.triton_stacked_stats import stacked_stats_kernel
from gsa_kernels.limits import loss_tile
from gsa_kernels.loss import triton_scores as kinds
from gsa_kernels.loss.triton_grad import grad_kernel
from gsa_kernels.loss.triton_reduce import reduce_kernel, totals_kernel
from gsa_kernels.loss.triton_stats import stats_kernel
from gsa_kernels.sampling import SampledRows


@dataclass(frozen=True)
class Blocks:
    """Holds block shapes: rows and keys per tile, keys per program, warps. `segment` is a multiple of the tiles."""

    rows: int
    stats_keys: int
    stats_warps: int
    grad_keys: int
    grad_warps: int
    segment: int
    stats_stages: int = 2
    grad_stages: int = 2
    stacked: bool = False
    """Whether to run the kernels with the heads side by side."""


@dataclass(frozen=True)
class Inputs:
    """Holds the tensors that every chunk of rows reads. All are contiguous, with the shapes of
    `masked_indexer_loss`."""

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
    """[B, R]. Only the stacked kernels read `target_sum` and `log_sum`."""


@dataclass(frozen=True)
class Outputs:
    """Holds the results, filled chunk by chunk. The gradients are None if only the value is wanted."""

    kl_rows: torch.Tensor | None
    """KL of each row, [B, R] fp32. None if the KL is not computed, which does not change the gradients."""

    partial_sums: torch.Tensor
    """[1 + 3 HI, B, ceil(R / SUMMED_ROWS)] fp32: the KL, then the gradients of beta, w_j and b_j for each head j.
    `totals` adds them."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dw: torch.Tensor | None

    adds_keys: bool = True
    """If True, kernels add to dk, which the caller initialises to 0 in fp32. If False, there is one chunk, which writes
    all of dk."""

    gradient_scale: torch.Tensor | None = None
    """Factor of dq, dk and dw, but not of `partial_sums`: fp32 with one element; None means 1."""


SUMMED_ROWS = 16
"""Neighbouring rows whose sums are one element of `partial_sums`."""


def new_outputs(
    inputs: Inputs,
    *,
    with_value: bool = True,
    with_gradients: bool,
    sampled: bool,
    one_chunk: bool,
    gradient_scale: torch.Tensor | None = None,
) -> Outputs:
    """Allocate the results.

    Args:
        with_value: whether to compute the KL
        sampled: some rows may not be computed; their results are 0
        one_chunk: all rows are in one chunk
    """
    q_idx, k_idx, logits = inputs.q_idx, inputs.k_idx, inputs.weight_logits
    batch, rows, heads, _ = q_idx.shape
    device, fp32 = q_idx.device, torch.float32
    create = partial(torch.zeros if sampled else torch.empty, device=device)
    sums = (1 + 3 * heads if with_gradients else 1, batch, triton.cdiv(rows, SUMMED_ROWS))
    dq = dk = dw = None
    if with_gradients:
        dq, dw = create(q_idx.shape, dtype=q_idx.dtype), create(logits.shape, dtype=logits.dtype)
        if one_chunk:
            dk = torch.empty(k_idx.shape, dtype=k_idx.dtype, device=device)
        else:
            dk = torch.zeros(k_idx.shape, dtype=fp32, device=device)
    kl_rows = create(batch, rows, dtype=fp32) if with_value else None
    return Outputs(kl_rows, create(sums, dtype=fp32), dq, dk, dw, not one_chunk, gradient_scale)


FP32_WARPS = 8
"""Triton 3.6 miscompiles the fp32 kernels for 4 warps (H200, document_starts without a packed mask). The KL is then
infinite."""


STACKED = Blocks(32, 64, 4, 64, 4, segment=1024, grad_stages=3, stacked=True)
"""Fastest blocks for 4 heads of 64 in bf16 and a target in four parts (docs/kernels.md, Tuning). Longer segments are
faster for several sequences. For one sequence they give fewer programs than the device runs at once."""

BY_HEAD = Blocks(32, 32, 4, 32, 4, segment=256)
"""Blocks for bf16 with a loop over heads."""


def choose_blocks(inputs: Inputs) -> Blocks:
    """Return block shapes that fit registers and shared memory.

    Indexer heads are stacked in one product on Hopper only. In the register layout of other GPUs the heads of a row are
    in several warps. This is slower, and on Blackwell Triton 3.7 sums four heads wrongly (hopper/miscompile_guard.py).
    """
    q_idx = inputs.q_idx
    heads, dim = q_idx.shape[2:]
    stacks = q_idx.dtype == torch.bfloat16 and on_hopper(q_idx.device)
    tile = loss_tile(heads, dim, q_idx.dtype.itemsize, stacks)
    if tile.stacked:
        return replace(STACKED, rows=tile.rows, segment=tile.segment)
    if q_idx.dtype == torch.float32:
        # With more than one stage the products spill kilobytes.
        return Blocks(tile.rows, 32, FP32_WARPS, 32, FP32_WARPS, tile.segment, stats_stages=1, grad_stages=1)
    return replace(BY_HEAD, rows=tile.rows, segment=tile.segment)


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised memory, because every element is written before it is read."""
    return torch.empty(shape, dtype=dtype, device=device)


def run_chunk(
    inputs: Inputs, outputs: Outputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks
) -> None:
    """Run all kernels for the rows of a chunk.

    Args:
        target: fp32 or fp16 [B, parts, rows, Lk], last dimension contiguous
    """
    fp32_on_gpu = inputs.q_idx.dtype == torch.float32 and inputs.q_idx.device.type == "cuda"
    if fp32_on_gpu and min(blocks.stats_warps, blocks.grad_warps) < FP32_WARPS:
        raise ValueError(
            f"blocks has {blocks.stats_warps} and {blocks.grad_warps} warps; pass at least {FP32_WARPS} for fp32"
        )
    for launch in chunk_launches(inputs, outputs, target, chunk, blocks).values():
        launch()


@dataclass(frozen=True)
class Scratch:
    """Holds the launch sizes of a chunk, and the memory that the kernels share."""

    tiles: int
    segments: int
    num_keys: int
    """Number of keys up to the last causal key of any row in the chunk."""
    block_d: int
    stacked_heads: int
    """Heads in a tile of rows."""
    row_stats: torch.Tensor
    first_keys: torch.Tensor
    row_sums: torch.Tensor
    dq_parts: torch.Tensor
    dk_parts: torch.Tensor


def chunk_launches(
    inputs: Inputs, outputs: Outputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks
) -> dict[str, Callable[[], object]]:
    """Return the kernels of `run_chunk` by name, in the order in which they must run."""
    assert chunk.every == 1 or chunk.stretch % blocks.rows == 0 or blocks.rows % chunk.stretch == 0, "rows_of"
    sum_given = blocks.stacked and inputs.target_sum is not None
    lse_given = sum_given and inputs.log_sum is not None
    memory = _allocate(inputs, chunk, blocks, outputs.dq is not None, sum_given, lse_given)
    stats: Any = stacked_stats_kernel if blocks.stacked else stats_kernel
    grad: Any = stacked_grad_kernel if blocks.stacked else grad_kernel
    grid = (memory.segments, memory.tiles, inputs.q_idx.shape[0])
    reads, sizes, constants = _arguments(inputs, target, chunk, blocks, memory)
    given: dict[str, Any] = {}
    if blocks.stacked:
        constants |= {"HEADS": memory.stacked_heads, "SUM_GIVEN": sum_given}
        given = {
            "WITH_VALUE": outputs.kl_rows is not None,
            "log_sum": inputs.log_sum if lse_given else None,
            "inverse_target_sum": 1 / inputs.target_sum if inputs.target_sum is not None else 1.0,
        }
    launches: dict[str, Callable[[], object]] = {}
    if not lse_given:
        launches["stats"] = partial(
            stats[grid],
            *reads,
            memory.row_stats,
            memory.first_keys,
            *sizes,
            BN=blocks.stats_keys,
            num_warps=blocks.stats_warps,
            num_stages=blocks.stats_stages,
            **constants,
        )
    launches["gradients"] = partial(
        grad[grid],
        *reads,
        memory.row_stats,
        memory.first_keys,
        memory.row_sums,
        memory.dq_parts,
        memory.dk_parts,
        *sizes,
        BN=blocks.grad_keys,
        WITH_GRADIENTS=outputs.dq is not None,
        num_warps=blocks.grad_warps,
        num_stages=blocks.grad_stages,
        **given,
        **constants,
    )
    launches["reduce"] = _reduction(inputs, outputs, chunk, blocks, memory)
    return launches


def _allocate(
    inputs: Inputs, chunk: SampledRows, blocks: Blocks, with_gradients: bool, sum_given: bool, lse_given: bool
) -> Scratch:
    batch, _, heads, dim = inputs.q_idx.shape
    allocate = partial(scratch, device=inputs.q_idx.device)
    fp32 = torch.float32
    num_keys = inputs.query_start + chunk.row(chunk.count - 1) + 1
    block_d = max(16, triton.next_power_of_2(dim))
    tiles = triton.cdiv(chunk.count, blocks.rows)
    padded = tiles * blocks.rows
    segments = triton.cdiv(num_keys, blocks.segment)
    stacked_heads = triton.next_power_of_2(heads) if blocks.stacked else heads
    row_stats = allocate(2 if sum_given else 3, 0 if lse_given else segments, batch, padded, dtype=fp32)
    first_keys = allocate(batch, tiles, dtype=torch.int32)
    row_sums = allocate(1 + 2 * heads, segments, batch, padded, dtype=fp32)
    dq_parts = dk_parts = row_sums  # never read or written without gradients
    if with_gradients:
        dq_parts = allocate(segments, batch, tiles, block_d, stacked_heads * blocks.rows, dtype=fp32)
        # bf16 halves the traffic. The parts come from bf16 products, and their sum is rounded to bf16.
        part_type = torch.bfloat16 if blocks.stacked and inputs.q_idx.dtype == torch.bfloat16 else fp32
        key_blocks = triton.cdiv(inputs.k_idx.shape[1], blocks.grad_keys)
        dk_parts = allocate(batch, tiles, key_blocks, block_d, blocks.grad_keys, dtype=part_type)
    return Scratch(
        tiles, segments, num_keys, block_d, stacked_heads, row_stats, first_keys, row_sums, dq_parts, dk_parts
    )


def _arguments(
    inputs: Inputs, target: torch.Tensor, chunk: SampledRows, blocks: Blocks, memory: Scratch
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...], dict[str, Any]]:
    _, num_rows, heads, dim = inputs.q_idx.shape
    # q_idx replaces a tensor that does not exist; the kernel does not touch it.
    absent = inputs.q_idx
    optional = (inputs.score_bias, inputs.weight_bias, inputs.packed_mask, inputs.document_starts)
    score_bias, weight_bias, packed_mask, starts = (
        absent if tensor is None else tensor for tensor in optional
    )
    projections = (inputs.q_idx, inputs.k_idx, inputs.weight_logits)
    reads = (*projections, score_bias, weight_bias, inputs.beta, target, packed_mask, starts)
    num_words = inputs.packed_mask.shape[2] if inputs.packed_mask is not None else 0
    query_start = inputs.query_start or None  # None is a compile-time constant for 0
    lengths = (num_rows, inputs.k_idx.shape[1], num_words)
    sizes = (*lengths, query_start, chunk.start, chunk.count, *target.stride()[:3], dim**-0.5)
    constants = {
        "PARTS": target.shape[1],
        "TARGET_IN_BLOCKS": target.ndim == 5,
        "HI": heads,
        "DI": dim,
        "BLOCK_D": memory.block_d,
        "BM": blocks.rows,
        "SEGMENT": blocks.segment,
        "STRETCH": chunk.stretch,
        "SPACING": chunk.spacing,
        "KIND": inputs.kind,
        "PRECISION": "ieee" if inputs.q_idx.dtype == torch.float32 else "tf32",
        "SCORE_BIAS": inputs.score_bias is not None,
        "WEIGHT_BIAS": inputs.weight_bias is not None,
        "HAS_MASK": inputs.packed_mask is not None,
        "HAS_STARTS": inputs.document_starts is not None,
    }
    return reads, sizes, constants


def _reduction(
    inputs: Inputs, outputs: Outputs, chunk: SampledRows, blocks: Blocks, memory: Scratch
) -> Callable[[], object]:
    batch, num_rows, heads, dim = inputs.q_idx.shape
    with_gradients = outputs.dq is not None
    block_keys, block_dims = 32, 16
    key_programs = 0
    if with_gradients:
        num_keys = memory.num_keys if outputs.adds_keys else inputs.k_idx.shape[1]
        key_programs = triton.cdiv(num_keys, block_keys) * (memory.block_d // block_dims)
    row_programs = memory.tiles * blocks.rows // SUMMED_ROWS * (heads if with_gradients else 1)
    absent = inputs.q_idx
    return partial(
        reduce_kernel[(key_programs + row_programs, batch)],
        inputs.weight_logits,
        inputs.weight_bias if inputs.weight_bias is not None else absent,
        inputs.beta,
        memory.first_keys,
        memory.row_sums,
        memory.dq_parts,
        memory.dk_parts,
        outputs.kl_rows if outputs.kl_rows is not None else absent,
        outputs.partial_sums,
        outputs.dq if outputs.dq is not None else absent,
        outputs.dk if outputs.dk is not None else absent,
        outputs.dw if outputs.dw is not None else absent,
        num_rows,
        inputs.k_idx.shape[1],
        inputs.query_start or None,  # None is a compile-time constant for 0
        chunk.start,
        chunk.count,
        memory.tiles,
        memory.segments,
        key_programs,
        dim**-0.5,
        outputs.gradient_scale,
        HI=heads,
        HEADS=memory.stacked_heads,
        DI=dim,
        BLOCK_D=memory.block_d,
        BM=blocks.rows,
        BN=blocks.grad_keys,
        BR=SUMMED_ROWS,
        BK=block_keys,
        BD=block_dims,
        SEGMENT=blocks.segment,
        STRETCH=chunk.stretch,
        SPACING=chunk.spacing,
        KIND=inputs.kind,
        WEIGHT_BIAS=inputs.weight_bias is not None,
        HAS_STARTS=inputs.document_starts is not None,
        STACKED=blocks.stacked,
        ADDS=outputs.adds_keys,
        WITH_GRADIENTS=with_gradients,
        WITH_VALUE=outputs.kl_rows is not None,
        num_warps=4,
    )


class Totals(NamedTuple):
    """Holds sums over all rows. Gradients are multiplied by `gradient_scale`. A gradient is None if it is not wanted,
    or if the indexer lacks this bias."""

    kl: torch.Tensor | None
    """0-d fp32; None without `kl_rows`"""
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
        None if outputs.kl_rows is None else inputs.q_idx.new_empty((), dtype=torch.float32),
        inputs.q_idx.new_empty(heads, dtype=torch.float64) if with_gradients else None,
        *(torch.empty_like(bias) if with_gradients and bias is not None else None for bias in biases),
    )
    block = min(triton.next_power_of_2(size), 2048)
    totals_kernel[(rows,)](
        outputs.partial_sums, *result, size, outputs.gradient_scale, HI=heads, BLOCK=block, num_warps=4
    )
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
