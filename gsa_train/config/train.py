"""`train.*`: batches, precision, memory, objective and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gsa_kernels import limits
from gsa_train.config.load import problem_line

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class RampStage:
    until_tokens: int = 0
    """The stage ends with the step that reaches this number of tokens, counted from the start of the run. After a
    resume with other stages, the step number counts as if the run had always had them."""
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
    """`triton`: one kernel computes each pass of SwiGLU, of cross-entropy, of split + rotary embedding + G2 (heads of
    32, 64, 128 or 256, with rotary_percent 1 and without qk_norm), and of the indexer's split + norms + rotary
    embedding. With bf16 weights, matrix products also add gradients in fp32. `none`: the operations run one by one.
    `auto`: `triton` on GPUs."""
    cuda_graphs: bool = False
    """Run the forward and backward pass of a micro-batch as a CUDA graph, so that the host's launches do not limit the
    speed. The bits stay the same. Logged steps, validation and phases that train only the indexer run without a graph,
    and need the memory of a pass in addition to the graph's memory. With `parallel.overlap_grad_reduce` the last
    micro-batch of a step also runs without a graph. Tensor, context, pipeline and expert parallelism and recomputation
    are excluded."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again to save memory: none, attention after its projections
    (`selective`), or whole layers (`full`)."""
    recompute_num_layers: int = 1
    """With recompute=full, number of layers that are recomputed together."""
    linear_layers: str = "megatron"
    """What computes the matrix products of attention and feed-forward layers. `megatron`: megatron-core's layers in
    the working precision."""
    objective: str = "cross_entropy"
    """Loss of a token in training. Validation always scores the cross-entropy."""
    optimizer: str = "adamw"
    """Optimizer that updates the weights. `muon`: Muon for the matrices of attention, feed-forward layers, experts,
    gates and indexer, and AdamW for embedding, output layer, routers, norms and biases. Learning rates and weight decay
    are AdamW's."""
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
    """Threshold of QK-clip (Kimi K2) for a head's largest log-sum-exp of attention logits. After an update, query and
    key weights of heads above it are scaled down. The log-sum-exp is at most ln(keys) above the largest logit. 100 is
    usual. 0: none."""
    weight_average_decay: float = 0.0
    """Decay per optimizer step of a moving average of the weights, in fp32 and sharded like the optimizer's state.
    Checkpoints contain the average, and `launch/average_weights.py` turns it into a checkpoint. The average covers the
    phase, and the phases before it if the phase has `keep_optimizer`. 0: none."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1 as in the metrics, whose batches are read but not trained on. Step number and learning
    rate continue."""


def check_muon(config: Config) -> list[str]:
    """Return a line for each setting with which Muon cannot run. With another optimizer, return a line for each changed
    setting of Muon."""
    train = config.train
    if train.optimizer != "muon":
        names = ("muon_momentum", "muon_num_ns_steps", "muon_update_rms")
        changed = [(name, getattr(train, name)) for name in names]
        return [
            problem_line(
                f"train.{name}", value, f"train.optimizer = {train.optimizer} ignores it", "leave it out"
            )
            for name, value in changed
            if value != getattr(TrainConfig, name)
        ]
    if config.parallel.strategy != "deepspeed":
        return []
    wrong = "parallel.strategy = deepspeed shards flat groups of parameters, and Muon needs whole matrices"
    return [
        problem_line("train.optimizer", "muon", wrong, "set it to adamw, or parallel.strategy to megatron")
    ]


def check_qk_clip(config: Config) -> list[str]:
    """Return what excludes QK-clip, a line each."""
    threshold, layout, dense = config.train.qk_clip, config.parallel.strategy, config.gsa.dense_attention
    if threshold == 0:
        return []
    reasons: list[Reason] = []
    smallest = math.log(config.train.seq_len_tokens)
    if threshold <= smallest:
        wrong = f"equal logits already have the log-sum-exp ln(train.seq_len_tokens) = {smallest:.3g}"
        reasons.append((wrong, "set it above that; 100 is usual"))
    if config.model.qk_norm:
        wrong = "model.qk_norm = true already bounds the logits, and hides the scale of the weights"
        reasons.append((wrong, "leave it at 0"))
    if layout != "megatron":
        reasons.append((f"parallel.strategy = {layout} has none", "set that to megatron"))
    if dense not in ("auto", "triton"):
        wrong = f"gsa.dense_attention = {dense} does not return the log-sum-exp"
        reasons.append((wrong, "set that to auto"))
    return [problem_line("train.qk_clip", threshold, *reason) for reason in reasons]


def check_graphs(config: Config, replicas: int) -> list[str]:
    """Return the reasons why a pass over a micro-batch cannot be a CUDA graph, a line each.

    Args:
        replicas: number of data-parallel ranks
    """
    if not config.train.cuda_graphs:
        return []
    reasons = [*_of_layout(config), *_of_operations(config), *_of_attention(config), *_of_experts(config)]
    train = config.train
    smallest = min([train.global_batch_size, *(stage.global_batch_size for stage in train.batch_ramp)])
    if config.parallel.overlap_grad_reduce and train.micro_batch_size * replicas == smallest:
        wrong = "parallel.overlap_grad_reduce = true reduces gradients in a step's only micro-batch"
        reasons.append((wrong, "set that to false"))
    if config.logging.every_steps == 1:
        reasons.append(
            ("logging.every_steps = 1, and logged steps run without graphs", "set that to 2 or more")
        )
    return [
        problem_line("train.cuda_graphs", True, wrong, f"{remedy}, or train.cuda_graphs to false")
        for wrong, remedy in reasons
    ]


Reason = tuple[str, str]
"""(what excludes the graph, what to set instead)."""


def _of_layout(config: Config) -> list[Reason]:
    parallel = config.parallel
    reasons = [
        (f"parallel.{name} = {getattr(parallel, name)} exchanges tensors inside a pass", "set that to 1")
        for name in ("tensor", "context", "pipeline")
        if getattr(parallel, name) > 1
    ]
    if parallel.strategy != "megatron":
        wrong = f"parallel.strategy = {parallel.strategy} moves gradients inside a pass"
        reasons.append((wrong, "set that to megatron"))
    if parallel.overlap_param_gather:
        wrong = "parallel.overlap_param_gather = true gathers weights inside a pass"
        reasons.append((wrong, "set that to false"))
    return reasons


def _of_operations(config: Config) -> list[Reason]:
    train, reasons = config.train, []
    if train.recompute != "none":
        wrong = f"train.recompute = {train.recompute} reads the state of random numbers back"
        reasons.append((wrong, "set that to none"))
    if train.fused_ops == "none":
        reasons.append(("train.fused_ops = none is not made for graphs", "set that to auto"))
    if config.gsa.attention_impl == "reference":
        wrong = "gsa.attention_impl = reference is not made for graphs"
        reasons.append((wrong, "set that to auto"))
    return reasons


def _of_attention(config: Config) -> list[Reason]:
    gsa, length = config.gsa, config.train.seq_len_tokens
    if gsa.attention == "dense":
        return []
    reasons: list[Reason] = []
    sparse = any(phase.attention == "sparse" and phase.train != "indexer" for phase in config.phases)
    if not sparse:
        return reasons
    if length > limits.PACKED_MASK_MAX_TOKENS:
        wrong = f"of {length} tokens (train.seq_len_tokens) each query has key lists, whose length the host reads back"
        reasons.append((wrong, f"set train.seq_len_tokens to {limits.PACKED_MASK_MAX_TOKENS} or less"))
    elif gsa.attention_kernel == "gathered" or (
        gsa.attention_kernel == "auto" and length >= limits.MEASURED_FROM_TOKENS
    ):
        wrong = (
            f"with gsa.attention_kernel = {gsa.attention_kernel} and train.seq_len_tokens = {length} the host reads "
            "the length of key lists back"
        )
        reasons.append((wrong, "set the first to masked"))
    return reasons


def _of_experts(config: Config) -> list[Reason]:
    """Return the reasons why experts rule out a CUDA graph. Token counts of experts differ between passes, and
    must stay on the device. They do so only in torch's grouped products in bf16 (on Hopper and later), on one
    rank, without a capacity."""
    moe, reasons = config.moe, []
    if moe.experts == 0:
        return []
    if moe.experts_impl != "grouped":
        wrong = f"moe.experts_impl = {moe.experts_impl} reads back how many tokens each expert gets"
        reasons.append((wrong, "set that to grouped"))
    if config.train.precision == "fp32":
        wrong = (
            "with moe.experts and train.precision = fp32 torch reads back how many tokens each expert gets"
        )
        reasons.append((wrong, "set that precision to bf16"))
    if config.parallel.expert > 1:
        wrong = f"parallel.expert = {config.parallel.expert} reads back how many tokens go to each rank"
        reasons.append((wrong, "set that to 1"))
    if moe.capacity_factor > 0:
        wrong = f"moe.capacity_factor = {moe.capacity_factor:g} reads back how many tokens are dropped"
        reasons.append((wrong, "set that to 0"))
    return reasons
