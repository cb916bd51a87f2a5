"""Chooses block shapes, allocates scratch memory and launches the loss kernels over key lists for a chunk of tiles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.key_lists.triton_reduce_keys import add_partials_by_key, equal_tiles, find_key_hits
from gsa_kernels.limits import TILE_QUERIES
from gsa_kernels.loss.triton_gathered_grad import gathered_grad_kernel
from gsa_kernels.loss.triton_gathered_reduce import gathered_reduce_kernel
from gsa_kernels.loss.triton_gathered_stats import gathered_stats_kernel
from gsa_kernels.loss.triton_launch import FP32_WARPS, scratch

_WIDTH = 128 * 64
"""Number of elements in a tile's queries: 32 rows of four heads of size 64."""


@dataclass(frozen=True)
class GatheredBlocks:
    """Holds block shapes: entries per step and per program, warps. `segment` is a multiple of the entries."""

    stats_entries: int
    stats_warps: int
    grad_entries: int
    grad_warps: int
    segment: int
    stats_stages: int = 2
    grad_stages: int = 1


@dataclass(frozen=True)
class GatheredInputs:
    """Holds the tensors that every chunk of tiles reads. All are contiguous, with the shapes of
    `gathered_indexer_loss`."""

    q_idx: torch.Tensor
    k_idx: torch.Tensor
    weight_logits: torch.Tensor
    score_bias: torch.Tensor | None
    weight_bias: torch.Tensor | None
    beta: torch.Tensor
    lists: KeyLists
    kind: int

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.q_idx.shape[3]))

    @property
    def padded_heads(self) -> int:
        return int(triton.next_power_of_2(self.q_idx.shape[2]))


@dataclass(frozen=True)
class GatheredOutputs:
    """Holds the results, filled chunk by chunk. The gradients are None if only the value is wanted."""

    row_results: torch.Tensor
    """[B, R, 1 + 2 HI] fp32: the KL, then for each head j its part of the gradient of beta, and the gradient of w_j."""

    tile_results: torch.Tensor
    """[B, T, HI] fp32: gradient of the score bias b_j, summed over the rows of each of the T tiles."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    """fp32 [B, Lk, BLOCK_D]. Kernels add to it, so the caller initialises it to 0."""

    dw: torch.Tensor | None


def choose_gathered_blocks(inputs: GatheredInputs) -> GatheredBlocks:
    """Return block shapes that fit registers and shared memory. For bf16 and up to `_WIDTH` elements they are the
    fastest of five measured shapes (docs/kernels.md, Tuning)."""
    dtype = inputs.q_idx.dtype
    size = inputs.padded_heads * TILE_QUERIES * inputs.block_d
    if dtype == torch.float32:
        return GatheredBlocks(32, FP32_WARPS, 32, FP32_WARPS, segment=256, stats_stages=1)
    if size <= _WIDTH:
        return GatheredBlocks(64, 4, 64, 4, segment=1024)
    return GatheredBlocks(32, 8, 32, 8, segment=512, stats_stages=1)


def bytes_per_tile(inputs: GatheredInputs, with_gradients: bool) -> int:
    """Return the approximate scratch memory of one tile: its target and the partial rows of its keys."""
    row = TILE_QUERIES + (inputs.block_d if with_gradients else 0)
    return 4 * inputs.lists.max_count * row


def lists_of_chunk(inputs: GatheredInputs, tiles: torch.Tensor) -> KeyLists:
    """Return only the lists of these tiles, [B, N].

    Args:
        tiles: int32 [N], ascending
    """
    lists = inputs.lists
    if len(tiles) == lists.counts.shape[1]:  # all tiles, in order
        return lists
    index = tiles.long()
    return replace(
        lists,
        starts=lists.starts.index_select(1, index),
        counts=lists.counts.index_select(1, index),
        host_counts=None,
    )


def run_gathered_chunk(
    inputs: GatheredInputs,
    outputs: GatheredOutputs,
    target: torch.Tensor,
    tiles: torch.Tensor,
    blocks: GatheredBlocks,
) -> None:
    """Run all kernels for the tiles `tiles` [N].

    Args:
        target: fp32 [B, N, max_count, queries], contiguous
    """
    fp32_on_gpu = inputs.q_idx.dtype == torch.float32 and inputs.q_idx.device.type == "cuda"
    if fp32_on_gpu and min(blocks.stats_warps, blocks.grad_warps) < FP32_WARPS:
        raise ValueError(
            f"blocks has {blocks.stats_warps} and {blocks.grad_warps} warps; pass at least {FP32_WARPS} for fp32"
        )
    for launch in gathered_chunk_launches(inputs, outputs, target, tiles, blocks).values():
        launch()


def gathered_chunk_launches(
    inputs: GatheredInputs,
    outputs: GatheredOutputs,
    target: torch.Tensor,
    tiles: torch.Tensor,
    blocks: GatheredBlocks,
) -> dict[str, Callable[[], object]]:
    """Return the steps of `run_gathered_chunk` by name, in the order in which they must run."""
    batch, num_rows, heads, dim = inputs.q_idx.shape
    device, fp32 = inputs.q_idx.device, torch.float32
    block_d, padded_heads = inputs.block_d, inputs.padded_heads
    lists = lists_of_chunk(inputs, tiles)
    rows = TILE_QUERIES
    max_count = lists.max_count
    segments = max(1, triton.cdiv(max_count, blocks.segment))
    parts = (batch, len(tiles), segments)
    with_gradients = outputs.dq is not None

    row_stats = scratch(*parts, 3, rows, dtype=fp32, device=device)
    kl_parts = scratch(*parts, rows, dtype=fp32, device=device)
    grad_a_parts = grad_z_parts = dq_parts = dk_parts = kl_parts  # not touched without gradients
    if with_gradients:
        steps = segments * blocks.segment // blocks.grad_entries
        grad_a_parts = scratch(*parts[:2], steps, padded_heads, rows, dtype=fp32, device=device)
        grad_z_parts = scratch(*parts, padded_heads, dtype=fp32, device=device)
        dq_parts = scratch(*parts, padded_heads, rows, block_d, dtype=fp32, device=device)
        dk_parts = scratch(batch * len(tiles), max_count, block_d, dtype=fp32, device=device)

    # q_idx replaces a tensor that does not exist; the kernel does not touch it.
    absent = inputs.q_idx
    score_bias = inputs.score_bias if inputs.score_bias is not None else absent
    weight_bias = inputs.weight_bias if inputs.weight_bias is not None else absent
    reads = (
        *(inputs.q_idx, inputs.k_idx, inputs.weight_logits, score_bias, weight_bias, inputs.beta),
        *(lists.keys, lists.words, lists.starts, lists.counts, tiles),
        target,
    )
    sizes = (lists.num_keys, num_rows, max_count, dim**-0.5)
    constants = {
        "HI": heads,
        "HP": padded_heads,
        "DI": dim,
        "BLOCK_D": block_d,
        "ROWS": rows,
        "SEGMENT": blocks.segment,
        "KIND": inputs.kind,
        "WEIGHT_BIAS": inputs.weight_bias is not None,
    }
    score_constants = {
        "PRECISION": "ieee" if inputs.q_idx.dtype == fp32 else "tf32",
        "SCORE_BIAS": inputs.score_bias is not None,
    }
    grid = (segments, len(tiles), batch)
    launches: dict[str, Callable[[], object]] = {}
    launches["stats"] = partial(
        gathered_stats_kernel[grid],
        *reads,
        row_stats,
        *sizes,
        ENTRIES=blocks.stats_entries,
        num_warps=blocks.stats_warps,
        num_stages=blocks.stats_stages,
        **constants,
        **score_constants,
    )
    launches["gradients"] = partial(
        gathered_grad_kernel[grid],
        *reads,
        row_stats,
        kl_parts,
        grad_a_parts,
        grad_z_parts,
        dq_parts,
        dk_parts,
        *sizes,
        ENTRIES=blocks.grad_entries,
        WITH_GRADIENTS=with_gradients,
        num_warps=blocks.grad_warps,
        num_stages=blocks.grad_stages,
        **constants,
        **score_constants,
    )
    launches["reduce rows"] = partial(
        gathered_reduce_kernel[(len(tiles), heads if with_gradients else 1, batch)],
        inputs.weight_logits,
        weight_bias,
        inputs.beta,
        lists.counts,
        tiles,
        kl_parts,
        grad_a_parts,
        grad_z_parts,
        dq_parts,
        outputs.row_results,
        outputs.tile_results,
        outputs.dq if outputs.dq is not None else absent,
        outputs.dw if outputs.dw is not None else absent,
        num_rows,
        outputs.tile_results.shape[1],
        segments,
        ENTRIES=blocks.grad_entries,
        STEPS=16,
        WITH_GRADIENTS=with_gradients,
        num_warps=4,
        **constants,
    )
    if outputs.dk is not None:
        dk = outputs.dk

        def reduce_keys() -> None:
            hits = find_key_hits(lists, equal_tiles(lists))
            add_partials_by_key(dk_parts.flatten(0, 1)[None], hits, dk[:, :, None])

        launches["reduce keys"] = reduce_keys
    return launches
