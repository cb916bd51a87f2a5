"""Translate our config into megatron-core's config."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.transformer import TransformerConfig

from gsa_kernels.rotary import YarnScaling
from gsa_train.config import Config, GSAConfig, ModelConfig, MoEConfig, TrainConfig
from gsa_train.config.load import chosen
from gsa_train.config.parallel import chunk_layers
from gsa_train.distributed.parallel import DeviceError, Parallel
from gsa_train.model.mcore import grad_accumulation_fusion as weight_gradients
from gsa_train.model.mcore.linears import LINEAR_LAYERS, LinearLayers, megatron, unsupported_by_device


@dataclass
class GSATransformerConfig(TransformerConfig):
    """Extends megatron-core's transformer config with our `gsa` and `moe` sections and model options."""

    gsa: GSAConfig = field(default_factory=GSAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    fused_ops: bool = False
    """Whether to use fused kernels for elementwise operations and cross-entropy."""
    rotary_base: float = 10000.0
    """Base of the rotary embedding of Q and K, and of the indexer if `gsa.indexer_rope` is on."""
    yarn: YarnScaling | None = None
    """YaRN's scaling for Q, K and the indexer. The indexer uses the scaled frequencies without the attention factor."""
    rotary_percent: float = 1.0
    """Share of a head's channels that are rotated in Q and K."""
    sandwich_norm: bool = False
    """`model.sandwich_norm`"""
    linears: LinearLayers = field(default_factory=lambda: megatron(TrainConfig()))
    """`train.linear_layers`"""
    context_chunks: int = 2
    """Chunks of a sequence per context-parallel rank."""


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the data type of weights and activations. `auto` is bf16 on GPUs and fp32 on CPUs."""
    if config.train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]


def uses_fused_ops(config: Config, device: torch.device) -> bool:
    """Whether `train.fused_ops` selects fused kernels on this device.

    Raises:
        DeviceError: `triton` is configured without a CUDA device.
    """
    chosen = config.train.fused_ops
    if chosen == "triton" and device.type != "cuda":
        raise DeviceError("train.fused_ops = triton: there is no CUDA device; set it to none or auto")
    return chosen == "triton" or (chosen == "auto" and device.type == "cuda")


def to_mcore_config(config: Config, parallel: Parallel) -> GSATransformerConfig:
    """Translate the config. Fields not named here keep megatron-core's defaults.

    Raises:
        DeviceError: the device does not support a configured precision or kernel.
    """
    model, train = config.model, config.train
    if problems := unsupported_by_device(train, parallel.device):
        raise DeviceError(*problems)
    dtype = compute_dtype(config, parallel.device)
    fused_ops = uses_fused_ops(config, parallel.device)
    reduces_in_bf16 = config.parallel.grad_reduce_dtype == "bf16"
    if reduces_in_bf16 and dtype != torch.bfloat16:
        raise DeviceError(
            "parallel.grad_reduce_dtype = bf16: gradients have the weights' precision, which is fp32 here; set it to "
            "fp32, or train.precision to bf16"
        )
    # DeepSpeed reads the gradients from autograd.
    megatron_buffers = config.parallel.strategy == "megatron" and not reduces_in_bf16
    adds_weight_gradients = fused_ops and dtype == torch.bfloat16 and megatron_buffers
    if adds_weight_gradients:
        weight_gradients.install()
    recompute_layers = train.recompute == "full"
    interleaved = config.parallel.virtual_pipeline > 1
    return GSATransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rotary_base=model.rope_base,
        yarn=yarn_scaling(model),
        rotary_percent=model.rotary_percent,
        sandwich_norm=model.sandwich_norm,
        fused_ops=fused_ops,
        use_te_activation_func=fused_ops,  # use the activation of the layer's spec (spec.py)
        linears=chosen(LINEAR_LAYERS, "train.linear_layers", train.linear_layers)(train),
        gsa=config.gsa,
        moe=config.moe,
        **_experts(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # model/mcore/init.py initializes weights by name, in any layout. megatron-core's initialization must still
        # run, because it marks the parameters that tensor parallelism shards.
        perform_initialization=True,
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        use_cpu_initialization=parallel.device.type == "cpu",
        tensor_model_parallel_size=parallel.tensor_size,
        pipeline_model_parallel_size=parallel.pipeline_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline if interleaved else None,
        pipeline_model_parallel_layout=_pipeline_layout(config),
        # Interleaved stages must exchange tensors one at a time. With batched sends, two stages that are both next and
        # previous to each other silently swap tensors. Megatron-LM refuses this setting, but megatron-core does not.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        context_parallel_size=parallel.context_size,
        context_chunks=config.parallel.context_chunks,
        sequence_parallel=config.parallel.sequence and parallel.tensor_size > 1,
        recompute_granularity="full" if recompute_layers else None,
        recompute_method="uniform" if recompute_layers else None,
        recompute_num_layers=train.recompute_num_layers if recompute_layers else None,
        gradient_accumulation_fusion=adds_weight_gradients,
        # megatron-core's own fusions need Apex, Transformer Engine or a compiler at run time.
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def yarn_scaling(model: ModelConfig) -> YarnScaling | None:
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return None
    return YarnScaling(
        scaling.factor,
        scaling.original_max_position_embeddings,
        scaling.beta_fast,
        scaling.beta_slow,
        scaling.attention_factor or None,
    )


def _pipeline_layout(config: Config) -> list[list[str]] | None:
    if config.parallel.pipeline == 1:
        return None
    chunks = [["decoder"] * layers for layers in chunk_layers(config)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _experts(config: Config) -> dict[str, int]:
    """Return settings for megatron-core's experts. The router and token exchange are ours."""
    if config.moe.experts == 0:
        return {}
    return {
        "num_moe_experts": config.moe.experts,
        "moe_ffn_hidden_size": config.moe.expert_ffn_hidden_size,
        "expert_model_parallel_size": config.parallel.expert,
        "expert_tensor_parallel_size": config.parallel.expert_tensor,
    }


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight
