"""Gated Sparse Attention as a plain torch module: the paper's equations in order, on the functions of `api.py`.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

For a model of your own on one device; `gsa_train` has the same layer over many. Shapes: B sequences, L tokens, d hidden
size, H query heads, Hkv key-value heads, D their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gsa_kernels.api import indexer_loss, select, sparse_attention
from gsa_kernels.checks import check_shape, compute_dtype
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.types import BudgetRule, Geometry, Implementation, Indexer, Selection


@dataclass(frozen=True)
class LayerOptions:
    """Shapes and choices of one layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """D, even. By Triton one of limits.HEAD_SIZES."""
    rule: BudgetRule
    indexer_heads: int = 4
    indexer_dim: int = 64
    selection_block: int = 1
    """Queries in aligned blocks of this many share a selection; 1 in the paper."""
    local_window: int = 0
    """Latest keys that are always selected; 0 in the paper, at least `selection_block` where that is above 1."""
    rotary_base: float = 10000.0
    variance_ema_decay: float = 0.99

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; pass num_heads in a multiple of "
                "num_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; pass an even number, whose halves RoPE turns")


class LayerOutput(NamedTuple):
    out: torch.Tensor
    """[B, L, d]"""
    indexer_loss: torch.Tensor | None
    """fp32, 0-d: mean KL over the rows whose query sees at least two keys (that of the others is 0), to be added to the
    loss of the model; its gradient reaches the indexer alone. None where the indexer does not learn."""
    selection: Selection | None
    """What the queries selected; None where the indexer did not run."""


class GatedSparseAttention(nn.Module):
    """One layer. Call `update_variance_ema` after each optimizer step in which its indexer ran."""

    variance_ema: torch.Tensor
    variance_sum: torch.Tensor

    def __init__(self, options: LayerOptions, *, implementation: Implementation) -> None:
        super().__init__()
        self.options, self.implementation = options, implementation
        d, size = options.hidden_size, options.head_dim
        queries, keys = options.num_heads * size, options.num_kv_heads * size
        self.query = nn.Linear(d, queries, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, keys, bias=False)
        self.value_gate = nn.Linear(d, keys)  # G2
        self.output_gate = nn.Linear(d, queries)  # G1
        self.output = nn.Linear(queries, d, bias=False)
        self.indexer_query = nn.Linear(d, options.indexer_heads * options.indexer_dim, bias=False)
        self.indexer_key = nn.Linear(d, options.indexer_dim, bias=False)
        self.indexer_head_weight = nn.Linear(d, options.indexer_heads, bias=False)
        self.score_bias = nn.Parameter(torch.zeros(options.indexer_heads))  # b_j
        self.head_weight_bias = nn.Parameter(torch.zeros(options.indexer_heads))  # c_j
        self.register_buffer("variance_ema", torch.zeros((), dtype=torch.float32))
        # Sum of the variances, and number of those that count, since the last update.
        self.register_buffer("variance_sum", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        attention: Literal["dense", "sparse"] = "sparse",
        learns: bool = True,
        document_starts: torch.Tensor | None = None,
    ) -> LayerOutput:
        """[B, L, d] -> attention, and the indexer's loss.

        Args:
            hidden: the layer's normalised input
            attention: `dense` attends to all causal keys; with `learns` that is the indexer's warm-up
            learns: calculate the indexer's loss
            document_starts: int32 [B, L], the position at which each token's document begins; one document if None
        """
        options = self.options
        check_shape("hidden", hidden, "[B, L, d]", (None, None, options.hidden_size))
        if attention not in ("dense", "sparse"):
            raise ValueError(f"attention is {attention!r}; pass 'dense' or 'sparse'")
        size = (-1, options.head_dim)
        q = rotate(self.query(hidden).unflatten(-1, size), options.rotary_base)
        k = rotate(self.key(hidden).unflatten(-1, size), options.rotary_base)
        v = sigmoid_gate(self.value(hidden), self.value_gate(hidden)).unflatten(-1, size)  # eq. 9
        gate_logits = self.output_gate(hidden).unflatten(-1, size)

        geometry = Geometry(document_starts, 0, options.selection_block, options.local_window)
        indexer = selection = None
        if attention == "sparse" or learns:
            indexer = self._index(hidden.detach())
            selection = self._select(indexer, geometry)
        attended = selection if attention == "sparse" else None
        heads, lse = sparse_attention(
            q, k, v, attended, geometry, gate_logits, implementation=self.implementation
        )  # eqs. 10 to 12
        loss = None
        if learns and indexer is not None:
            total, rows = indexer_loss(
                indexer, q, k, lse, attended, geometry, implementation=self.implementation
            )  # eqs. 14 and 15
            loss = total / _counted_rows(geometry, rows).clamp(min=1)
        return LayerOutput(self.output(heads.flatten(2)), loss, selection)

    def _index(self, hidden: torch.Tensor) -> Indexer:
        """Equation 7's queries, keys and head weights. `hidden` is detached: only the loss trains the indexer."""
        options, block = self.options, self.options.selection_block
        leaders = hidden[:, ::block]
        return Indexer(
            self.indexer_query(leaders).unflatten(-1, (options.indexer_heads, options.indexer_dim)),
            self.indexer_key(hidden),
            self.indexer_head_weight(leaders),
            self.score_bias,
            self.head_weight_bias,
        )

    def _select(self, indexer: Indexer, geometry: Geometry) -> Selection:
        """k_t of equation 8, and S_t."""
        rule, ema = self.options.rule, self.variance_ema
        selection = select(indexer, rule, ema, geometry, implementation=self.implementation)
        if self.training:
            variance = selection.variance
            count = _counted_rows(geometry, variance)
            self.variance_sum += torch.stack([variance.sum(dtype=torch.float64), count.double()])
        return selection

    @torch.no_grad()
    def update_variance_ema(self) -> None:
        """Move the average of the score variance by those of the step; its first step starts it.

        After the optimizer step, so that all micro-batches of a step see one value, and no token one from its future.
        """
        total, count = self.variance_sum.unbind()
        mean = (total / count.clamp(min=1)).float()
        decay = self.options.variance_ema_decay
        moved = torch.where(self.variance_ema == 0, mean, decay * self.variance_ema + (1 - decay) * mean)
        self.variance_ema.copy_(torch.where((count > 0) & mean.isfinite(), moved, self.variance_ema))
        self.variance_sum.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> GatedSparseAttention:
        """Follow a move to another device, but keep the precision of the average: bf16 would not move by 1%."""
        before = {name: self._buffers[name] for name in ("variance_ema", "variance_sum")}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert buffer is not None
            assert moved is not None
            self._buffers[name] = buffer.to(moved.device)
        return self


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding of x [B, L, H, D] at the positions 0 .. L - 1: the pairs (x[i], x[i + D / 2]) turn. In fp32, or
    fp64 for fp64."""
    length, size = x.shape[1], x.shape[3]
    options: dict[str, Any] = {"device": x.device, "dtype": compute_dtype(x=x)}
    rates = base ** -(torch.arange(0, size, 2, **options) / size)
    angles = torch.arange(length, **options)[:, None] * rates
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _counted_rows(geometry: Geometry, of_rows: torch.Tensor) -> torch.Tensor:
    """How many of these rows [B, R] are of queries that see at least two keys: int64, 0-d. The others, first tokens of
    documents and filler, have nothing to choose, and a variance and KL of 0."""
    batch, rows = of_rows.shape
    positions = torch.arange(rows, device=of_rows.device) * geometry.selection_block
    starts = geometry.document_starts
    firsts = torch.zeros_like(positions) if starts is None else starts[:, :: geometry.selection_block]
    return (positions > firsts).expand(batch, rows).sum()
