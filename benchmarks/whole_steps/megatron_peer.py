"""Trains megatron-core's own GPT model with its data-parallel wrapper, optimizer and schedule.

Only the training loop and the span names in traces are ours. The model uses megatron-core's local layer
specification, which runs without Transformer Engine and Apex. With this specification, attention
(scaled_dot_product_attention), norms and AdamW come from torch. The norms do not support sequence parallelism. As in
Megatron-LM, all fusions are on, except the ones that need an additional library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import MicroBatch
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.named_parts import NamedGPTModel, NamedTransformerLayer
from gsa_train.profiling.trace_spans import trace_span


def unsupported_by_megatron(config: Config) -> str:
    """Return why megatron-core without Transformer Engine cannot run this config, or should not; empty if it can."""
    if config.moe.experts > 0:
        return "grouped experts need Transformer Engine"
    if config.parallel.context > 1:
        return "context parallelism needs Transformer Engine"
    if config.parallel.sequence and config.parallel.tensor > 1:
        return "sequence parallelism needs Transformer Engine or Apex"
    return ""


class SdpaCore(MegatronModule):
    """Replaces megatron-core's DotProductAttention."""

    def __init__(self, config: TransformerConfig, *unused: Any, **other: Any) -> None:
        super().__init__(config)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **other: Any
    ) -> torch.Tensor:
        """Return the attention output [L, B, heads * D] for [L, B, heads, D]."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class _PeerModel(NamedGPTModel):
    compute_language_model_loss = GPTModel.compute_language_model_loss  # not our objective


class MegatronTrainee:
    """Trains a plain model with the config's sizes, without gates and indexer. training.py calls the same members of
    `OurTrainee`."""

    def __init__(self, config: Config, phase: PhaseConfig, parallel: Parallel) -> None:
        assert not unsupported_by_megatron(config)
        self.config, self.parallel = config, parallel
        self.transformer = _transformer_config(config, parallel)
        chunks = [
            _chunk(number, config, self.transformer, parallel)
            for number in range(config.parallel.virtual_pipeline)
        ]
        modules = [
            Float16Module(self.transformer, each) if self.transformer.bf16 else each for each in chunks
        ]
        layout = config.parallel
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=layout.grad_reduce_dtype == "fp32",
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_grad_reduce=layout.overlap_grad_reduce,
        )
        self.ddps = [
            DistributedDataParallel(self.transformer, ddp_config, module, disable_bucketing=number > 0)
            for number, module in enumerate(modules)
        ]
        train = config.train
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=phase.lr,
                weight_decay=train.weight_decay,
                adam_beta1=train.adam_beta1,
                adam_beta2=train.adam_beta2,
                adam_eps=train.adam_epsilon,
                clip_grad=train.grad_clip,
                bf16=self.transformer.bf16,
                params_dtype=self.transformer.params_dtype,
                use_distributed_optimizer=layout.distributed_optimizer,
            ),
            self.ddps,
        )
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        self.transformer.finalize_model_grads_func = finalize_model_grads
        if layout.overlap_grad_reduce:
            no_sync = [ddp.no_sync for ddp in self.ddps]
            self.transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.losses: list[torch.Tensor] = []

    def step(self, batches: list[MicroBatch]) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(batches) for _ in self.ddps]
        train = self.config.train
        self.losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddps if len(self.ddps) > 1 else self.ddps[0],
            num_microbatches=len(batches),
            seq_length=train.seq_len_tokens,
            micro_batch_size=train.micro_batch_size,
            forward_only=False,
        )
        with trace_span("optimizer"):
            self.optimizer.step()

    def loss(self) -> float:
        """Return the mean over micro-batches of equal size and over replicas."""
        parallel = self.parallel
        total = torch.zeros(2, dtype=torch.float64, device=parallel.device)
        if self.losses and parallel.tensor_rank == 0:
            total[0] = torch.stack(list(self.losses)).sum()
            total[1] = len(self.losses)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def close(self) -> None:
        for ddp in self.ddps:
            ddp.grad_accs.clear()
        for parameter in (parameter for ddp in self.ddps for parameter in ddp.parameters()):
            parameter.grad = None
            for attribute in ("main_grad", "main_param"):
                if hasattr(parameter, attribute):
                    delattr(parameter, attribute)
        config = self.transformer
        config.grad_scale_func = config.finalize_model_grads_func = config.no_sync_func = None
        del self.ddps, self.optimizer, self.losses


def _transformer_config(config: Config, parallel: Parallel) -> TransformerConfig:
    model, on_gpu = config.model, parallel.device.type == "cuda"
    bf16 = config.train.precision == "bf16" or (config.train.precision == "auto" and on_gpu)
    dtype = torch.bfloat16 if bf16 else torch.float32
    interleaved = config.parallel.virtual_pipeline > 1
    recompute = {"none": None, "selective": "selective", "full": "full"}[config.train.recompute]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=parallel.tensor_size,
        pipeline_model_parallel_size=parallel.pipeline_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline if interleaved else None,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=config.train.recompute_num_layers if recompute == "full" else None,
        persist_layer_norm=False,
        # torch.compile takes longer than a test on CPUs.
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _chunk(number: int, config: Config, transformer: TransformerConfig, parallel: Parallel) -> NamedGPTModel:
    count = config.parallel.virtual_pipeline
    vp_stage = number if count > 1 else None
    layer = get_gpt_layer_local_spec(qk_layernorm=config.model.qk_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = SdpaCore
    layer.module = NamedTransformerLayer
    layers = [layer] * get_num_layers_to_build(transformer, vp_stage)
    chunk = _PeerModel(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm),
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.train.seq_len_tokens,
        pre_process=parallel.pipeline_rank == 0 and number == 0,
        post_process=parallel.is_last_stage and number == count - 1,
        position_embedding_type="rope",
        rotary_base=config.model.rope_base,
        rotary_percent=config.model.rotary_percent,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        pg_collection=parallel.groups,
        vp_stage=vp_stage,
    )
    return chunk.to(parallel.device)


def _forward_step(
    micro_batches: Iterator[MicroBatch], module: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch = next(micro_batches)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    output = module(batch.tokens, positions, None, labels=batch.labels)
    return output, partial(_mean_loss, batch.loss_mask)


def _mean_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (token_losses.float() * loss_mask).sum() / loss_mask.sum()
    return loss, loss.detach().clone()
