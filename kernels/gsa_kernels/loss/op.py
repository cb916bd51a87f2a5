"""Computes the indexer loss (GSA, equations 14 and 15) and its gradients by Triton kernels.

The loss is a scalar, so its upstream gradient is one number. The forward pass can therefore already compute both the
loss and the gradients, in chunks of rows. The backward pass only multiplies the gradients by the upstream gradient. No
tensor of size L x L is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gsa_kernels.attention.inputs import ALL_OF_ONE_SEQUENCE
from gsa_kernels.attention.triton_gathered_probs import check_lists
from gsa_kernels.checks import check_at_least, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.limits import LIST_LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES, TILE_QUERIES
from gsa_kernels.loss.autograd import (
    Gradients,
    LossWithGradients,
    check_indexer,
    needs_gradients,
    tensors_of,
)
from gsa_kernels.loss.triton_launch import (
    Blocks,
    Inputs,
    choose_blocks,
    new_outputs,
    run_chunk,
    score_kind,
    totals,
)
from gsa_kernels.sampling import SampledRows, sample_rows
from gsa_kernels.types import Geometry, Indexer, RowSample

TargetRows = Callable[[SampledRows], torch.Tensor]
"""Maps rows to fp32 or fp16 [B, count, columns]: attention probabilities of these rows, summed over the heads. A column
is a key or, with key lists, one of the `list_columns` entries of the list of the row's tile."""

ALL_ROWS = RowSample()


@dataclass(frozen=True)
class Target:
    """Holds the target of the indexer loss, which is computed in chunks of rows."""

    of_rows: TargetRows
    """Computes the target of a chunk of rows, at any positive scale. It is called once per chunk without gradients.
    Values off the attended set are ignored."""
    row_sum: float | None = None
    """Sum of each row over the attended set, if known. For `head_sum_probs_rows` this is the number of heads. A
    relative error of 1e-5 changes the gradients by this amount and the loss by its square."""


@dataclass(frozen=True)
class Attended:
    """Holds the attended set of each row of the indexer loss."""

    packed_mask: torch.Tensor | None = None
    """int32 [B, R, ceil(Lk / 32)]: bit s % 32 of word s // 32 says that the row's query attends to key s. None: all
    causal keys of the document."""
    log_sum: torch.Tensor | None = None
    """fp32 [B, R], log sum_{s in S_t} exp(beta I[t, s]) of the same inputs and beta, from `select_keys`; -inf for rows
    that attend to nothing. Together with `Target.row_sum` it saves one pass over the keys."""
    geometry: Geometry = ALL_OF_ONE_SEQUENCE
    """With a packed mask, document starts only save work."""
    key_lists: KeyLists | None = None
    """In place of the packed mask and of the geometry."""

    @property
    def query_start(self) -> int:
        return self.geometry.query_start if self.key_lists is None else self.key_lists.query_start


def triton_indexer_loss(
    indexer: Indexer,
    target: Target,
    attended: Attended,
    rows: RowSample = ALL_ROWS,
    *,
    row_chunk_bytes: int | None = None,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum KL(p_t || softmax_{s in S_t}(beta I[t, s])) over the rows, t = query_start + row.

    `indexer_scores`, `renormalise_target` and `indexer_kl` define the loss. Only the indexer's tensors get gradients.

    For fp32 inputs, scores are exact. For bf16 inputs, products accumulate in fp32, and the hardware's sigmoid changes
    a score by about 1e-5 of its value. Results repeat bit for bit. `row_chunk_bytes` changes only the last bits of the
    keys' gradients, and only with key lists.

    Args:
        indexer: its keys up to the last query's own
        rows: which rows are computed, over key lists in whole tiles; the sample is the same on every tensor-parallel
            rank
        row_chunk_bytes: size of a chunk of the target; scratch memory is at most about twice this. By default
            LOSS_CHUNK_BYTES, and LIST_LOSS_CHUNK_BYTES over key lists.
        blocks: block shapes, for measurements

    Returns:
        0-d fp32; the KL of each row, fp32 [B, R], without gradient, NaN for rows that are not computed
    """
    batch, num_rows = check_indexer(indexer, attended.query_start)
    _check_attended(attended, (batch, num_rows, indexer.keys.shape[1]))
    if attended.log_sum is not None and target.row_sum is None:
        raise ValueError("attended.log_sum is given with target.row_sum None; pass both or none")
    if target.row_sum is not None and not target.row_sum > 0:
        raise ValueError(f"target.row_sum is {target.row_sum}; pass a positive number")
    by_lists = attended.key_lists is not None
    if row_chunk_bytes is None:
        row_chunk_bytes = LIST_LOSS_CHUNK_BYTES if by_lists else LOSS_CHUNK_BYTES
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)

    tensors = tensors_of(indexer)
    stretch = TILE_QUERIES if by_lists else None
    sample, factor = sample_rows(num_rows, rows.fraction, rows.draw, rows.share, stretch)
    calculate = partial(
        _value_and_gradients,
        target=target,
        attended=attended,
        sample=sample,
        with_gradients=needs_gradients(tensors),
        row_chunk_bytes=row_chunk_bytes,
        blocks=blocks,
    )
    total, kl_of_rows = LossWithGradients.apply(*tensors, indexer.activation, calculate)
    return (total if factor == 1 else total * factor), kl_of_rows


def _value_and_gradients(
    indexer: Indexer,
    target: Target,
    attended: Attended,
    sample: SampledRows,
    with_gradients: bool,
    row_chunk_bytes: int,
    blocks: Blocks | None,
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Return the sum of the KL of all sampled rows, the KL of each row [B, R], and the gradients of the sum.

    The gradients are in the order of `tensors_of`. `triton_indexer_loss` has checked the indexer and made its inverse
    temperature a tensor.
    """
    inputs = _inputs(indexer, target.row_sum, attended)
    batch, dim = inputs.k_idx.shape[0], inputs.k_idx.shape[2]
    chosen = choose_blocks(inputs) if blocks is None else blocks
    unit = chosen.rows if sample.every == 1 else max(chosen.rows, sample.stretch)
    chunk_rows = max(row_chunk_bytes // (4 * batch * max(inputs.columns, 1)) // unit, 1) * unit
    sampled = sample.every != 1
    one_chunk = not sampled and sample.count <= chunk_rows
    outputs = new_outputs(inputs, chosen, with_gradients=with_gradients, sampled=sampled, one_chunk=one_chunk)
    for number in range(0, sample.count, chunk_rows):
        chunk = sample.chunk(number, chunk_rows)
        of_chunk = target.of_rows(chunk).detach()
        _check_target(of_chunk, batch, chunk.count, inputs.columns, inputs.q_idx.device)
        run_chunk(inputs, outputs, of_chunk, chunk, chosen)

    sums = totals(inputs, outputs)
    if outputs.dk is None or sums.d_beta is None:
        return sums.kl, outputs.kl_rows, (None,) * 6
    beta = indexer.inverse_temperature
    assert isinstance(beta, torch.Tensor)
    gradients = (
        outputs.dq,
        (outputs.dk[0] if len(outputs.dk) == 1 else outputs.dk.sum(0))[..., :dim].to(indexer.keys.dtype),
        outputs.dw,
        sums.d_score_bias,
        sums.d_weight_bias,
        sums.d_beta.sum().to(beta.dtype).reshape(beta.shape) if beta.requires_grad else None,
    )
    return sums.kl, outputs.kl_rows, gradients


def _inputs(indexer: Indexer, target_sum: float | None, attended: Attended) -> Inputs:
    beta, starts = indexer.inverse_temperature, attended.geometry.document_starts
    assert isinstance(beta, torch.Tensor)
    if attended.key_lists is not None:
        starts = None
    score_bias, weight_bias = indexer.score_bias, indexer.head_weight_bias
    return Inputs(
        q_idx=indexer.queries.contiguous(),
        k_idx=indexer.keys.contiguous(),
        weight_logits=indexer.head_weight_logits.contiguous(),
        score_bias=None if score_bias is None else score_bias.contiguous(),
        weight_bias=None if weight_bias is None else weight_bias.contiguous(),
        beta=beta.detach().reshape(1).to(torch.float32),
        packed_mask=None if attended.packed_mask is None else attended.packed_mask.contiguous(),
        document_starts=None if starts is None else starts.contiguous(),
        kind=score_kind(indexer.queries.dtype, indexer.activation, indexer.queries.device),
        query_start=attended.query_start,
        target_sum=target_sum,
        log_sum=None if attended.log_sum is None else attended.log_sum.detach().contiguous(),
        key_lists=attended.key_lists,
    )


def _check_attended(attended: Attended, sizes: tuple[int, int, int]) -> None:
    """Check shapes and dtypes; `sizes` are B, R and Lk."""
    batch, num_rows, num_keys = sizes
    mask, starts, log_sum = attended.packed_mask, attended.geometry.document_starts, attended.log_sum
    if attended.key_lists is not None:
        check_lists(attended.key_lists, batch, num_rows)
    if mask is not None:
        check_shape("packed_mask", mask, "[B, R, ceil(Lk / 32)]", (batch, num_rows, -(-num_keys // 32)))
        if mask.dtype != torch.int32:
            raise ValueError(f"packed_mask has dtype {mask.dtype}; pass int32")
    if starts is not None:
        check_shape("document_starts", starts, "[B, R]", (batch, num_rows))
    if log_sum is not None:
        check_shape("log_sum", log_sum, "[B, R]", (batch, num_rows))
        if log_sum.dtype != torch.float32:
            raise ValueError(f"log_sum has dtype {log_sum.dtype}; pass float32")


def _check_target(target: torch.Tensor, batch: int, rows: int, num_keys: int, device: torch.device) -> None:
    check_shape("target.of_rows(...)", target, "[B, rows, columns]", (batch, rows, num_keys))
    if (
        target.dtype not in (torch.float32, torch.float16)
        or target.device != device
        or target.stride(-1) != 1
    ):
        raise ValueError(
            f"target.of_rows(...) gave {target.dtype} on {target.device} with strides {target.stride()}; "
            f"pass float32 or float16 on {device}, contiguous in the keys"
        )
