"""Mark the matrices of the hidden layers, which an optimizer such as Muon updates as matrices.

Embedding, output layer, routers, norms and biases have no mark.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel

from gsa_train.model.gates import rows_per_group
from gsa_train.model.mcore.config import GSATransformerConfig


def mark_matrices(chunk: GPTModel, config: GSATransformerConfig) -> None:
    """Set `matrix_rows` on each parameter that holds matrices of hidden layers.

    A fused parameter such as `linear_qkv` holds several matrices. Its rows form groups, each with rows of every matrix.
    `matrix_rows` says how many rows of a group belong to each matrix.
    """
    for name, parameter in chunk.decoder.named_parameters():
        if parameter.dim() > 1 and not name.endswith("router.weight"):
            parameter.matrix_rows = _matrix_rows(name, parameter, config)


def _matrix_rows(name: str, parameter: Any, config: GSATransformerConfig) -> tuple[int, ...]:
    if name.endswith("linear_qkv.weight"):  # a group for each key-value head
        heads, size = config.num_attention_heads // config.num_query_groups, config.kv_channels
        return heads * size, size, size
    if name.endswith(("linear_gate.weight", "head_gate.weight")):
        return tuple(rows for rows in rows_per_group(config) if rows)
    rows: int = parameter.shape[-2]
    # Stride 2: the SwiGLU gate, then the input that it gates.
    return (rows // 2,) * 2 if getattr(parameter, "partition_stride", 1) == 2 else (rows,)
