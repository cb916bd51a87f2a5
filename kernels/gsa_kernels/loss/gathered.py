"""Computes the indexer loss (GSA, equation 15) over key lists, for sparse training on long sequences.

Key lists give, for each tile of queries, the keys that any of them selects. No tensor has size L x L. The forward pass
computes loss and gradients in chunks of tiles. `head_sum_probs_lists` computes the target of a chunk.
"""

from collections.abc import Callable
from functools import partial

import torch

from gsa_kernels.attention.triton_gathered_probs import check_lists
from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import GATHERED_LOSS_BYTES, TILE_QUERIES
from gsa_kernels.loss.autograd import (
    Gradients,
    LossWithGradients,
    check_indexer,
    needs_gradients,
    tensors_of,
)
from gsa_kernels.loss.op import ALL_ROWS
from gsa_kernels.loss.triton_gathered_launch import (
    GatheredBlocks,
    GatheredInputs,
    GatheredOutputs,
    bytes_per_tile,
    choose_gathered_blocks,
    run_gathered_chunk,
)
from gsa_kernels.loss.triton_launch import score_kind
from gsa_kernels.sampling import systematic
from gsa_kernels.types import Indexer, RowSample

TargetTiles = Callable[[torch.Tensor], torch.Tensor]
"""Maps int32 [N] numbers of tiles to fp32 [B, N, max_count, queries]: attention probabilities by entry and query,
summed over the heads."""


def gathered_indexer_loss(
    indexer: Indexer,
    target_tiles: TargetTiles,
    lists: KeyLists,
    rows: RowSample = ALL_ROWS,
    *,
    scratch_bytes: int = GATHERED_LOSS_BYTES,
    blocks: GatheredBlocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum KL(p_t || softmax_{s in S_t}(beta I[t, s])) over the rows, t = lists.query_start + row.

    `indexer_scores`, `renormalise_target` and `indexer_kl` define the loss. Only the indexer's tensors get gradients.

    Scores are as exact as in `masked_indexer_loss`, and results repeat bit for bit. Another value of `scratch_bytes`
    may change the last bits of the keys' gradients.

    Args:
        indexer: with lists.num_keys keys
        target_tiles: computes the target of a chunk of tiles, at any positive scale. Values off the attended set are
            ignored. It is called once per chunk, without gradients.
        lists: the attended set of every query
        rows: which rows are computed, in whole tiles; the same on every tensor-parallel rank
        scratch_bytes: approximate size of a chunk's scratch memory
        blocks: block shapes, for measurements

    Returns:
        0-d fp32; the KL of each row, fp32 [B, R], without gradient, NaN for rows that are not computed
    """
    batch, num_rows = check_indexer(indexer, lists.query_start)
    check_lists(lists, batch, num_rows)
    check_at_least("scratch_bytes", scratch_bytes, 1)

    tensors = tensors_of(indexer)
    first, factor = systematic(lists.counts.shape[1], rows.fraction, rows.draw)
    rank, size = rows.share
    calculate = partial(
        _value_and_gradients,
        target_tiles=target_tiles,
        lists=lists,
        sample=(first + rank * factor, size * factor),
        with_gradients=needs_gradients(tensors),
        scratch_bytes=scratch_bytes,
        blocks=blocks,
    )
    total, kl_of_rows = LossWithGradients.apply(*tensors, indexer.activation, calculate)
    return (total if factor == 1 else total * factor), kl_of_rows


def _value_and_gradients(
    indexer: Indexer,
    target_tiles: TargetTiles,
    lists: KeyLists,
    sample: tuple[int, int],
    with_gradients: bool,
    scratch_bytes: int,
    blocks: GatheredBlocks | None,
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Return the sum of the sampled rows' KL, the KL of each row [B, R], and the gradients of the sum.

    The gradients belong to the tensors that `tensors_of` returns for the indexer.

    Args:
        sample: the first sampled tile, and the distance from one sampled tile to the next
    """
    q_idx, k_idx, weight_logits = indexer.queries, indexer.keys, indexer.head_weight_logits
    score_bias, weight_bias, beta = indexer.score_bias, indexer.head_weight_bias, indexer.inverse_temperature
    assert isinstance(beta, torch.Tensor)
    batch, num_rows, heads, dim = q_idx.shape
    inputs = GatheredInputs(
        q_idx=q_idx.contiguous(),
        k_idx=k_idx.contiguous(),
        weight_logits=weight_logits.contiguous(),
        score_bias=None if score_bias is None else score_bias.contiguous(),
        weight_bias=None if weight_bias is None else weight_bias.contiguous(),
        beta=beta.detach().reshape(1).to(torch.float32),
        lists=lists,
        kind=score_kind(q_idx.dtype, indexer.activation, q_idx.device),
    )
    num_tiles = lists.counts.shape[1]
    first, every = sample
    tiles = torch.arange(min(first, num_tiles), num_tiles, every, dtype=torch.int32, device=q_idx.device)
    # Rows that are not computed have a gradient of 0. Without gradients only the KL of a row is written.
    allocate = torch.empty_like if with_gradients and every == 1 else torch.zeros_like
    fp32 = torch.float32
    outputs = GatheredOutputs(
        row_results=allocate(q_idx.new_empty(batch, num_rows, 1 + 2 * heads, dtype=fp32)),
        tile_results=allocate(q_idx.new_empty(batch, num_tiles, heads, dtype=fp32)),
        dq=allocate(inputs.q_idx) if with_gradients else None,
        dk=q_idx.new_zeros(batch, lists.num_keys, inputs.block_d, dtype=fp32) if with_gradients else None,
        dw=allocate(inputs.weight_logits) if with_gradients else None,
    )
    chosen_blocks = choose_gathered_blocks(inputs) if blocks is None else blocks
    chunk = max(1, scratch_bytes // max(1, batch * bytes_per_tile(inputs, with_gradients)))
    for part in tiles.split(chunk) if len(tiles) > 0 else ():
        target = target_tiles(part).detach()
        _check_target(target, (batch, len(part), lists.max_count, TILE_QUERIES), q_idx.device)
        run_gathered_chunk(inputs, outputs, target, part, chosen_blocks)

    # The sum is fp64, because it has tens of thousands of rows, some of both signs.
    sums = outputs.row_results.sum((0, 1), dtype=torch.float64)
    tile_sums = outputs.tile_results.sum((0, 1), dtype=torch.float64)
    kl_rows = outputs.row_results[..., 0]
    if every != 1:
        row_tiles = torch.arange(num_rows, device=q_idx.device) // TILE_QUERIES
        kl_rows = kl_rows.masked_fill(row_tiles % every != first, float("nan"))
    if outputs.dq is None or outputs.dk is None or outputs.dw is None:
        return sums[0].float(), kl_rows, (None,) * 6
    gradients = (
        outputs.dq,
        outputs.dk[..., :dim].to(k_idx.dtype),
        outputs.dw,
        None if score_bias is None else tile_sums.to(score_bias.dtype),
        None if weight_bias is None else sums[1 + heads :].to(weight_bias.dtype),
        sums[1 : 1 + heads].sum().to(beta.dtype).reshape(beta.shape) if beta.requires_grad else None,
    )
    return sums[0].float(), kl_rows, gradients


def _check_target(target: torch.Tensor, sizes: tuple[int, int, int, int], device: torch.device) -> None:
    check_shape("target_tiles(...)", target, "[B, N, max_count, queries]", sizes)
    if target.dtype != torch.float32 or target.device != device or not target.is_contiguous():
        raise ValueError(
            f"target_tiles(...) gave {target.dtype} on {target.device} with strides {target.stride()}; "
            f"pass float32 on {device}, contiguous"
        )
