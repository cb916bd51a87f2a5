"""Calls the kernels for the golden problems; only this file knows their interface.

Each function takes a problem and its inputs on the device, and returns outputs and gradients by name. If the interface
of the kernels changes, keep name, meaning, dtype and shape of each output, so that its hash can be compared with the
recorded hash.
"""

from __future__ import annotations

from typing import Any

import torch

from golden.kernel_problems import Problem
from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.decode.op import decode_step as decode
from gsa_kernels.decode.state import LayerCache, new_selection, new_workspace
from gsa_kernels.fused.adamw.op import squared_updates
from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.sums.op import add_column_sums, add_total
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.indexer.split_op import fused_split_projection
from gsa_kernels.key_lists.triton_rows import packed_mask_of_rows
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import list_columns
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.selection.op import select_keys
from gsa_kernels.selection.triton_statistics import statistics_of_packed_mask
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection

Tensors = dict[str, torch.Tensor]

CANDIDATES_FROM = 2048
"""Smallest number of keys for selection by candidates. In training the number is far larger."""
LOSS_DRAW = 1
"""Chooses the rows of a sampled loss."""


def selection(p: Problem, x: Tensors) -> Tensors:
    chosen = _select(p, x)
    if p.lists:
        lists = chosen.key_lists
        bits = packed_mask_of_rows(lists, torch.arange(p.length, device=x["k_idx"].device))
        found = {"bits": bits, "entries": lists.counts}
    else:
        found = {"bits": chosen.packed_mask}
        if p.variant == "log-sum":
            found["log_sum"] = chosen.log_sum
    return {**found, "budget": chosen.budget, "variance": chosen.variance}


def attention(p: Problem, x: Tensors) -> Tensors:
    chosen = None if p.dense else _select(p, x)
    leaves = _leaves(x, "q", "k", "v", "gate") if p.gate else _leaves(x, "q", "k", "v")
    out, lse = _attend(p, {**x, **leaves}, chosen)
    out.backward(x["grad"])
    return {"out": out, "log_sum_exp": lse, **_gradients(leaves)}


def indexer_loss(p: Problem, x: Tensors) -> Tensors:
    chosen = None if p.dense else _select(p, x)
    with torch.no_grad():
        _, lse = _attend(p, x, chosen)
    leaves = _indexer_leaves(p, x)
    indexer, sample = _indexer(p, leaves), RowSample(p.row_fraction, LOSS_DRAW)
    q, k = x["q"], x["k"]
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
    words, lists, geometry = None, None, _geometry(p, x)
    if chosen is not None:
        words, lists = chosen.packed_mask, chosen.key_lists
    log_sum = chosen.log_sum if p.variant == "log-sum" else None

    def of_rows(rows: Any) -> torch.Tensor:
        if lists is not None:
            return head_sum_probs_lists(q, k, lse, lists, rows, list_columns(lists), dtype)
        return head_sum_probs_rows(q, k, lse, words, rows, geometry, dtype=dtype)

    attended = Attended(words, log_sum, geometry, lists)
    loss, rows = triton_indexer_loss(indexer, Target(of_rows, float(p.heads)), attended, sample)
    loss.backward()
    return {"loss": loss, "rows": rows, **_gradients(leaves)}


def decode_step(p: Problem, x: Tensors) -> Tensors:
    device = x["k"].device
    chosen = new_selection(p.batch, p.k_max, device=device)
    workspace = new_workspace(
        p.batch, p.length, heads=p.heads, kv_heads=p.kv_heads, head_size=p.head_dim, device=device
    )
    gate = x["gate"] if p.gate else None
    cache = LayerCache(x["k"], x["v"], x["lengths"], chosen, workspace)
    newest = {**x, "q_idx": x["q_idx"][:, None], "weight_logits": x["weight_logits"][:, None]}
    geometry = Geometry(local_window=p.window)
    out = decode(x["q"], _indexer(p, newest), cache, _rule(p), x["variance_ema"], geometry, gate)
    place = torch.arange(p.k_max, device=device)
    return {
        "out": out,
        "indices": torch.where(place < chosen.counts[:, None], chosen.indices, -1),
        "counts": chosen.counts,
        "variance": chosen.variance,
    }


def prologue(p: Problem, x: Tensors) -> Tensors:
    gated = p.variant != "none"
    leaves = _leaves(x, "qkv", "gate_logits") if gated else _leaves(x, "qkv")
    q, k, v, gates = fused_split_rotate_gate(
        leaves["qkv"],
        leaves.get("gate_logits"),
        x["cos"],
        x["sin"],
        kv_heads=p.kv_heads,
        value_gate=gated,
        output_gate=p.variant not in ("none", "value"),
    )
    outputs, grads = [q, k, v], [x["grad_q"], x["grad_k"], x["grad_v"]]
    if gates is not None:
        outputs, grads = [*outputs, gates], [*grads, x["grad_gate"]]
    torch.autograd.backward(outputs, grads)
    names = ("q", "k", "v", "output_gate")
    return {**dict(zip(names, outputs, strict=False)), **_gradients(leaves)}


def swiglu(p: Problem, x: Tensors) -> Tensors:
    leaves = _leaves(x, "wide")
    out = fused_swiglu(leaves["wide"])
    out.backward(x["grad"])
    return {"out": out, **_gradients(leaves)}


def cross_entropy(p: Problem, x: Tensors) -> Tensors:
    leaf = _leaves(x, "logits")["logits"]
    logits = leaf * 1.0  # a leaf must not be overwritten
    losses = vocab_parallel_cross_entropy(logits, x["targets"], overwrite_logits=p.variant == "overwrite")
    losses.backward(x["grad"])
    return {"losses": losses, **_gradients({"logits": leaf})}


def sigmoid_gate(p: Problem, x: Tensors) -> Tensors:
    leaves = _leaves(x, "x", "logits")
    out = fused_sigmoid_gate(leaves["x"], leaves["logits"])
    out.backward(x["grad"])
    return {"out": out, **_gradients(leaves)}


def sums(p: Problem, x: Tensors) -> Tensors:
    total = torch.tensor([0.5, 3.0], dtype=torch.float64, device=x["x"].device)
    add_total(x["x"].float(), total[0])
    total[1] += x["x"].numel()  # the kernel counts once, too
    columns = torch.full((x["x"].shape[1],), 0.25, dtype=torch.float32, device=x["x"].device)
    add_column_sums(x["x"], columns)
    return {"total": total, "columns": columns}


def update_norm(p: Problem, x: Tensors) -> Tensors:
    weights, averages, squares = (
        [x[f"{kind}_large"], x[f"{kind}_small"]] for kind in ("weight", "average", "square")
    )
    return {"sum": squared_updates(weights, averages, squares, x["rate"], x["eps"], 0.1)}


def split_projection(p: Problem, x: Tensors) -> Tensors:
    leaves = _leaves(x, "together")
    outputs = fused_split_projection(leaves["together"], p.indexer_heads, p.indexer_dim)
    torch.autograd.backward(outputs, [x["grad_q"], x["grad_k"], x["grad_w"]])
    return {**dict(zip(("q_idx", "k_idx", "weight_logits"), outputs, strict=True)), **_gradients(leaves)}


def statistics(p: Problem, x: Tensors) -> Tensors:
    words = _select(p, x).packed_mask
    device = words.device
    found = statistics_of_packed_mask(
        words, torch.arange(0, p.length - 1, 5, device=device), torch.arange(p.length, device=device), 32
    )
    return {"sizes": found.sizes, "overlaps": found.overlaps, "union_ratios": found.union_ratios}


def _select(p: Problem, x: Tensors) -> Selection:
    """Select with key lists or with a packed mask, as the problem says."""
    arguments = (_indexer(p, x), _rule(p), x["variance_ema"], _geometry(p, x))
    if p.lists:
        return select_key_lists(*arguments)
    return select_keys(
        *arguments,
        candidates_from=CANDIDATES_FROM if p.variant == "candidates" else None,
        with_log_sum=p.variant == "log-sum",
    )


def _attend(p: Problem, x: Tensors, chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gate = x["gate"] if p.gate else None
    if chosen is not None and p.lists:
        return gathered_attention(x["q"], x["k"], x["v"], chosen.key_lists, gate)
    packed_mask = None if chosen is None else chosen.packed_mask
    return masked_attention(x["q"], x["k"], x["v"], packed_mask, _geometry(p, x), gate)


def _geometry(p: Problem, x: Tensors) -> Geometry:
    return Geometry(x.get("document_starts"), p.query_start, p.window)


def _indexer(p: Problem, x: Tensors) -> Indexer:
    biases = (x["score_bias"], x["weight_bias"]) if p.biases else (None, None)
    beta = x.get("beta", p.beta)
    return Indexer(x["q_idx"], x["k_idx"], x["weight_logits"], *biases, p.activation, beta)


def _rule(p: Problem) -> BudgetRule:
    return BudgetRule(p.k_base, p.k_min, p.k_max, p.mode)


def _leaves(x: Tensors, *names: str) -> Tensors:
    return {name: x[name].detach().clone().requires_grad_() for name in names}


def _indexer_leaves(p: Problem, x: Tensors) -> Tensors:
    names = ("q_idx", "k_idx", "weight_logits", *(("score_bias", "weight_bias") if p.biases else ()))
    beta = torch.tensor(p.beta, device=x["k_idx"].device, requires_grad=True)
    return {**_leaves(x, *names), "beta": beta}


def _gradients(leaves: Tensors) -> Tensors:
    """Return grad_NAME of each leaf; a missing gradient raises an error."""
    for name, leaf in leaves.items():
        if leaf.grad is None:
            raise ValueError(f"{name} has no gradient")
    return {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
