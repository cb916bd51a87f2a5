"""Sample initial weights independently of the parallel layout.

Each full parameter is sampled from a generator seeded by the run's seed and the parameter's global name, then cut to
this rank's shard.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from gsa_train.config import Config
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.expert_mark import is_of_expert, mark_as_expert


def global_named_parameters(gpt: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters with their global names (layers counted from 0)."""

    def with_global_number(found: re.Match[str]) -> str:
        return f"decoder.layers.{gpt.decoder.layers[int(found[1])].layer_number - 1}."

    for name, parameter in gpt.named_parameters():
        yield re.sub(r"^decoder\.layers\.(\d+)\.", with_global_number, name), parameter


@torch.no_grad()
def initialize_weights(gpt: GPTModel, config: Config, parallel: Parallel) -> None:
    """Initialize matrices from a normal distribution, norms to 1, gate biases as configured, and everything else to 0.
    Output projections are scaled by 1/sqrt(2 * layers)."""
    for name, parameter in global_named_parameters(gpt):
        if name.endswith(("layernorm.weight", "_norm_weight")):
            parameter.fill_(1.0)
        elif name.endswith("_gate.bias"):
            parameter.fill_(config.gsa.gate_bias_init)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            for whole_name, matrix in _matrices(name, parameter, config, parallel):
                whole = _full_matrix(whole_name, matrix, config, parallel)
                matrix.copy_(_local_part(whole, matrix, parallel))


def _matrices(
    name: str, parameter: Any, config: Config, parallel: Parallel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter's matrices with their global names: one per expert, with its global index."""
    if not is_of_expert(parameter):
        yield name, parameter
        return
    first = parallel.expert_rank * (config.moe.experts // parallel.expert_size)
    if parameter.dim() == 2:  # of SequentialMLP
        yield re.sub(r"\.local_experts\.(\d+)\.", lambda found: f".{first + int(found[1])}.", name), parameter
        return
    expert: Any
    for number, expert in enumerate(parameter, start=first):
        mark_as_expert(expert)
        expert.tensor_model_parallel, expert.partition_dim = True, parameter.partition_dim - 1
        expert.partition_stride = parameter.partition_stride
        yield name.replace(".experts.", f".experts.{number}."), expert


def _tensor_ranks(parameter: torch.Tensor, parallel: Parallel) -> tuple[int, int]:
    """Return this rank's index in the group that shards the parameter, and the group's size."""
    if is_of_expert(parameter):
        return parallel.expert_tensor_rank, parallel.expert_tensor_size
    return parallel.tensor_rank, parallel.tensor_size


def _full_matrix(name: str, parameter: Any, config: Config, parallel: Parallel) -> torch.Tensor:
    if name == "output_layer.weight" and config.model.tie_embeddings:
        name = "embedding.word_embeddings.weight"  # the last stage's copy of the shared matrix
    std = config.model.init_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.model.num_layers)  # the residual stream sums 2 outputs per layer (GPT-2)
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= _tensor_ranks(parameter, parallel)[1]
    # Run seed and name are hashed to 32 bits, because torch's CPU generator ignores a 64-bit seed's upper half.
    key = zlib.crc32(f"{config.run.seed} {name}".encode())
    generator = torch.Generator(parallel.device).manual_seed(key)
    return torch.randn(shape, generator=generator, device=parallel.device) * std


def _local_part(full: torch.Tensor, parameter: Any, parallel: Parallel) -> torch.Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    rank, size = _tensor_ranks(parameter, parallel)
    dim, stride = parameter.partition_dim, parameter.partition_stride
    # Stride 2: the ranks shard the two halves of a gated feed-forward matrix separately.
    pieces = full.split(parameter.shape[dim] // stride, dim)
    return torch.cat(pieces[rank::size], dim)
