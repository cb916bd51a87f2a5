"""Build this rank's part of the model from the config."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from gsa_kernels.types import Implementation
from gsa_train.config import Config
from gsa_train.config.gates import POSITIONS, fuses_gates
from gsa_train.config.kernel_checks import unsupported_by_kernels
from gsa_train.config.load import chosen
from gsa_train.config.moe import expert_layers
from gsa_train.distributed.parallel import DeviceError, Parallel
from gsa_train.losses import OBJECTIVES
from gsa_train.model.budget import VarianceTracker
from gsa_train.model.dense_attention import dense_attention_name
from gsa_train.model.flops import indexer_layers
from gsa_train.model.gsa_attention import AttentionContext, GSASelfAttention
from gsa_train.model.mcore.config import GSATransformerConfig, to_mcore_config
from gsa_train.model.mcore.init import initialize_weights
from gsa_train.model.mcore.matrices import mark_matrices
from gsa_train.model.mcore.moe_layer import MixtureOfExperts, router_context
from gsa_train.model.mcore.named_parts import NamedGPTModel
from gsa_train.model.mcore.spec import decoder_spec
from gsa_train.model.moe.router import Router
from gsa_train.model.probes.massive_activations import measure_activations
from gsa_train.model.probes.stats import LayerStats
from gsa_train.model.rotary import rotary_embedding
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.profiling.work_time import WorkTime

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """Holds this rank's pipeline stage: one chunk of the model, or several under an interleaved schedule."""

    chunks: list[GPTModel]
    """In model order."""
    modules: list[torch.nn.Module]
    """The chunks to call and train, wrapped in megatron-core's Float16Module in bf16."""
    mcore_config: GSATransformerConfig
    attentions: list[GSASelfAttention]
    routers: list[Router]
    """Routers of this stage's MoE layers."""
    runtime: AttentionRuntime
    num_indexers: int
    """Number of layers with an indexer in the whole model."""
    work_time: WorkTime
    """Time this rank spends working in training steps."""
    parallel: Parallel

    @property
    def variance_trackers(self) -> list[VarianceTracker]:
        """V̄ of each layer with an indexer."""
        return [attention.variance for attention in self.attentions if attention.variance is not None]

    @property
    def gpt(self) -> GPTModel:
        (chunk,) = self.chunks
        return chunk

    @property
    def module(self) -> torch.nn.Module:
        (module,) = self.modules
        return module


def build_model(config: Config, parallel: Parallel) -> Model:
    """Build the stage, initialize its weights, and register the measuring hooks."""
    mcore_config = to_mcore_config(config, parallel)
    sizes = config.model.num_layers, parallel.device, config.model.num_heads, config.moe.experts
    runtime = AttentionRuntime(LayerStats(*sizes))
    implementation = attention_implementation(config, parallel.device)
    logger.info("attention: %s (gsa.attention_impl = %s)", implementation, config.gsa.attention_impl)
    length, setting = config.train.seq_len_tokens, config.gsa.attention_kernel
    if implementation == "triton" and config.gsa.attention == "sparse":
        kernel = config.gsa.kernel_for(length, config.train.cuda_graphs)
        logger.info("sparse attention to %d tokens: %s (gsa.attention_kernel = %s)", length, kernel, setting)
    elif setting != "auto":
        logger.warning("gsa.attention_kernel = %s: no fused kernel runs sparse attention here", setting)
    check_graphs_on(config, parallel.device, implementation)
    dense: str = implementation
    if implementation == "triton":
        dense = dense_attention_name(config, mcore_config.params_dtype)
    logger.info("dense attention: %s (gsa.dense_attention = %s)", dense, config.gsa.dense_attention)
    indexer_rotary = None
    if config.gsa.indexer_rope:  # only YaRN's frequencies: its attention factor is for softmax logits
        indexer_rotary = rotary_embedding(mcore_config, config.gsa.indexer_dim, parallel.groups)
    context = AttentionContext(
        runtime,
        implementation,
        dense,
        config.train.cuda_graphs,
        config.train.recompute == "selective",
        indexer_rotary,
    )
    logger.info(
        "elementwise operations and loss: %s (train.fused_ops = %s)",
        "fused" if mcore_config.fused_ops else "not fused",
        config.train.fused_ops,
    )
    gates = [position for position in POSITIONS if getattr(config.gsa, f"{position}_gate")]
    transform = config.gsa.output_transform
    in_torch = not fuses_gates(config.gsa) or config.gsa.projection_gate or transform != "none"
    logger.info(
        "gates: %s (gsa.*_gate, gsa.output_transform = %s)%s",
        ", ".join(gates) or "none",
        transform,
        "; in plain torch" if in_torch else "",
    )
    if config.moe.experts > 0:
        logger.info("experts: %s (moe.experts_impl)", config.moe.experts_impl)
    numbers = range(config.parallel.virtual_pipeline)
    chunks = [_build_chunk(number, config, mcore_config, context, parallel) for number in numbers]

    def let_go_of_selection(*_: Any) -> None:
        runtime.shared_selection = None  # Output layer and loss need the memory.

    for chunk in chunks:
        chunk.decoder.register_forward_hook(let_go_of_selection)
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    for layer in layers:
        layer.register_forward_hook(measure_activations(runtime), with_kwargs=True)
    return Model(
        chunks=chunks,
        modules=[Float16Module(mcore_config, chunk) if mcore_config.bf16 else chunk for chunk in chunks],
        mcore_config=mcore_config,
        attentions=[layer.self_attention for layer in layers],
        routers=[layer.mlp.router for layer in layers if isinstance(layer.mlp, MixtureOfExperts)],
        runtime=runtime,
        num_indexers=indexer_layers(config.model, config.gsa),
        work_time=WorkTime(parallel.device),
        parallel=parallel,
    )


def _build_chunk(
    number: int,
    config: Config,
    mcore_config: GSATransformerConfig,
    context: AttentionContext,
    parallel: Parallel,
) -> GPTModel:
    count = config.parallel.virtual_pipeline
    vp_stage = number if count > 1 else None
    of_experts = None
    if config.moe.experts > 0:
        of_experts = router_context(config, context.runtime, parallel), expert_layers(config)
    chunk = NamedGPTModel(
        config=mcore_config,
        transformer_layer_spec=decoder_spec(mcore_config, context, parallel.groups, of_experts, vp_stage),
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.train.seq_len_tokens,
        pre_process=parallel.pipeline_rank == 0 and number == 0,
        post_process=parallel.is_last_stage and number == count - 1,
        position_embedding_type="rope",
        rotary_base=config.model.rope_base,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        pg_collection=parallel.groups,
        vp_stage=vp_stage,
    )
    chunk.objective = chosen(OBJECTIVES, "train.objective", config.train.objective)
    chunk.train_config = config.train
    chunk.rotary_pos_emb = rotary_embedding(
        mcore_config, config.model.head_dim, parallel.groups, config.model.rotary_percent
    )
    chunk.to(parallel.device)
    initialize_weights(chunk, config, parallel)
    mark_matrices(chunk, mcore_config)
    return chunk


def attention_implementation(config: Config, device: torch.device) -> Implementation:
    """Resolve `gsa.attention_impl` to `triton` or `reference`.

    Raises:
        DeviceError: `triton` is configured without a CUDA device.
    """
    chosen = config.gsa.attention_impl
    if chosen == "triton" and device.type != "cuda":
        raise DeviceError("gsa.attention_impl = triton: there is no CUDA device; set it to reference or auto")
    if chosen != "auto":
        return chosen
    if device.type != "cuda":
        return "reference"
    reasons = unsupported_by_kernels(config)
    if reasons:
        logger.warning("attention runs in plain torch, which is slow: %s", "; ".join(reasons))
    return "reference" if reasons else "triton"


def check_graphs_on(config: Config, device: torch.device, implementation: Implementation) -> None:
    """Refuse `train.cuda_graphs` if passes cannot be captured.

    Raises:
        DeviceError: there is no CUDA device, or attention runs in plain torch.
    """
    if not config.train.cuda_graphs:
        return
    if device.type != "cuda":
        raise DeviceError("train.cuda_graphs = true: there is no CUDA device; set it to false")
    if implementation == "reference":
        raise DeviceError(
            "train.cuda_graphs = true: graphs need the fused kernels, which do not support this config; change the "
            "fields that the warning above names, or set train.cuda_graphs to false"
        )
