"""Shard a layer of gsa_hf over tensor-parallel ranks by vLLM's parallel layers.

The heads with their gates, the MLP's channels, and the experts are divided among the ranks. Every rank has the whole
indexer, router and norms, so all ranks select the same keys.
"""

import copy

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from gsa_hf import GSAConfig
from gsa_hf.experts_gsa import GSAExperts
from gsa_hf.gates_gsa import GSAGateBias

COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
ROWS = {"o_proj", "down_proj"}
GATES_OF_HEADS = {"value_gate_proj", "output_gate_proj", "key_gate_proj", "query_gate_proj"}


def make_parallel(layer: nn.Module, config: GSAConfig, prefix: str) -> None:
    """Replace the linear layers, gates and experts of a decoder layer by their shards."""
    columns = COLUMNS if config.gate_sharing == "head_shared" else COLUMNS | GATES_OF_HEADS
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if "indexer" in path.split("."):
            continue
        if isinstance(module, nn.Linear):
            kind = ColumnParallelLinear if name in columns else ReplicatedLinear
            kind = RowParallelLinear if name in ROWS else kind
            sizes = (module.in_features, module.out_features, module.bias is not None)
            shard = kind(*sizes, return_bias=False, prefix=f"{prefix}.{path}")
        elif isinstance(module, GSAGateBias) and name in columns:
            shard = GSAGateBias(len(module.bias) // get_tensor_model_parallel_world_size())
            set_weight_attrs(shard.bias, {"weight_loader": sharded_weight_loader(0)})
        elif isinstance(module, GSAExperts):
            shard = ParallelExperts(config)
        else:
            continue
        setattr(layer.get_submodule(parent), name, shard)


class ParallelExperts(GSAExperts):
    """Computes this rank's experts, and adds the outputs of all ranks."""

    def __init__(self, config: GSAConfig) -> None:
        config = copy.copy(config)
        config.num_experts //= get_tensor_model_parallel_world_size()
        super().__init__(config)
        self.first = get_tensor_model_parallel_rank() * config.num_experts
        for weight in (self.gate_up_proj, self.down_proj):
            set_weight_attrs(weight, {"weight_loader": sharded_weight_loader(0)})

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return [T, d] for hidden states [T, d], experts [T, k] and their weights [T, k]."""
        own = experts - self.first
        here = (own >= 0) & (own < self.num_experts)
        out = super().forward(hidden, own.clamp(0, self.num_experts - 1), weights * here)
        return tensor_model_parallel_all_reduce(out)
