"""The indexer's loss (GSA, equations 14 and 15) and its gradients, by Triton kernels.

The KL is linear in its upstream gradient, a scalar per loss. So one forward pass computes value and
gradients, chunk of rows by chunk of rows, and the backward pass only scales: nothing of size L x L is kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from gsa_kernels import sampling
from gsa_kernels.checks import beta_tensor, check_activation, check_at_least, check_shape, count_queries
from gsa_kernels.hopper.target_blocks import block_shape
from gsa_kernels.indexer_loss.autograd import LossWithGradients, check_sampling, needs_gradients
from gsa_kernels.indexer_loss.triton_launch import (
    Blocks,
    Inputs,
    choose_blocks,
    new_outputs,
    run_chunk,
    score_kind,
    totals,
)
from gsa_kernels.limits import LOSS_CHUNK_BYTES
from gsa_kernels.sampling import SampledRows, sample_rows

TargetRows = Callable[[SampledRows], torch.Tensor]
"""Rows -> fp32 or fp16 [B, their count, Lk]: attention probabilities of these rows, summed over the heads and, with
`selection_block`, over the queries of each row's block. Or [B, parts, their count, Lk], whose sum that is, or these in
blocks, [B, parts, row blocks, key blocks, 1024] (target_blocks.py)."""


def indexer_kl_loss(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    target_rows: TargetRows,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    inverse_temperature: float | torch.Tensor = 1.0,
    words: torch.Tensor | None = None,
    target_sum: float | None = None,
    log_sum: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    selection_block: int = 1,
    query_start: int = 0,
    row_chunk_bytes: int = LOSS_CHUNK_BYTES,
    row_fraction: float = 1.0,
    seed: int | None = None,
    share: tuple[int, int] = (0, 1),
    return_rows: bool = False,
    blocks: Blocks | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sum over the rows of KL(p_t || softmax_{s in support}(beta I[t, s])), t = query_start + row * selection_block.

    The definition is `indexer_scores`, `renormalise_target` and `indexer_kl`, and of the target of a block of
    queries `sum_over_blocks`. Gradients go to q_idx, k_idx,
    weight_logits, both biases and the inverse temperature; none to the target.

    Scores are exact for fp32 inputs. For bf16 and fp16 the products are accumulated in fp32 and sigmoid is
    the hardware's approximation (about 1e-5 of a score). Results do not change from run to run, nor with
    `row_chunk_bytes`.

    Args:
        q_idx: [B, R, HI, DI], R = ceil(L / selection_block)
        k_idx: [B, Lk, DI], Lk = query_start + L
        weight_logits: [B, R, HI]
        target_rows: gives the target of a chunk of rows, at any positive scale; what it holds off the
            support is ignored. Called once per chunk, without gradients.
        score_bias, weight_bias: [HI]
        inverse_temperature: beta, a number or a tensor of one element
        words: int32 [B, R, ceil(Lk / 32)], bit s % 32 of word s // 32 set: key s is in S_t of the row's query.
            The support is then S_t, without it all visible keys.
        target_sum: what the target of each row sums to over the support, if that is known: `head_sum_probs_rows`
            gives one per head. An error of 1e-5 of it changes the gradients by as much and the value by its square.
            Only the kernels for bf16 make use of it, and of `log_sum`: the others calculate both.
        log_sum: fp32 [B, R], log sum_{s in support} exp(beta I[t, s]) of the same inputs and beta, from `select_keys`;
            -inf for rows without support. With target_sum it spares a pass.
        document_starts: int32 [B, L], the first key that a query sees; 0 if None
        selection_block: b; only the first query of each aligned block of b has a row
        query_start: position of the first query, a multiple of b
        row_chunk_bytes: size of a chunk of the target; scratch memory is about twice this
        row_fraction: 1 / n: below 1, an unbiased estimate from that share of the rows, rescaled (`sample_rows`)
        seed: chooses these rows; the same on every tensor-parallel rank
        share: (rank, size) of ranks that share the rows out: only this rank's part of value and gradients, which sum to
            the whole over the ranks; evenly spaced like a sample
        return_rows: give also the KL of each row, without gradient; NaN for rows left out of the estimate
        blocks: block shapes, for measurements

    Returns:
        0-d fp32, or (0-d fp32, fp32 [B, R])
    """
    batch, num_rows, length = check_inputs(
        q_idx, k_idx, weight_logits, score_bias, weight_bias, activation, selection_block, query_start
    )
    check_support(words, document_starts, log_sum, (batch, num_rows, length, query_start + length))
    if log_sum is not None and target_sum is None:
        raise ValueError("log_sum is given with target_sum None; pass both or none")
    if target_sum is not None and not target_sum > 0:
        raise ValueError(f"target_sum is {target_sum}; pass a positive number")
    beta = beta_tensor(inverse_temperature, q_idx.device)
    check_at_least("row_chunk_bytes", row_chunk_bytes, 1)
    check_sampling(row_fraction, seed)

    differentiable = (q_idx, k_idx, weight_logits, score_bias, weight_bias, beta)
    sample, factor = sample_rows(num_rows, row_fraction, seed, share)
    settings: dict[str, Any] = {
        "target_rows": target_rows,
        "activation": activation,
        "words": words,
        "target_sum": target_sum,
        "log_sum": log_sum,
        "document_starts": None if document_starts is None else document_starts[:, ::selection_block],
        "selection_block": selection_block,
        "query_start": query_start,
        "row_chunk_bytes": row_chunk_bytes,
        "sample": sample,
        "blocks": blocks,
        "with_gradients": needs_gradients(*differentiable),
    }
    total, rows = LossWithGradients.apply(*differentiable, partial(value_and_gradients, **settings))
    if factor != 1:
        total = total * factor
    return (total, rows) if return_rows else total


def value_and_gradients(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    score_bias: torch.Tensor | None,
    weight_bias: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    target_rows: TargetRows,
    activation: str,
    words: torch.Tensor | None,
    target_sum: float | None,
    log_sum: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    selection_block: int,
    query_start: int,
    row_chunk_bytes: int,
    sample: SampledRows,
    blocks: Blocks | None,
    with_gradients: bool,
    with_value: bool = True,
    gradient_scale: float = 1.0,
) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """The sum over the sample, the KL of each row [B, R], and the sum's gradients in the order of the first six
    arguments, which `indexer_kl_loss` has checked.

    Args:
        with_value: without it sum and KL are None; the gradients are the same to the bit
        document_starts: [B, R], of the rows
        gradient_scale: factor of the gradients
    """
    batch, num_keys = k_idx.shape[:2]
    inputs = Inputs(
        q_idx=q_idx.contiguous(),
        k_idx=k_idx.contiguous(),
        weight_logits=weight_logits.contiguous(),
        score_bias=None if score_bias is None else score_bias.contiguous(),
        weight_bias=None if weight_bias is None else weight_bias.contiguous(),
        beta=beta.detach().reshape(1).to(torch.float32),
        words=None if words is None else words.contiguous(),
        document_starts=None if document_starts is None else document_starts.contiguous(),
        kind=score_kind(q_idx.dtype, activation, q_idx.device),
        query_stride=selection_block,
        query_start=query_start,
        target_sum=target_sum,
        log_sum=None if log_sum is None else log_sum.detach().contiguous(),
    )
    chosen = choose_blocks(inputs) if blocks is None else blocks
    unit = chosen.rows if sample.every == 1 else sampling.STRETCH_ROWS
    chunk_rows = max(row_chunk_bytes // (4 * batch * num_keys) // unit, 1) * unit
    sampled = sample.every != 1
    one_chunk = not sampled and sample.count <= chunk_rows
    outputs = new_outputs(
        inputs,
        with_value=with_value,
        with_gradients=with_gradients,
        sampled=sampled,
        one_chunk=one_chunk,
        gradient_scale=gradient_scale,
    )
    for number in range(0, sample.count, chunk_rows):
        chunk = sample.chunk(number, chunk_rows)
        target = target_rows(chunk).detach()
        target = target[:, None] if target.ndim == 3 else target
        _check_target(target, batch, chunk.count, num_keys, q_idx.device)
        run_chunk(inputs, outputs, target, chunk, chosen)

    sums = totals(inputs, outputs)
    kl_rows = outputs.kl_rows
    if sampled and kl_rows is not None:
        kl_rows = _only_sampled(kl_rows, sample)
    if outputs.dk is None or sums.d_beta is None:
        return sums.kl, kl_rows, (None,) * 6
    gradients = (
        outputs.dq,
        outputs.dk.to(k_idx.dtype),
        outputs.dw,
        sums.d_score_bias,
        sums.d_weight_bias,
        sums.d_beta.sum().to(beta.dtype).reshape(beta.shape) if beta.requires_grad else None,
    )
    return sums.kl, kl_rows, gradients


def _only_sampled(kl_rows: torch.Tensor, sample: SampledRows) -> torch.Tensor:
    taken = sample.rows(kl_rows.device)
    return torch.full_like(kl_rows, float("nan")).index_copy_(1, taken, kl_rows[:, taken])


def check_inputs(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    score_bias: torch.Tensor | None,
    weight_bias: torch.Tensor | None,
    activation: str,
    selection_block: int,
    query_start: int,
) -> tuple[int, int, int]:
    """Shapes and dtypes; B, R and L."""
    check_at_least("selection_block", selection_block, 1)
    check_at_least("query_start", query_start, 0)
    check_shape("q_idx", q_idx, "[B, R, HI, DI]", (None, None, None, None))
    batch, num_rows, heads, dim = q_idx.shape
    num_keys = query_start + num_rows if selection_block == 1 else None
    check_shape("k_idx", k_idx, "[B, query_start + L, DI]", (batch, num_keys, dim))
    check_at_least("Lk", k_idx.shape[1], 1)
    length = count_queries(query_start, k_idx.shape[1], selection_block)
    check_shape("q_idx", q_idx, "[B, R, HI, DI]", (batch, -(-length // selection_block), heads, dim))
    check_shape("weight_logits", weight_logits, "[B, R, HI]", (batch, num_rows, heads))
    if q_idx.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q_idx has dtype {q_idx.dtype}; pass fp32, bf16 or fp16, or use the reference")
    if k_idx.dtype != q_idx.dtype:
        raise ValueError(f"k_idx has dtype {k_idx.dtype}; pass {q_idx.dtype}, as q_idx has")
    check_activation(activation, heads, score_bias=score_bias, weight_bias=weight_bias)
    return batch, num_rows, length


def check_support(
    words: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    log_sum: torch.Tensor | None,
    sizes: tuple[int, int, int, int],
) -> None:
    """Shapes and dtypes; `sizes` are B, R, L and Lk."""
    batch, num_rows, length, num_keys = sizes
    if words is not None:
        check_shape("words", words, "[B, R, ceil(Lk / 32)]", (batch, num_rows, -(-num_keys // 32)))
        _check_int32("words", words)
    if document_starts is not None:
        check_shape("document_starts", document_starts, "[B, L]", (batch, length))
        _check_int32("document_starts", document_starts)
    if log_sum is not None:
        check_shape("log_sum", log_sum, "[B, R]", (batch, num_rows))
        if log_sum.dtype != torch.float32:
            raise ValueError(f"log_sum has dtype {log_sum.dtype}; pass float32")


def _check_int32(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {tensor.dtype}; pass int32")


def _check_target(target: torch.Tensor, batch: int, rows: int, num_keys: int, device: torch.device) -> None:
    if target.ndim == 5:
        shape = (batch, None, *block_shape(rows, num_keys))
        check_shape("target_rows(...)", target, "[B, parts, row blocks, key blocks, 1024]", shape)
    else:
        check_shape("target_rows(...)", target, "[B, parts, rows, Lk]", (batch, None, rows, num_keys))
    if (
        target.dtype not in (torch.float32, torch.float16)
        or target.device != device
        or target.stride(-1) != 1
    ):
        raise ValueError(
            f"target_rows(...) gave {target.dtype} on {target.device} with strides {target.stride()}; "
            f"pass float32 or float16 on {device}, contiguous in the keys"
        )
