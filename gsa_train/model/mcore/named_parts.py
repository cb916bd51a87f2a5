"""megatron-core's layer and model with the names of their parts in traces (gsa_train.profiling.trace_spans)."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from gsa_train.profiling.trace_spans import trace_span


class NamedTransformerLayer(TransformerLayer):
    """Norm and residual connection belong to the part that they are of."""

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("attention"):
            return super()._forward_attention(*args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("mlp"):
            return super()._forward_mlp(*args, **kwargs)


class NamedGPTModel(GPTModel):
    """Embedding; output layer and cross-entropy together."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("embedding"):
            return super()._preprocess(*args, **kwargs)

    def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("loss"):
            return super()._postprocess(*args, **kwargs)
