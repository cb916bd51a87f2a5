"""Implement the lightning indexer (eq. 7), which gives each causal key of a query a score.

The score is computed from small queries, one key per token, and head weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from gsa_kernels.indexer.split_reference import split_projection
from gsa_kernels.types import Indexer as AppliedIndexer
from gsa_train.config.gsa import SCORES
from gsa_train.distributed.context_sharding import QueryChunk
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.grad_accumulation_fusion import joined_weight_gradients
from gsa_train.model.rotary import LocalRotaryEmbedding


class IndexerProjections(NamedTuple):
    """Holds the indexer's projections of the hidden states, batch first."""

    queries: torch.Tensor
    """[B, L, H_I, d_I]"""
    keys: torch.Tensor
    """[B, L, d_I], shared by the indexer heads"""
    head_weight_logits: torch.Tensor
    """[B, L, H_I]; constant if the indexer has no head weights"""

    def of(self, chunk: QueryChunk) -> IndexerProjections:
        """Return the chunk's queries, and all keys up to the end of the chunk."""
        return IndexerProjections(
            self.queries[:, chunk.local], self.keys[:, : chunk.end], self.head_weight_logits[:, chunk.local]
        )


class Indexer(MegatronModule):
    """Computes the indexer's queries, keys and head weights.

    Each tensor-parallel rank holds a replica of the indexer, and all these ranks process the same tokens. Call the
    module, not `forward`, because `overlap_param_gather` needs the module's forward-pre-hooks.
    """

    def __init__(
        self,
        config: GSATransformerConfig,
        groups: ProcessGroupCollection,
        rotary: LocalRotaryEmbedding | None,
    ) -> None:
        super().__init__(config)
        self.gsa = config.gsa
        self.groups = groups
        heads, dim = self.gsa.indexer_heads, self.gsa.indexer_dim
        self.query_weight = self._parameter(heads * dim, config.hidden_size)
        self.key_weight = self._parameter(dim, config.hidden_size)
        self.scores = SCORES[self.gsa.indexer_activation]
        learned = self.scores.learns_head_weights
        self.head_weight = self._parameter(heads, config.hidden_size) if learned else None
        self.score_bias = self._parameter(heads) if self.scores.has_score_bias else None  # b_j
        self.weight_bias = self._parameter(heads) if self.scores.has_head_weight_bias else None  # c_j
        # One padded matrix product for the three projections: tensor cores need multiples of 8.
        rows = heads * dim + dim + learned * heads
        padding = self.key_weight.new_zeros(-rows % 8, config.hidden_size)
        self.register_buffer("padding", padding, persistent=False)
        norms = self.gsa.indexer_norm
        self.query_norm_weight = self._parameter(dim) if norms else None
        self.key_norm_weight = self._parameter(dim) if norms else None
        learns_beta = self.gsa.indexer_temperature == "learned"
        self.log_inverse_temperature = self._parameter(1) if learns_beta else None  # log beta
        self._fixed_inverse_temperature: torch.Tensor | None = None
        self.split_op: Callable[..., Any] = split_projection
        if config.fused_ops:
            from gsa_kernels.indexer.split_op import fused_split_projection  # imports Triton

            self.split_op = fused_split_projection
        self.rotary = rotary  # shared by all layers

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=config.params_dtype, device=device))
        parameter.gsa_indexer = True  # type: ignore[attr-defined]  # its own learning rate (optimizer/mcore.py)
        # Averaging keeps the replicas bitwise equal. In plain torch, all ranks compute the same gradient. With the
        # kernels, each rank computes the gradient of its queries, times the number of ranks.
        parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        return parameter

    def forward(self, hidden: torch.Tensor) -> IndexerProjections:
        """[L, B, d] -> projections. `hidden` is detached: only the indexer loss trains the indexer."""
        learned = (self.query_weight, self.key_weight, self.head_weight)
        weights = [weight for weight in (*learned, self.padding) if weight is not None]
        together = _JoinedProduct.apply(hidden, self.config.gradient_accumulation_fusion, *weights)
        norms = None
        if self.query_norm_weight is not None and self.key_norm_weight is not None:
            norms = (self.query_norm_weight, self.key_norm_weight)
        constant_logit, length = self.scores.head_weight_logit, hidden.shape[0] * self.groups.cp.size()
        queries, keys, head_weight_logits = self.split_op(
            together,
            self.gsa.indexer_heads,
            self.gsa.indexer_dim,
            has_weights=constant_logit is None,
            norms=norms,
            eps=self.config.layernorm_epsilon,
            tables=None if self.rotary is None else self.rotary.tables(length),
        )
        if constant_logit is not None:
            head_weight_logits = keys.new_full(queries.shape[:3], constant_logit)
        return IndexerProjections(queries, keys, head_weight_logits)

    def applied(self, projections: IndexerProjections, with_temperature: bool = True) -> AppliedIndexer:
        """Combine the projections with the score parameters.

        Args:
            with_temperature: include beta, for the indexer loss.
        """
        return AppliedIndexer(
            *projections,
            self.score_bias,
            self.weight_bias,
            self.scores.activation,
            self.inverse_temperature() if with_temperature else 1.0,
        )

    def inverse_temperature(self) -> torch.Tensor:
        """Return beta of softmax(beta * I) in the indexer loss: fp32, 0-d."""
        if self.log_inverse_temperature is not None:
            return self.log_inverse_temperature.float().exp()[0]
        if self._fixed_inverse_temperature is None:  # not a buffer, which a bf16 model would round
            # Take the device from a buffer. If a pass read a parameter here, ZeRO-3 would gather parameters in an order
            # that differs from its recorded order.
            value, device = float(self.gsa.indexer_temperature), self.padding.device
            self._fixed_inverse_temperature = torch.full((), value, dtype=torch.float32, device=device)
        return self._fixed_inverse_temperature


class _JoinedProduct(torch.autograd.Function):
    """Multiplies hidden [L, B, d] by several weights [rows, d] in one product, [L, B, all rows]. The last weight is
    padding and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, accumulates: bool, *weights: torch.Tensor) -> torch.Tensor:
        together = torch.cat(weights)
        ctx.save_for_backward(hidden, together if ctx.needs_input_grad[0] else None, *weights[:-1])
        ctx.accumulates = accumulates
        return hidden.matmul(together.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, together, *weights = ctx.saved_tensors
        grad_hidden = None if together is None else grad.matmul(together)
        gradients: list[torch.Tensor] | tuple[None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[2]:
            rows, inputs = grad.flatten(0, 1), hidden.flatten(0, 1)
            gradients = joined_weight_gradients(weights, inputs, rows, ctx.accumulates)
        return grad_hidden, None, *gradients, None
