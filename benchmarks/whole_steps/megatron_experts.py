"""Puts megatron-core's own mixture of experts in place of ours into our model, with the same weights.

Without Transformer Engine, megatron-core offers this mixture: its router, token dispatchers, shared expert, and
GroupedMLP. GroupedMLP needs the package grouped_gemm. Here torch's grouped matrix product replaces this package. As in
Megatron-LM, all fusions are on, except the ones that need Transformer Engine or grouped_gemm.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from gsa_train.config import Config
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.grouped_experts import GROUPED_MM
from gsa_train.model.mcore.moe_layer import MixtureOfExperts
from gsa_train.profiling.trace_spans import trace_span

GroupedMLP: Any = getattr(megatron_experts, "GroupedMLP", None)
"""None from megatron-core 0.19 on, which groups experts with Transformer Engine only."""

COMPARED_TOKENS = 256


def unsupported_by_megatron_experts(config: Config) -> str:
    """Return why megatron-core's layer differs from ours with this config; empty if it does not."""
    if GroupedMLP is None:
        return "from 0.19 on its grouped experts need Transformer Engine; install megatron-core 0.16.1"
    if config.moe.experts_impl != "grouped":
        return f"moe.experts_impl = {config.moe.experts_impl} is megatron-core's already"
    if config.moe.balancing == "aux_free" or config.moe.capacity_factor > 0:
        return "biases and capacities are other ones in megatron-core"
    if config.parallel.expert * config.parallel.expert_tensor > 1:
        return "weights are copied within one rank"
    return ""


def take_megatron_experts(model: Model) -> float:
    """Replace our mixture of experts by megatron-core's in all layers. Call this before the optimizer is built. Random
    tokens go through the old and the new mixture of each layer. Return the largest relative difference of their
    outputs, ||theirs - ours|| / ||ours||."""
    worst = 0.0
    # Without Transformer Engine the router uses a name that its module does not define (0.16.1).
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None
    transformer = _transformer_config(model.mcore_config)
    for layer in (layer for chunk in model.chunks for layer in chunk.decoder.layers):
        ours = layer.mlp
        if isinstance(ours, MixtureOfExperts):
            layer.mlp = _layer_like(ours, transformer, model.parallel.groups)
            layer.mlp.set_layer_number(layer.layer_number)
            layer.is_moe_layer = True
            worst = max(worst, _difference(ours, layer.mlp))
    model.routers.clear()  # none of our routers is left to balance
    return worst


def _transformer_config(ours: GSATransformerConfig) -> TransformerConfig:
    moe, on_gpu = ours.moe, not ours.use_cpu_initialization
    balanced = moe.balancing == "global_batch" and moe.balance_coeff > 0
    changes: dict[str, Any] = {
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.router_score,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": None if moe.routed_scale == 1.0 else moe.routed_scale,
        "moe_router_load_balancing_type": "aux_loss" if balanced else "none",
        "moe_aux_loss_coeff": moe.balance_coeff if balanced else 0.0,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size or None,
        "moe_token_dispatcher_type": "allgather",  # its default; on one rank no dispatcher sends anything
        "bf16": True,  # GroupedMLP asserts bf16 because grouped_gemm supports nothing else, unlike torch's product
        "use_te_activation_func": False,
        "bias_activation_fusion": on_gpu,  # torch.compile takes longer than a test on CPUs
    }
    return dataclasses.replace(ours, **changes)


def _layer_like(
    ours: MixtureOfExperts, transformer: TransformerConfig, groups: ProcessGroupCollection
) -> MoELayer:
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(
        experts=NamedGroupedMLP,
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=parts),
    )
    with patch.object(megatron_experts.gg, "assert_grouped_gemm_is_available", lambda: None):
        theirs = NamedMoELayer(transformer, submodules, pg_collection=groups)
    theirs.to(ours.router.weight.device)
    _copy_weights(ours, theirs)
    return theirs


@torch.no_grad()
def _copy_weights(ours: MixtureOfExperts, theirs: MoELayer) -> None:
    theirs.router.weight.copy_(ours.router.weight)
    inner, outer = ours.experts.linear_fc1.weight, ours.experts.linear_fc2.weight
    # megatron-core's weights have the shape [in, experts x out], but the memory order [experts, in, out].
    transposed = inner.transpose(1, 2), outer.transpose(1, 2)
    for weight, value in zip((theirs.experts.weight1, theirs.experts.weight2), transposed, strict=True):
        weight.view(value.shape).copy_(value)
    if ours.shared_experts is not None:
        theirs.shared_experts.linear_fc1.weight.copy_(ours.shared_experts.linear_fc1.weight)
        theirs.shared_experts.linear_fc2.weight.copy_(ours.shared_experts.linear_fc2.weight)


@torch.no_grad()
def _difference(ours: MixtureOfExperts, theirs: MoELayer) -> float:
    weight = ours.router.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (COMPARED_TOKENS, 1, weight.shape[1])
    hidden = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    expected, found = ours(hidden)[0].double(), theirs(hidden)[0].double()
    return float((found - expected).norm() / expected.norm())


class NamedMoELayer(MoELayer):
    """Names the layer's parts in traces like ours."""

    def route(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("router"):
            return super().route(*args, **kwargs)

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("exchange"):
            return super().preprocess(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("exchange"):
            return super().dispatch(*args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("exchange"):  # around the experts, which are a separate part
            return super().routed_experts_compute(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("exchange"):
            return super().combine(*args, **kwargs)


class NamedGroupedMLP(GroupedMLP or torch.nn.Module):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with trace_span("experts"), patch.object(megatron_experts.gg, "ops", TorchProducts):
            return super().forward(*args, **kwargs)


class TorchProducts:
    """Replaces grouped_gemm.ops."""

    @staticmethod
    def gmm(
        rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
    ) -> torch.Tensor:
        """Multiply the rows of each expert by the weight of this expert. The rows [M, k] are sorted by expert, the
        weights are [experts, k, n], and the result is [M, n]. `counts`, int64 [experts] on the host, is the number of
        rows per expert."""
        assert not trans_b
        return GROUPED_MM(rows, weights, offs=counts.cumsum(0).int().to(rows.device))
