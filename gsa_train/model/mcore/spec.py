"""Build megatron-core's layer specification with our attention."""

from __future__ import annotations

from collections.abc import Collection

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from gsa_train.model.gsa_attention import AttentionContext, GSASelfAttention
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.moe_layer import mixture_class
from gsa_train.model.mcore.named_parts import NamedTransformerLayer, SandwichTransformerLayer
from gsa_train.model.mcore.norm import RMSNorm
from gsa_train.model.moe.router import RouterContext


def decoder_spec(
    config: GSATransformerConfig,
    context: AttentionContext,
    groups: ProcessGroupCollection,
    of_experts: tuple[RouterContext, Collection[int]] | None,
    chunk: int | None,
) -> TransformerBlockSubmodules:
    """Return the layers of one chunk of this pipeline stage, and the final norm.

    Args:
        of_experts: router settings and numbers of the MoE layers (from 0); None without experts.
        chunk: number of the model chunk on an interleaved stage, from 0; None if the stage has one chunk.
    """
    parts = MLPSubmodules(linear_fc1=config.linears.column, linear_fc2=config.linears.row)
    if config.fused_ops:
        from gsa_train.model.mcore.swiglu import FusedSwiGLU  # imports Triton

        parts.activation_func = FusedSwiGLU
    dense = mixture = _layer(config, context, ModuleSpec(module=MLP, submodules=parts))
    sparse_layers: Collection[int] = ()
    if of_experts is not None:
        router_context, sparse_layers = of_experts
        mixture = _layer(config, context, mixture_class(router_context, groups, parts))
    first = get_transformer_layer_offset(config, chunk)
    count = get_num_layers_to_build(config, chunk)
    # A block spec, unlike a layer spec, also names the final norm.
    return TransformerBlockSubmodules(
        layer_specs=[mixture if layer in sparse_layers else dense for layer in range(first, first + count)],
        layer_norm=RMSNorm,
    )


def _layer(
    config: GSATransformerConfig, context: AttentionContext, feed_forward: ModuleSpec | type
) -> ModuleSpec:
    return ModuleSpec(
        module=SandwichTransformerLayer if config.sandwich_norm else NamedTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=GSASelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "context": context},
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
