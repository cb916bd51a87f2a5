"""Add trace spans (profiling/trace_spans.py) to megatron-core's layer and model. Define the sandwich-norm layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from gsa_train.config import TrainConfig
from gsa_train.losses import Objective, cross_entropy, training_losses
from gsa_train.model.mcore.norm import RMSNorm
from gsa_train.profiling.trace_spans import trace_span


class NamedTransformerLayer(TransformerLayer):
    """Names the spans of attention and feed-forward network, including their norms and residual connections."""

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("attention"):
            return super()._forward_attention(*args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("mlp"):
            return super()._forward_mlp(*args, **kwargs)


class SandwichTransformerLayer(NamedTransformerLayer):
    """Adds norms after attention and after the feed-forward network (`model.sandwich_norm`)."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = RMSNorm(config, size, eps)
        self.post_mlp_layernorm = RMSNorm(config, size, eps)
        self.self_attn_bda = _normed(self.post_attention_layernorm, self.self_attn_bda)
        self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)


def _normed(norm: torch.nn.Module, get_add: Callable[..., Any]) -> Callable[..., Any]:
    """Normalize the branch before megatron-core's residual connection adds it."""

    def get_normed_add(*how: Any) -> Callable[..., torch.Tensor]:
        add = get_add(*how)

        def normed_add(
            made: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            result: torch.Tensor = add((norm(made[0]), made[1]), residual, dropout)
            return result

        return normed_add

    return get_normed_add


class NamedGPTModel(GPTModel):
    """Names the embedding's span, and one span for output layer and loss."""

    objective: Objective
    """Training objective. Validation uses the cross-entropy."""
    train_config: TrainConfig
    """Settings of the objective."""

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return fp32 losses [B, L] for this rank's logits [L, B, V / tp]. Training uses `objective`."""
        given = (logits, labels, self.pg_collection.tp, self.config.fused_ops, self.train_config)
        return training_losses(self.objective, *given) if self.training else cross_entropy(*given)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("embedding"):
            return super()._preprocess(*args, **kwargs)

    def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("loss"):
            return super()._postprocess(*args, **kwargs)
