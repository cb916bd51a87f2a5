"""Decoding with Gated Sparse Attention: one new query per sequence against a cache of keys, values and indexer keys.

    selection = new_selection(batch, k_max, device=...)          # per layer
    workspace = new_workspace(batch, max_length, ..., device=...)  # shared by all layers
    decode_step(q, k, v, q_idx, k_idx, weight_logits, lengths, ema, selection, workspace, ...)

Four launches: scores, two for the selection, attention. The host reads nothing back, and with `out` given nothing
is allocated, so that a call can be captured in a CUDA graph and replayed while `lengths`, a device tensor, grows;
the grids cover the whole cache. The definitions are `decode_top_k` and `decode_attention`. Results are deterministic.

With `selection_block` b a selection serves the b tokens of an aligned block: it is made when the block's first
token (position t, t % b == 0) is decoded. Rows at other positions keep what `selection` holds, so a batch whose
sequences are at different places in their blocks refreshes each at its own time; where all are aligned, calling
`decode_select` every b tokens and `decode_attend` at each saves the launches. After a prefill that ended inside
a block, select once with that block's first query and `lengths` = its position + 1.
"""

from typing import Literal

import torch

from gsa_kernels.checks import check_activation, check_at_least, check_budget_rule, check_shape
from gsa_kernels.decode.state import DecodeSelection, DecodeWorkspace
from gsa_kernels.decode.triton_attend import attend_to_indices
from gsa_kernels.decode.triton_score import score_keys
from gsa_kernels.decode.triton_select import select_indices
from gsa_kernels.devices import launching_on
from gsa_kernels.limits import DECODE_INDEXER_HEADS, HEAD_SIZES, INDEXER_HEAD_SIZES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    lengths: torch.Tensor,
    variance_ema: torch.Tensor,
    selection: DecodeSelection,
    workspace: DecodeWorkspace,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    k_base: int,
    k_min: int,
    k_max: int,
    mode: Literal["inverse", "direct", "off"],
    selection_block: int = 1,
    local_window: int = 0,
    output_gate_logits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_select`, then `decode_attend`: their arguments, and the latter's result.

    local_window must be at least selection_block, so that the tokens since the selection are attended to.
    """
    if 1 < selection_block > local_window:
        raise ValueError(
            f"local_window is {local_window} with selection_block {selection_block}; "
            f"pass local_window of at least {selection_block}"
        )
    if k_idx.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"k_idx is {tuple(k_idx.shape)} and k {tuple(k.shape)}; pass caches of one [B, L_max]"
        )
    decode_select(
        q_idx,
        k_idx,
        weight_logits,
        lengths,
        variance_ema,
        selection,
        workspace,
        score_bias=score_bias,
        weight_bias=weight_bias,
        activation=activation,
        k_base=k_base,
        k_min=k_min,
        k_max=k_max,
        mode=mode,
        selection_block=selection_block,
    )
    chained = _can_chain(q)
    return _attend(
        q, k, v, lengths, selection, workspace, local_window, output_gate_logits, softmax_scale, out, chained
    )


@torch.no_grad()
def decode_select(
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    weight_logits: torch.Tensor,
    lengths: torch.Tensor,
    variance_ema: torch.Tensor,
    selection: DecodeSelection,
    workspace: DecodeWorkspace,
    *,
    score_bias: torch.Tensor | None = None,
    weight_bias: torch.Tensor | None = None,
    activation: Literal["sigmoid", "relu"] = "sigmoid",
    k_base: int,
    k_min: int,
    k_max: int,
    mode: Literal["inverse", "direct", "off"],
    selection_block: int = 1,
) -> None:
    """Write each sequence's k_t keys of highest indexer score, ties to the lower index, into `selection`.

    Exact for the scores this call calculates, which it leaves in `workspace.scores` and which differ from
    the reference by rounding only.

    Args:
        q_idx: [B, HI, DI], of the token at position lengths - 1; bf16, fp16 or fp32
        k_idx: [B, L_max, DI], the cache, that token's key included; dtype of q_idx
        weight_logits: w, [B, HI]
        lengths: int32 [B], tokens of each sequence, the new one included; 0 marks an unused slot, which selects
            nothing. Values above L_max count as L_max. Entries of the caches from there on are not read.
        variance_ema: 0-d fp32, the layer's frozen moving average
        selection: for B sequences and at least min(k_max, L_max) keys; overwritten
        workspace: for at least B sequences of L_max tokens
        score_bias: b, [HI], zero if None
        weight_bias: c, [HI], zero if None
        selection_block: b; rows whose position is no multiple of b keep their selection
    """
    check_shape("q_idx", q_idx, "[B, HI, DI]", (None, None, None))
    batch, heads, dim = q_idx.shape
    check_shape("k_idx", k_idx, "[B, L_max, DI]", (batch, None, dim))
    check_shape("weight_logits", weight_logits, "[B, HI]", (batch, heads))
    check_shape("variance_ema", variance_ema, "a 0-d tensor", ())
    max_length = k_idx.shape[1]
    check_at_least("the cache's L_max", max_length, 1)
    if heads not in DECODE_INDEXER_HEADS:
        raise ValueError(f"q_idx has {heads} heads; pass 1 to {DECODE_INDEXER_HEADS[-1]}")
    if dim not in INDEXER_HEAD_SIZES:
        raise ValueError(f"q_idx has head size {dim}; pass 16 to 128")
    biases = {"score_bias": score_bias, "weight_bias": weight_bias}
    check_activation(activation, heads, **biases)
    for name, tensor in {"weight_logits": weight_logits, **biases}.items():
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; pass bfloat16, float16 or float32")
    _check_floats({"q_idx": q_idx, "k_idx": k_idx})
    _check_unit_strides({"q_idx": q_idx, "k_idx": k_idx, "weight_logits": weight_logits, **biases})
    if variance_ema.dtype != torch.float32:
        raise ValueError(f"variance_ema has dtype {variance_ema.dtype}; pass float32")
    check_budget_rule(k_base, k_min, k_max, mode)
    check_at_least("selection_block", selection_block, 1)
    k_max = min(k_max, max_length)
    if selection.indices.shape[1] < k_max:
        raise ValueError(f"selection holds {selection.indices.shape[1]} keys; pass one for {k_max}")
    _check_workspace(workspace, batch, max_length)
    given = {"k_idx": k_idx, "weight_logits": weight_logits, "variance_ema": variance_ema, **biases}
    _check_device(q_idx, lengths, selection, workspace, given)

    chained = _can_chain(q_idx)
    budget_rule = (k_base, min(k_min, max_length), k_max, mode)
    with launching_on(q_idx, "the query"):
        score_keys(
            q_idx,
            k_idx,
            weight_logits,
            score_bias,
            weight_bias,
            activation,
            lengths,
            k_max,
            selection_block,
            workspace,
            chained,
        )
        select_indices(
            lengths, max_length, variance_ema, budget_rule, selection_block, selection, workspace, chained
        )


@torch.no_grad()
def decode_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    selection: DecodeSelection,
    workspace: DecodeWorkspace,
    *,
    local_window: int = 0,
    output_gate_logits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's new token over its selection and its last `local_window` keys, times G1.

    A key that is in both counts once. Query head h reads key-value head h // (H / Hkv).

    Args:
        q: [B, H, D], D 32, 64 or 128; bf16, fp16 or fp32
        k: [B, L_max, Hkv, D], the cache, the new token's key included
        v: [B, L_max, Hkv, D], the cache
        lengths: int32 [B]; see `decode_select`
        local_window: keys, the query's own included
        output_gate_logits: [B, H, D], G1 before its sigmoid
        softmax_scale: positive; 1 / sqrt(D) if None
        out: [B, H, D], where to write; allocated if None

    Returns:
        out: [B, H, D] in the dtype of q; zeros where the length is 0
    """
    # Not chained: it would read q while the kernel in front, which is the caller's, may still write it.
    return _attend(
        q, k, v, lengths, selection, workspace, local_window, output_gate_logits, softmax_scale, out, False
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    selection: DecodeSelection,
    workspace: DecodeWorkspace,
    local_window: int,
    output_gate_logits: torch.Tensor | None,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    chained: bool,
) -> torch.Tensor:
    """Arguments as in `decode_attend`. chained: the kernel in front is the selection's."""
    check_shape("q", q, "[B, H, D]", (None, None, None))
    batch, heads, dim = q.shape
    check_shape("k", k, "[B, L_max, Hkv, D]", (batch, None, None, dim))
    max_length, kv_heads = k.shape[1:3]
    check_shape("v", v, "[B, L_max, Hkv, D]", tuple(k.shape))
    if 0 in (batch, heads, max_length):
        raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}; pass a sequence, a head, a token")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads and k has {kv_heads}; pass query heads in a multiple of k's")
    if dim not in HEAD_SIZES:
        raise ValueError(f"the head size is {dim}; pass one of {HEAD_SIZES}")
    check_at_least("local_window", local_window, 0)
    floats = {"q": q, "k": k, "v": v}
    for name, tensor in (("output_gate_logits", output_gate_logits), ("out", out)):
        if tensor is not None:
            check_shape(name, tensor, "[B, H, D]", (batch, heads, dim))
            floats[name] = tensor
    _check_floats(floats)
    _check_unit_strides(floats)
    partial = tuple(workspace.partial_out.shape)
    if partial[0] < batch or (partial[1], *partial[3:]) != (kv_heads, heads // kv_heads, dim):
        raise ValueError(
            f"workspace is for {partial[0]} sequences of {partial[1]} key-value heads x {partial[3]} query heads "
            f"x {partial[4]}; make one for {batch} of {kv_heads} x {heads // kv_heads} x {dim}"
        )
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not scale > 0:
        raise ValueError(f"softmax_scale is {scale}; pass a positive number")
    _check_device(q, lengths, selection, workspace, floats)
    if out is None:
        out = torch.empty_like(q)
    with launching_on(q, "the query"):
        attend_to_indices(
            q,
            k,
            v,
            lengths,
            selection,
            workspace,
            min(local_window, max_length),
            output_gate_logits,
            scale,
            out,
            chained,
        )
    return out


def _check_floats(tensors: dict[str, torch.Tensor]) -> None:
    """One dtype, that of the first."""
    first = next(iter(tensors))
    wanted = tensors[first].dtype
    if wanted not in _DTYPES:
        raise ValueError(f"{first} has dtype {wanted}; pass bfloat16, float16 or float32")
    for name, tensor in tensors.items():
        if tensor.dtype != wanted:
            raise ValueError(f"{name} has dtype {tensor.dtype} and {first} {wanted}; pass one dtype")


def _check_unit_strides(tensors: dict[str, torch.Tensor] | dict[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of {name} has stride {tensor.stride(-1)}; make it contiguous"
            )


def _check_workspace(workspace: DecodeWorkspace, batch: int, max_length: int) -> None:
    sequences, columns = workspace.scores.shape
    if sequences < batch or columns < max_length:
        raise ValueError(
            f"workspace is for {sequences} sequences of {columns} tokens; make one for {batch} of {max_length}"
        )


def _check_device(
    first: torch.Tensor,
    lengths: torch.Tensor,
    selection: DecodeSelection,
    workspace: DecodeWorkspace,
    others: dict[str, torch.Tensor] | dict[str, torch.Tensor | None],
) -> None:
    """Also the layout of `lengths` and of the selection."""
    batch = first.shape[0]
    check_shape("lengths", lengths, "[B]", (batch,))
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"lengths is {lengths.dtype} with stride {lengths.stride()}; pass contiguous int32")
    check_shape("selection.indices", selection.indices, "[B, k_cap]", (batch, None))
    if not selection.indices.is_contiguous():
        raise ValueError("selection.indices is not contiguous; make it with new_selection")
    state = {"lengths": lengths, "selection": selection.indices, "workspace": workspace.scores}
    for name, tensor in {**state, **others}.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, the query on {first.device}; pass one device for all"
            )


def _can_chain(tensor: torch.Tensor) -> bool:
    """Programmatic dependent launch: a kernel is in place before the one in front of it ends. Hopper has it."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
