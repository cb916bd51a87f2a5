"""The indexer's loss (GSA, equation 15) over key lists: the sparse phase of long contexts, nothing L x L.

Like `indexer_kl_loss`, one forward pass computes value and gradients, chunk of tiles by chunk of tiles, and the
backward pass only scales. The target of a chunk comes from `head_sum_probs_lists`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from gsa_kernels.attention.triton_gathered_probs import count_tiles_per_block
from gsa_kernels.checks import beta_tensor, check_at_least, check_shape
from gsa_kernels.indexer_loss.autograd import LossWithGradients, check_sampling, needs_gradients
from gsa_kernels.indexer_loss.op import check_inputs
from gsa_kernels.indexer_loss.triton_gathered_launch import (
    GatheredBlocks,
    GatheredInputs,
    GatheredOutputs,
    bytes_per_tile,
    choose_gathered_blocks,
    run_gathered_chunk,
)
from gsa_kernels.indexer_loss.triton_launch import score_kind
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import GATHERED_LOSS_BYTES
from gsa_kernels.sampling import systematic

TargetTiles = Callable[[torch.Tensor], torch.Tensor]
"""int32 [N] numbers of tiles -> fp32 [B, N, max_count, queries]: attention probabilities by entry and query, summed
over the heads. With `selection_block` > 1: numbers of blocks -> [B, N, max_count], summed over their queries."""


def gathered_indexer_kl_loss(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    target_tiles: TargetTiles,
    lists: KeyLists,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    inverse_temperature: float | torch.Tensor = 1.0,
    selection_block: int = 1,
    scratch_bytes: int = GATHERED_LOSS_BYTES,
    row_fraction: float = 1.0,
    seed: int | None = None,
    share: tuple[int, int] = (0, 1),
    return_rows: bool = False,
    blocks: GatheredBlocks | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sum over the rows of KL(p_t || softmax_{s in S_t}(beta I[t, s])), t = lists.query_start + row * selection_block.

    The definition is `indexer_scores`, `renormalise_target` and `indexer_kl`, and of the target of a block of
    queries `sum_over_blocks`. Gradients go to q_idx, k_idx, weight_logits, both biases and the inverse
    temperature; none to the target.

    Exactness and determinism as in `indexer_kl_loss`; only the order in which the gradients of the keys are
    added, and so their last bits, depends on `scratch_bytes`.

    Args:
        q_idx: [B, R, HI, DI], R = ceil(L / selection_block)
        k_idx: [B, Lk, DI], Lk = lists.num_keys
        weight_logits: [B, R, HI]
        target_tiles: gives the target of a chunk of tiles, or of blocks, at any positive scale; what it holds
            off the support is ignored. Called once per chunk, without gradients.
        lists: what every query attends to. A row's support is what its query attends to.
        score_bias, weight_bias: [HI]
        inverse_temperature: beta, a number or a tensor of one element
        selection_block: b; only the first query of each aligned block of b has a row. 1, or a multiple of the
            lists' tile; the tiles of a block share their keys
        scratch_bytes: size of a chunk's scratch memory, about
        row_fraction: 1 / n: below 1, an unbiased estimate from every n-th tile (or block), rescaled
        seed: chooses these tiles; the same on every tensor-parallel rank
        share: (rank, size): of these tiles every size-th; see `indexer_kl_loss`
        return_rows: give also the KL of each row, without gradient; NaN for rows left out of the estimate
        blocks: block shapes, for measurements

    Returns:
        0-d fp32, or (0-d fp32, fp32 [B, R])
    """
    batch, _, length = check_inputs(
        q_idx, k_idx, weight_logits, score_bias, weight_bias, activation, selection_block, lists.query_start
    )
    tiles_per_unit = count_tiles_per_block(lists, batch, length, selection_block)
    beta = beta_tensor(inverse_temperature, q_idx.device)
    check_at_least("scratch_bytes", scratch_bytes, 1)
    check_sampling(row_fraction, seed)

    rows_per_tile = lists.queries if selection_block == 1 else 1
    first, factor = systematic(-(-q_idx.shape[1] // rows_per_tile), row_fraction, seed)
    differentiable = (q_idx, k_idx, weight_logits, score_bias, weight_bias, beta)
    settings: dict[str, Any] = {
        "target_tiles": target_tiles,
        "lists": lists,
        "activation": activation,
        "tiles_per_unit": tiles_per_unit,
        "rows": rows_per_tile,
        "scratch_bytes": scratch_bytes,
        "sample": (first + share[0] * factor, share[1] * factor),
        "blocks": blocks,
        "with_gradients": needs_gradients(*differentiable),
    }
    total, rows = LossWithGradients.apply(*differentiable, partial(_value_and_gradients, **settings))
    if factor != 1:
        total = total * factor
    return (total, rows) if return_rows else total


def _value_and_gradients(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    score_bias: torch.Tensor | None,
    weight_bias: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    target_tiles: TargetTiles,
    lists: KeyLists,
    activation: str,
    tiles_per_unit: int,
    rows: int,
    scratch_bytes: int,
    sample: tuple[int, int],
    blocks: GatheredBlocks | None,
    with_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The sum over the sample, the KL of each row [B, R], and the sum's gradients in the order of the first six
    arguments."""
    batch, num_rows, heads, dim = q_idx.shape
    inputs = GatheredInputs(
        q_idx=q_idx.contiguous(),
        k_idx=k_idx.contiguous(),
        weight_logits=weight_logits.contiguous(),
        score_bias=None if score_bias is None else score_bias.contiguous(),
        weight_bias=None if weight_bias is None else weight_bias.contiguous(),
        beta=beta.detach().reshape(1).to(torch.float32),
        lists=lists,
        kind=score_kind(q_idx.dtype, activation, q_idx.device),
        tiles_per_unit=tiles_per_unit,
        rows=rows,
    )
    num_tiles = -(-num_rows // rows)
    first, every = sample
    tiles = torch.arange(min(first, num_tiles), num_tiles, every, dtype=torch.int32, device=q_idx.device)
    # Rows that are left out have no gradient; without gradients only the KL of a row is written.
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
        _check_target(target, (batch, len(part), lists.max_count), rows, q_idx.device)
        run_gathered_chunk(inputs, outputs, target, part, chosen_blocks)

    # fp64: tens of thousands of rows, some of both signs.
    sums = outputs.row_results.sum((0, 1), dtype=torch.float64)
    tile_sums = outputs.tile_results.sum((0, 1), dtype=torch.float64)
    kl_rows = outputs.row_results[..., 0]
    if every != 1:
        row_tiles = torch.arange(num_rows, device=q_idx.device) // rows
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


def _check_target(target: torch.Tensor, sizes: tuple[int, int, int], rows: int, device: torch.device) -> None:
    if rows == 1:
        check_shape("target_tiles(...)", target, "[B, N, max_count]", sizes)
    else:
        check_shape("target_tiles(...)", target, "[B, N, max_count, queries]", (*sizes, rows))
    if target.dtype != torch.float32 or target.device != device or not target.is_contiguous():
        raise ValueError(
            f"target_tiles(...) gave {target.dtype} on {target.device} with strides {target.stride()}; "
            f"pass float32 on {device}, contiguous"
        )
