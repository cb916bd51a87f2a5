"""megatron-core's layer specification with our attention plugged in."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from gsa_train.model.gsa_attention import AttentionContext, GSASelfAttention
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.named_parts import NamedTransformerLayer, SandwichTransformerLayer
from gsa_train.model.mcore.norm import RMSNorm


def decoder_spec(
    config: GSATransformerConfig, context: AttentionContext, chunk: int | None
) -> TransformerBlockSubmodules:
    """The layers of one chunk of this pipeline stage and the final norm.

    Args:
        chunk: from 0; None where stages have a single one.
    """
    activation = None
    if config.fused_ops:
        from gsa_train.model.mcore.swiglu import FusedSwiGLU  # imports Triton

        activation = FusedSwiGLU
    layer = ModuleSpec(
        module=SandwichTransformerLayer if config.sandwich_norm else NamedTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=GSASelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "context": context},
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=activation
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    # A block spec, unlike a layer spec, also names the final norm.
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, chunk), layer_norm=RMSNorm
    )
