"""The projection behind both gates: G2 on the values (eq. 9) and G1 on the output (eq. 10)."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear

from gsa_train.model.mcore_config import GSATransformerConfig


def build_gate_projection(
    config: GSATransformerConfig, groups: ProcessGroupCollection
) -> ColumnParallelLinear | None:
    """One matrix for both gates (one all-gather under sequence parallelism), or None without gates.

    Rows per key-value head: the value gate's d_k, then the output gate's (n_h / n_kv) * d_k. A tensor-parallel
    rank so holds the gates of exactly its own heads.
    """
    rows_per_group = sum(_rows_per_group(config))
    if rows_per_group == 0:
        return None
    projection = ColumnParallelLinear(
        config.hidden_size,
        config.num_query_groups * rows_per_group,
        config=config,
        init_method=config.init_method,
        bias=True,
        gather_output=False,
        skip_bias_add=True,
        tp_group=groups.tp,
    )
    for parameter in projection.parameters():
        parameter.gsa_gate = True  # its own learning rate (optim.py)
    return projection


def split_gate_logits(
    logits: torch.Tensor, config: GSATransformerConfig
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """[L, B, local rows] -> logits of G2 [L, B, local n_kv, d_k] and of G1 [L, B, local n_h, d_k]."""
    value_rows, output_rows = _rows_per_group(config)
    per_group = logits.unflatten(-1, (-1, value_rows + output_rows))
    value, output = per_group.split([value_rows, output_rows], -1)
    return (
        value if value_rows else None,
        output.unflatten(-1, (-1, config.kv_channels)).flatten(2, 3) if output_rows else None,
    )


def _rows_per_group(config: GSATransformerConfig) -> tuple[int, int]:
    heads_per_group = config.num_attention_heads // config.num_query_groups
    return (
        config.kv_channels if config.gsa.value_gate else 0,
        config.kv_channels * heads_per_group if config.gsa.output_gate else 0,
    )
