"""`train.*`: batches, precision, memory, objective and optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

from gsa_kernels import limits

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class RampStage:
    until_tokens: int = 0
    """The stage ends with the step that reaches this number of tokens, counted from the start of the run. After a
    resume with other stages, batches follow from the step number, as if the run had always had these stages."""
    global_batch_size: int = 0
    """Sequences per optimizer step in this stage, at most `train.global_batch_size`."""


@dataclass(frozen=True)
class TrainConfig:
    seq_len_tokens: int = 256
    """Tokens per sequence."""
    micro_batch_size: int = 1
    """Sequences per forward pass of one data-parallel replica."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks, after the stages of `batch_ramp`."""
    batch_ramp: list[RampStage] = field(default_factory=list)
    """Stages with smaller batches at the start of the run."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of weights and activations. `auto`: bf16 on GPUs, fp32 on CPUs. With bf16 the optimizer keeps fp32
    weights."""
    fused_ops: Literal["auto", "triton", "none"] = "auto"
    """`triton`: fused kernels for SwiGLU, cross-entropy, the indexer's split + norms + rotary embedding, and the split
    + rotary embedding + value gate of QKV (head_dim 32, 64, 128 or 256, rotary_percent 1, no qk_norm). With bf16
    weights, matrix products also add weight gradients to fp32 buffers. `none`: the operations run one by one. `auto`:
    `triton` on GPUs."""
    cuda_graphs: bool = False
    """Run the forward and backward pass of a micro-batch as a CUDA graph, so that kernel launches on the host do not
    limit the speed. The bits stay the same. Logged steps, validation, phases that train only the indexer, and (with
    `parallel.overlap_grad_reduce`) a step's last micro-batch use no graph. Validation needs additional memory. Not with
    tensor, context, pipeline or expert parallelism or recomputation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again to save memory: none, attention after its projections
    (`selective`), or whole layers (`full`)."""
    recompute_num_layers: int = 1
    """With recompute=full, number of layers that are recomputed together."""
    linear_layers: str = "megatron"
    """Precision of the matrix products in attention and feed-forward layers. `megatron`: megatron-core's layers in the
    working precision. `fp8`: FP8 with one scale per matrix, on GPUs of compute capability 8.9 or more. Weights,
    optimizer and checkpoints stay the same. Not with experts."""
    objective: str = "cross_entropy"
    """Loss of a token in training. Validation always scores the cross-entropy."""
    optimizer: str = "adamw"
    """Optimizer that updates the weights. `muon`: Muon for the matrices of attention, feed-forward layers, experts,
    gates and indexer, and AdamW for embedding, output layer, routers, norms and biases. Muon uses AdamW's learning
    rates and weight decay."""
    muon_momentum: float = 0.95
    """Muon: decay per step of the momentum (Nesterov)."""
    muon_num_ns_steps: int = 5
    """Muon: Newton-Schulz iterations that orthogonalize a matrix."""
    muon_update_rms: float = 0.2
    """Muon: root mean square of an update at learning rate 1, near AdamW's. The orthogonalized matrix is multiplied by
    this x sqrt(max(rows, columns))."""
    weight_decay: float = 0.1
    """Weight decay of the optimizer. Norms and biases have none."""
    adam_beta1: float = 0.9
    """AdamW: decay per step of the first moment."""
    adam_beta2: float = 0.95
    """AdamW: decay per step of the second moment."""
    adam_epsilon: float = 1e-8
    """AdamW: epsilon added to the root of the second moment."""
    grad_clip: float = 1.0
    """Largest global gradient norm. Larger gradients are scaled down to this norm. 0 turns clipping off."""
    z_loss_coeff: float = 0.0
    """Weight of the output layer's z-loss in training: the square of the log of the softmax's denominator, per token.
    It keeps the logits small; 1e-4 and 1e-5 are usual. 0: none."""
    qk_clip: float = 0.0
    """Threshold of QK-clip (Kimi K2). After an update, a head's query and key weights are scaled down if the largest
    log-sum-exp of its attention logits is above the threshold. (It exceeds the largest logit by at most ln(keys).) 100
    is usual. 0: none."""
    weight_average_decay: float = 0.0
    """Decay per optimizer step of a moving average of the weights, in fp32 and sharded like the optimizer's state.
    Checkpoints contain the average, and `launch/average_weights.py` makes it a checkpoint of its own. Each phase starts
    a new average, except a phase with `keep_optimizer`. 0: none."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1 as in the metrics, whose batches are read but not trained on. Step number and learning
    rate continue."""


def check_muon(config: Config) -> Iterator[str]:
    """Yield a line for each setting with which Muon cannot run. With another optimizer, yield a line for each changed
    Muon setting, because it is ignored."""
    train = config.train
    if train.optimizer == "muon" and config.parallel.strategy == "deepspeed":
        wrong = (
            "parallel.strategy = deepspeed shards flat groups of parameters, and Muon needs whole matrices"
        )
        yield config.problem("train.optimizer", wrong, "set it to adamw, or parallel.strategy to megatron")
    for name in ("muon_momentum", "muon_num_ns_steps", "muon_update_rms"):
        if train.optimizer != "muon" and getattr(train, name) != getattr(TrainConfig, name):
            wrong = f"train.optimizer = {train.optimizer} ignores it"
            yield config.problem(f"train.{name}", wrong, "leave it out")


def check_qk_clip(config: Config) -> Iterator[str]:
    field, layout, dense = "train.qk_clip", config.parallel.strategy, config.gsa.dense_attention
    if config.train.qk_clip == 0:
        return
    smallest = math.log(config.train.seq_len_tokens)
    if config.train.qk_clip <= smallest:
        wrong = f"equal logits already have the log-sum-exp ln(train.seq_len_tokens) = {smallest:.3g}"
        yield config.problem(field, wrong, "set it above that; 100 is usual")
    if config.model.qk_norm:
        wrong = "model.qk_norm = true already bounds the logits, and hides the scale of the weights"
        yield config.problem(field, wrong, "leave it at 0")
    if layout != "megatron":
        yield config.problem(field, f"parallel.strategy = {layout} has none", "set that to megatron")
    if dense not in ("auto", "triton"):
        wrong = f"gsa.dense_attention = {dense} does not return the log-sum-exp"
        yield config.problem(field, wrong, "set that to auto")


def check_fp8(config: Config) -> Iterator[str]:
    model, train, parallel = config.model, config.train, config.parallel
    if train.linear_layers != "fp8" or min(parallel.tensor, parallel.context) < 1:
        return
    reasons = []
    if train.precision == "fp32":
        reasons.append(("train.precision = fp32, and the other operations need bf16", "set that to auto"))
    if config.moe.experts > 0:
        reasons.append((f"moe.experts = {config.moe.experts} have no products in FP8", "set that to 0"))
    query = model.num_heads // parallel.tensor * model.head_dim
    key_value = model.num_kv_heads // parallel.tensor * model.head_dim
    tokens = train.micro_batch_size * train.seq_len_tokens // parallel.context
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.num_heads x head_dim / parallel.tensor": query,
        "model.(num_heads + 2 num_kv_heads) x head_dim / parallel.tensor": query + 2 * key_value,
        "model.ffn_hidden_size / parallel.tensor": model.ffn_hidden_size // parallel.tensor,
        "train.micro_batch_size x seq_len_tokens / parallel.context": tokens,
    }
    for name, size in sizes.items():
        if size % limits.FP8_MULTIPLE:
            below = size // limits.FP8_MULTIPLE * limits.FP8_MULTIPLE
            choice = f"{below} or {below + limits.FP8_MULTIPLE}" if below else f"{limits.FP8_MULTIPLE}"
            wrong = f"{name} = {size} is not a multiple of {limits.FP8_MULTIPLE}"
            reasons.append((wrong, f"make that {choice}"))
    for wrong, remedy in reasons:
        yield config.problem("train.linear_layers", wrong, f"{remedy}, or train.linear_layers to megatron")


def check_graphs(config: Config, replicas: int) -> Iterator[str]:
    """Yield the reasons why a pass over a micro-batch cannot be a CUDA graph.

    Args:
        replicas: number of data-parallel ranks
    """
    if config.train.cuda_graphs:
        reasons = _of_layout(config), _of_operations(config), _of_attention(config), _of_experts(config)
        for wrong, remedy in chain(*reasons, _of_steps(config, replicas)):
            yield config.problem("train.cuda_graphs", wrong, f"{remedy}, or train.cuda_graphs to false")


Reasons = Iterator[tuple[str, str]]
"""(what excludes the graph, what to set instead)."""


def _of_layout(config: Config) -> Reasons:
    parallel = config.parallel
    for name in ("tensor", "context", "pipeline"):
        if getattr(parallel, name) > 1:
            wrong = f"parallel.{name} = {getattr(parallel, name)} exchanges tensors inside a pass"
            yield wrong, "set that to 1"
    if parallel.strategy != "megatron":
        yield f"parallel.strategy = {parallel.strategy} moves gradients inside a pass", "set that to megatron"
    if parallel.overlap_param_gather:
        yield "parallel.overlap_param_gather = true gathers weights inside a pass", "set that to false"


def _of_operations(config: Config) -> Reasons:
    recompute = config.train.recompute
    if recompute != "none":
        yield f"train.recompute = {recompute} reads the state of random numbers back", "set that to none"
    if config.train.fused_ops == "none":
        yield "train.fused_ops = none is not made for graphs", "set that to auto"
    if config.gsa.attention_impl == "reference":
        yield "gsa.attention_impl = reference is not made for graphs", "set that to auto"


def _of_attention(config: Config) -> Reasons:
    gsa, length = config.gsa, config.train.seq_len_tokens
    sparse = any(phase.attention == "sparse" and phase.train != "indexer" for phase in config.phases)
    if gsa.attention == "dense" or not sparse:
        return
    if length > limits.PACKED_MASK_MAX_TOKENS:
        wrong = f"of {length} tokens (train.seq_len_tokens) each query has key lists, whose length the host reads back"
        yield wrong, f"set train.seq_len_tokens to {limits.PACKED_MASK_MAX_TOKENS} or less"
    elif gsa.attention_kernel == "gathered":
        yield (
            "with gsa.attention_kernel = gathered the host reads the length of key lists back",
            "set that to auto",
        )


def _of_experts(config: Config) -> Reasons:
    """Yield the reasons why experts rule out a CUDA graph.

    The number of tokens of an expert differs between passes, so a graph can only run if the host never reads this
    number back. This requires torch's grouped products in bf16 (on Hopper and later GPUs), all experts on each rank,
    and no limit on an expert's tokens.
    """
    moe, expert = config.moe, config.parallel.expert
    if moe.experts == 0:
        return
    if moe.experts_impl != "grouped":
        wrong = f"moe.experts_impl = {moe.experts_impl} reads back how many tokens each expert gets"
        yield wrong, "set that to grouped"
    if config.train.precision == "fp32":
        wrong = (
            "with moe.experts and train.precision = fp32 torch reads back how many tokens each expert gets"
        )
        yield wrong, "set that precision to bf16"
    if expert > 1:
        yield f"parallel.expert = {expert} reads back how many tokens go to each rank", "set that to 1"
    if moe.capacity_factor > 0:
        wrong = f"moe.capacity_factor = {moe.capacity_factor:g} reads back how many tokens are dropped"
        yield wrong, "set that to 0"


def _of_steps(config: Config, replicas: int) -> Reasons:
    train = config.train
    smallest = min([train.global_batch_size, *(stage.global_batch_size for stage in train.batch_ramp)])
    if config.parallel.overlap_grad_reduce and train.micro_batch_size * replicas == smallest:
        wrong = "parallel.overlap_grad_reduce = true reduces gradients in a step's only micro-batch"
        yield wrong, "set that to false"
    if config.logging.every_steps == 1:
        yield "logging.every_steps = 1, and logged steps run without graphs", "set that to 2 or more"
