"""Run the routed experts of one layer on this rank: SwiGLU with torch's grouped matrix products.

`moe.experts_impl` chooses between this module and megatron-core's SequentialMLP. Both have the same names and shapes
in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from gsa_train.model.mcore.config import GSATransformerConfig

GROUPED_MM: Callable[..., torch.Tensor] = (
    torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
)
"""Grouped matrix product: rows [M, k] sorted by group, weights [groups, k, n] and offs (int32 [groups], each group's
last row + 1) give [M, n]. The function is private in older torch versions."""


class GroupedExperts(MegatronModule):
    """Has the call signature of SequentialMLP."""

    def __init__(
        self, num_local_experts: int, config: GSATransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.groups, self.count = pg_collection, num_local_experts
        width = config.moe.expert_ffn_hidden_size // pg_collection.expt_tp.size()
        self.linear_fc1 = _Weights(config, (num_local_experts, 2 * width, config.hidden_size), 0, stride=2)
        """The first half of the rows is the SwiGLU gate."""
        self.linear_fc2 = _Weights(config, (num_local_experts, config.hidden_size, width), 1, stride=1)
        self.activation: Callable[..., torch.Tensor] = weighted_swiglu
        if config.fused_ops:
            from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu  # imports Triton

            self.activation = fused_weighted_swiglu

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            rows: [M, d], sorted by expert.
            tokens_per_expert: int64 [experts], with sum M.
            weights: [M], routing weights of the outputs.

        Returns:
            [M, d], weighted; with expert tensor parallelism this rank's partial sum.
        """
        ends = tokens_per_expert.cumsum(0).int()
        # Apply weights before the second product, as in megatron-core. The backward pass then does not need this
        # product's output.
        inner = self.activation(GROUPED_MM(rows, self.linear_fc1().transpose(1, 2), offs=ends), weights)
        return GROUPED_MM(inner, self.linear_fc2().transpose(1, 2), offs=ends), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Save as [experts, ...] under SequentialMLP's names, with each expert's global index."""
        assert not sharded_offsets
        assert not (metadata or {}).get("singleton_local_shards")
        replica = (0, 0, self.groups.expt_dp.rank())
        rank, size = self.groups.expt_tp.rank(), self.groups.expt_tp.size()
        ranks = (0, self.groups.ep.rank(), self.groups.ep.size())
        return {
            f"{prefix}linear_fc1.weight": ShardedTensorFactory(
                f"{prefix}experts.linear_fc1.weight",
                self.linear_fc1.weight,
                self._build_halves,
                self._join_halves,
                replica,
            ),
            f"{prefix}linear_fc2.weight": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.linear_fc2.weight",
                self.linear_fc2.weight,
                ranks,
                (2, rank, size),
                replica_id=replica,
            ),
        }

    def _build_halves(self, key: str, weight: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        """Save the gate and up halves separately, because expert tensor parallelism shards each half."""
        rank, size = self.groups.expt_tp.rank(), self.groups.expt_tp.size()
        ep = self.groups.ep
        if size == 1:
            ranks = (0, ep.rank(), ep.size())
            return [ShardedTensor.from_rank_offsets(key, weight, ranks, replica_id=replica)]
        total, offset = ep.size() * self.count, ep.rank() * self.count
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (0, offset + number, total),
                (1, rank + size * which, 2 * size),
                replica_id=replica,
                prepend_axis_num=1,
            )
            for number, expert in enumerate(weight)
            for which, half in enumerate(expert.chunk(2))
        ]

    def _join_halves(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts).view(self.count, -1, parts[0].shape[-1])


class _Weights(torch.nn.Module):
    """Holds [experts, out, in]. A separate module gives the parameter megatron-core's name."""

    def __init__(
        self, config: GSATransformerConfig, shape: tuple[int, int, int], split: int, stride: int
    ) -> None:
        """
        Args:
            split: dimension of an expert's matrix that expert tensor parallelism shards.
            stride: number of sub-matrices that are sharded separately.
        """
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        # With these marks, megatron-core includes each rank's shard in the gradient norm.
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, split + 1, stride
        self.weight = weight

    def forward(self) -> torch.Tensor:
        """Return the weight. With `parallel.overlap_param_gather` a hook on this call waits for the all-gather of the
        weight."""
        return self.weight


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, 2 F], [M] -> [M, F]"""
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * weights[:, None]).to(x.dtype)
