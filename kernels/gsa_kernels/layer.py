"""Defines Gated Sparse Attention as a torch module that computes the paper's equations by the functions of `api.py`.

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores I -> k_t and S_t -> softmax over S_t -> G1 -> W_O

Use this module in your own model, on one device. `gsa_train` has the same layer for many devices. In shapes, B is the
number of sequences, L the number of tokens, d the hidden size, H the number of query heads, Hkv the number of key-value
heads, and D the size of a head.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gsa_kernels import layer_cache
from gsa_kernels.api import indexer_loss, select, sparse_attention
from gsa_kernels.attention.reference import attention_probs
from gsa_kernels.checks import check_shape, compute_dtype
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.layer_cache import GSACache, Heads, attend_with_cache
from gsa_kernels.layer_config import GSAConfig
from gsa_kernels.operations_reference import attended_keys
from gsa_kernels.rotary import YarnScaling
from gsa_kernels.types import Geometry, Indexer, Selection


class LayerOutput(NamedTuple):
    output: torch.Tensor
    """[B, L, d]"""
    indexer_loss: torch.Tensor
    """fp32, 0-d: mean KL over the queries with at least two causal keys. Add it to the loss of the model. Its gradient
    reaches only the indexer."""
    selection: Selection
    """The keys that the queries selected. In dense attention the queries attend to more keys."""


class GatedSparseAttention(nn.Module):
    """Implements one layer, configured by a `GSAConfig` or its fields.

    After each optimizer step, call `update_variance_ema` if the indexer ran in this step. Weights are initialised as in
    `nn.Linear`. Biases of the gates start at `config.gate_bias_init`, and biases of the indexer start at 0.
    """

    variance_ema: torch.Tensor
    variance_sum: torch.Tensor

    def __init__(self, config: GSAConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is not None and fields:
            raise ValueError(f"config is given with {', '.join(fields)}; pass a config, or fields of one")
        self.config = config = GSAConfig(**fields) if config is None else config
        d, size = config.hidden_size, config.head_size
        queries, keys = config.num_heads * size, config.num_kv_heads * size
        self.q_proj = nn.Linear(d, queries, bias=False)
        self.k_proj = nn.Linear(d, keys, bias=False)
        self.v_proj = nn.Linear(d, keys, bias=False)
        self.o_proj = nn.Linear(queries, d, bias=False)
        self.value_gate = nn.Linear(d, keys) if config.value_gate else None  # G2
        self.output_gate = nn.Linear(d, queries) if config.output_gate else None  # G1
        for gate in (self.value_gate, self.output_gate):
            if gate is not None:
                nn.init.constant_(gate.bias, config.gate_bias_init)
        self.indexer_query = nn.Linear(d, config.indexer_heads * config.indexer_dim, bias=False)
        self.indexer_key = nn.Linear(d, config.indexer_dim, bias=False)
        self.indexer_head_weight = nn.Linear(d, config.indexer_heads, bias=False)
        biased = config.indexer_activation == "sigmoid"
        self.indexer_score_bias, self.indexer_head_weight_bias = (  # b_j, c_j
            nn.Parameter(torch.zeros(config.indexer_heads)) if biased else None for _ in range(2)
        )
        self.register_buffer("variance_ema", torch.zeros((), dtype=torch.float32))
        # The sum and the number of the variances since the last update.
        self.register_buffer("variance_sum", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        cache: GSACache | None = None,
        need_weights: bool = False,
        attention: Literal["dense", "sparse"] = "sparse",
        document_starts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, GSACache | None, torch.Tensor | None]:
        """Map [B, L, d] to the output [B, L, d], the cache and the attention weights.

        This call does not train the indexer; `forward_with_loss` returns the indexer loss.

        Args:
            x: the layer's normalised input
            positions: int [B, L] or [L], for RoPE only; the order in x alone decides which tokens attend to each other.
                By default they continue the positions in the cache, or begin at 0.
            cache: from `new_cache`; the tokens are written into the cache and attend to the tokens that it held. Only
                in eval mode and without gradient.
            need_weights: also return the probabilities after the softmax, before G1, fp32 [B, H, L, Lk], without
                gradient. Plain torch computes them separately, in about the time of dense attention, and they take four
                bytes per query, key and head.
            attention: `dense` attends to all causal keys and does not run the indexer
            document_starts: int32 [B, L], never decreasing: the index in x at which each token's document begins; None:
                one document
        """
        self._check(x, attention)
        if cache is not None:
            if document_starts is not None:
                raise ValueError("document_starts is given with a cache, which holds one document; pass None")
            output, weights = self._forward_with_cache(x, positions, cache, need_weights, attention)
            return output, cache, weights
        heads, geometry = self._heads(x, positions, 0), self.config.geometry(document_starts)
        indexer = self._index(x) if attention == "sparse" else None
        weights = None
        with _own_precision(x):
            selection = None if indexer is None else self._select(indexer, geometry)
            out, _ = self._attend(heads, selection, geometry)
            if need_weights:
                attended = attended_keys(selection, geometry, heads.q, heads.k)
                weights = attention_probs(heads.q, heads.k, attended)
        return self.o_proj(out.flatten(2)), None, weights

    def forward_with_loss(
        self,
        x: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        attention: Literal["dense", "sparse"] = "sparse",
        document_starts: torch.Tensor | None = None,
    ) -> LayerOutput:
        """Run `forward` in training and also return the indexer loss. Dense attention is for the indexer warm-up.

        `forward` explains the arguments. The module does not store the loss. Recomputation (`torch.utils.checkpoint`)
        may therefore call this method twice.
        """
        self._check(x, attention)
        heads, geometry = self._heads(x, positions, 0), self.config.geometry(document_starts)
        indexer = self._index(x)
        implementation = self.config.implementation_on(x.device)
        with _own_precision(x):
            selection = self._select(indexer, geometry)
            attended = selection if attention == "sparse" else None
            out, lse = self._attend(heads, attended, geometry)
            total, _ = indexer_loss(
                indexer, heads.q, heads.k, lse, attended, geometry, implementation=implementation
            )  # eqs. 14 and 15
        # A query with one candidate has a KL of 0.
        count = _has_choice(selection.variance, geometry).sum().clamp(min=1)
        return LayerOutput(self.o_proj(out.flatten(2)), total / count, selection)

    def new_cache(self, batch: int, max_length: int, *, dtype: torch.dtype | None = None) -> GSACache:
        """Create an empty cache for `batch` sequences of up to `max_length` tokens on the layer's device.

        Args:
            dtype: dtype of keys and values; default: the dtype of the weights. Pass bf16 under autocast.
        """
        weight = self.k_proj.weight
        return layer_cache.new_cache(
            self.config, batch, max_length, device=weight.device, dtype=dtype or weight.dtype
        )

    def _check(self, x: torch.Tensor, attention: str) -> None:
        check_shape("x", x, "[B, L, d]", (None, None, self.config.hidden_size))
        if attention not in ("dense", "sparse"):
            raise ValueError(f"attention is {attention!r}; pass 'dense' or 'sparse'")

    @torch.no_grad()
    def _forward_with_cache(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        cache: GSACache,
        need_weights: bool,
        attention: Literal["dense", "sparse"],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.training:
            raise ValueError("cache is given in training mode; call eval() first, or pass cache=None")
        heads, indexer = self._heads(x, positions, cache.length), self._index(x)
        with _own_precision(x):
            out, weights = attend_with_cache(
                cache, heads, indexer, self.config, self.variance_ema, attention, need_weights
            )
        return self.o_proj(out.flatten(2)), weights

    def _heads(self, x: torch.Tensor, positions: torch.Tensor | None, start: int) -> Heads:
        """Compute equation 9 and RoPE. `start` is the position of the first token if no positions are given."""
        length, size = x.shape[1], (-1, self.config.head_size)
        base, scaling = self.config.rope_base, self.config.rope_scaling
        if positions is None:
            positions = torch.arange(start, start + length, device=x.device)
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise ValueError(f"positions has dtype {positions.dtype}; pass an integer tensor")
        if tuple(positions.shape) not in ((length,), (len(x), length)):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}; pass [L] = [{length}] or [B, L] = [{len(x)}, {length}]"
            )
        q = rotate(self.q_proj(x).unflatten(-1, size), positions, base, scaling)
        k = rotate(self.k_proj(x).unflatten(-1, size), positions, base, scaling)
        v = self.v_proj(x)
        if self.value_gate is not None:
            v = sigmoid_gate(v, self.value_gate(x))
        gate = None if self.output_gate is None else self.output_gate(x).unflatten(-1, size)
        return Heads(q, k, v.unflatten(-1, size), gate)

    def _index(self, x: torch.Tensor) -> Indexer:
        """Compute queries, keys and head weights of equation 7. x is detached, so only the indexer loss trains them."""
        config, x = self.config, x.detach()
        return Indexer(
            self.indexer_query(x).unflatten(-1, (config.indexer_heads, config.indexer_dim)),
            self.indexer_key(x),
            self.indexer_head_weight(x),
            self.indexer_score_bias,
            self.indexer_head_weight_bias,
            config.indexer_activation,
        )

    def _select(self, indexer: Indexer, geometry: Geometry) -> Selection:
        """Select k_t (equation 8) and S_t. In training, add the variances to the sum for the moving average."""
        implementation = self.config.implementation_on(indexer.keys.device)
        selection = select(
            indexer, self.config.rule, self.variance_ema, geometry, implementation=implementation
        )
        if self.training:
            counted = _has_choice(selection.variance, geometry)
            variance = torch.where(counted, selection.variance, 0).sum(dtype=torch.float64)
            self.variance_sum += torch.stack([variance, counted.sum().double()])
        return selection

    def _attend(
        self, heads: Heads, selection: Selection | None, geometry: Geometry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute equations 10 to 12, and the log-sum-exp, which the indexer loss needs for its target."""
        q, k, v, gate = heads.q, heads.k, heads.v, heads.gate_logits
        implementation = self.config.implementation_on(q.device)
        return sparse_attention(q, k, v, selection, geometry, gate, implementation=implementation)

    @torch.no_grad()
    def update_variance_ema(self) -> None:
        """Update the moving average of the score variance after an optimizer step. The first call initialises it.

        Each step uses the average of earlier steps, so no token depends on later tokens.
        """
        total, count = self.variance_sum.unbind()
        mean = (total / count.clamp(min=1)).float()
        decay = self.config.variance_ema_decay
        moved = torch.where(self.variance_ema == 0, mean, decay * self.variance_ema + (1 - decay) * mean)
        self.variance_ema.copy_(torch.where((count > 0) & mean.isfinite(), moved, self.variance_ema))
        self.variance_sum.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> GatedSparseAttention:
        """Apply `fn`, but keep the dtype of the variance buffers, because bf16 cannot represent updates of 1%."""
        before = {name: self._buffers[name] for name in ("variance_ema", "variance_sum")}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            assert buffer is not None
            assert moved is not None
            # A meta tensor has no values to keep, and `to_empty` does not initialise memory.
            if buffer.is_meta:
                self._buffers[name] = torch.zeros_like(buffer, device=moved.device)
            else:
                self._buffers[name] = buffer.to(moved.device)
        return self


def _own_precision(x: torch.Tensor) -> torch.autocast:
    """Disable autocast, which is for the projections: scores, softmax and loss run in fp32."""
    return torch.autocast(x.device.type, enabled=False)


def _has_choice(variance: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """bool [B, L]: queries with at least two causal keys."""
    place = torch.arange(variance.shape[1], device=variance.device)
    first = 0 if geometry.document_starts is None else geometry.document_starts
    return (place > first).expand_as(variance)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, base: float, scaling: YarnScaling | None = None
) -> torch.Tensor:
    """Apply the rotary embedding to pairs (x[i], x[i + D / 2]) of x [B, L, H, D] in fp32 (fp64 for fp64 inputs).

    Args:
        positions: int [L] or [B, L]
    """
    options: dict[str, Any] = {"device": x.device, "dtype": compute_dtype(x=x)}
    rates = base ** -(torch.arange(0, x.shape[3], 2, **options) / x.shape[3])
    magnitude = 1.0
    if scaling is not None:
        rates, magnitude = scaling.scaled(rates, base), scaling.magnitude
    angles = (positions.to(**options)[..., None] * rates).unsqueeze(-2)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
