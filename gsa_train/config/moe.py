"""`moe.*`: feed-forward layers that are mixtures of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gsa_train.config.load import problem_line
from gsa_train.config.parallel import nearest

if TYPE_CHECKING:
    from gsa_train.config.sections import Config


@dataclass(frozen=True)
class MoEConfig:
    experts: int = 0
    """Routed experts of a layer. Each is a SwiGLU. 0: all feed-forward layers are dense, of width
    `model.ffn_hidden_size`."""
    top_k: int = 2
    """Number of experts to which a token is sent."""
    expert_ffn_hidden_size: int = 256
    """Inner width of a routed expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of a shared expert, which computes every token in addition to its `top_k` experts. 0: none."""
    first_dense_layers: int = 0
    """Layers at the start of the model that stay dense."""
    layer_interval: int = 1
    """After `first_dense_layers`, the next and then every `layer_interval`-th layer has experts. Other layers are
    dense."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to a token's scores of the experts, in fp32. The outputs of the chosen experts
    are averaged, weighted by these scores."""
    routed_scale: float = 1.0
    """Factor on the weighted sum of the routed experts. DeepSeek-V3 has 2.5."""
    balancing: Literal["none", "global_batch", "aux_free"] = "global_batch"
    """What balances the experts' loads. `global_batch`: a loss (arXiv 2501.11873) from the loads of the previous step's
    global batch, so that layout and micro-batches do not matter. `aux_free` (arXiv 2408.15664): a bias per expert,
    which affects only the choice of experts, moves against the expert's load after each step. It needs
    router_score=sigmoid."""
    balance_coeff: float = 1e-3
    """Coefficient of the loss of `global_batch`, as megatron-core's `moe_aux_loss_coeff`. Each layer adds `experts` x
    the sum over experts of (share of the choices x mean score), which is 1 for even loads. A coefficient c of
    transformers (`router_aux_loss_coef`) corresponds to c x `top_k` / layers."""
    bias_update_rate: float = 1e-3
    """Amount by which an update moves each bias of `aux_free`. The default is DeepSeek-V3's value."""
    z_loss_coeff: float = 1e-3
    """Coefficient of the mean squared log-sum-exp of the router's logits, which each layer adds to the loss. ST-MoE
    has 1e-3. 0: none."""
    capacity_factor: float = 0.0
    """An expert takes at most this multiple of its even share (tokens x top_k / experts) of a sequence, and drops the
    sequence's later tokens. 0: nothing is dropped."""
    experts_impl: Literal["grouped", "sequential"] = "grouped"
    """`grouped`: one grouped matrix product computes the experts of a rank. `sequential`: megatron-core's
    SequentialMLP computes one expert after the other."""


def layers_with_experts(moe: MoEConfig, num_layers: int) -> range:
    """Return the layers (from 0) that are mixtures of experts."""
    if moe.experts < 1 or moe.layer_interval < 1:
        return range(0)
    return range(moe.first_dense_layers, num_layers, moe.layer_interval)


ALIGNMENT = 8
"""torch's grouped products need rows that begin at multiples of 16 bytes, which are 8 elements of bf16."""


def expert_layers(config: Config) -> list[int]:
    """Return the layers (from 0) that have experts."""
    return list(layers_with_experts(config.moe, config.model.num_layers))


def check_moe(config: Config, world_size: int) -> Iterator[str]:
    if config.moe.experts == 0:
        yield from _check_unread(config)
    elif config.moe.experts > 0:  # otherwise the range of the field says so
        yield from _check_sizes(config)
        yield from _check_router(config)
        yield from _check_layout(config, world_size)
        if config.parallel.strategy == "deepspeed":
            wrong = (
                "DeepSpeed's ZeRO reduces all gradients over the same ranks, but with moe.experts = "
                f"{config.moe.experts} experts have others"
            )
            yield config.problem("parallel.strategy", wrong, "set it to megatron")


def _check_unread(config: Config) -> Iterator[str]:
    """Check that, without experts, other fields have their defaults, because nothing reads these fields."""
    for field in dataclasses.fields(MoEConfig):
        if field.name != "experts" and getattr(config.moe, field.name) != field.default:
            remedy = f"leave it at {field.default}, or set moe.experts"
            yield config.problem(f"moe.{field.name}", "without effect, for moe.experts = 0", remedy)
    for name in ("expert", "expert_tensor"):
        if getattr(config.parallel, name) > 1:
            wrong = "there is no expert to split, for moe.experts = 0"
            yield config.problem(f"parallel.{name}", wrong, "set it to 1, or set moe.experts")


def _check_sizes(config: Config) -> Iterator[str]:
    moe, parallel = config.moe, config.parallel
    if moe.experts < moe.top_k:
        remedy = "give more experts, or a smaller top_k"
        yield config.problem("moe.experts", f"fewer than moe.top_k = {moe.top_k}", remedy)
    if moe.top_k == 1:
        wrong = "the weight of a single expert is always 1, whatever the router says, which so learns nothing of it"
        yield config.problem("moe.top_k", wrong, "set it to 2 or more")
    if moe.first_dense_layers >= config.model.num_layers > 0:
        wrong = f"leaves none of model.num_layers = {config.model.num_layers} for experts"
        yield config.problem("moe.first_dense_layers", wrong, "give fewer, or set moe.experts to 0")
    for name, field in (
        ("experts", "expert"),
        ("expert_ffn_hidden_size", "expert_tensor"),
        ("shared_expert_ffn_hidden_size", "tensor"),
    ):
        ranks = getattr(parallel, field)
        if ranks > 0 and getattr(moe, name) % ranks != 0:
            wrong = f"not a multiple of parallel.{field} = {ranks}"
            yield config.problem(f"moe.{name}", wrong, "change one of them")
    if moe.experts_impl == "grouped" and parallel.expert_tensor > 0:
        yield from _check_alignment(config)


def _check_alignment(config: Config) -> Iterator[str]:
    wrong = f"grouped products need multiples of {ALIGNMENT}, with moe.experts_impl = grouped"
    remedy = f"choose a multiple of {ALIGNMENT}, or set moe.experts_impl to sequential"
    if config.model.hidden_size % ALIGNMENT != 0:
        yield config.problem("model.hidden_size", wrong, remedy)
    ranks = config.parallel.expert_tensor
    own, rest = divmod(config.moe.expert_ffn_hidden_size, ranks)
    if rest == 0 and own % ALIGNMENT != 0:
        wrong += f": a rank has {own} of it (parallel.expert_tensor = {ranks})"
        yield config.problem("moe.expert_ffn_hidden_size", wrong, remedy)


def _check_router(config: Config) -> Iterator[str]:
    moe = config.moe
    if moe.balancing == "aux_free" and moe.router_score != "sigmoid":
        wrong = (
            f"biases move scores in (0, 1) that do not depend on each other, and moe.router_score = "
            f"{moe.router_score}"
        )
        remedy = "set moe.router_score to sigmoid, or balancing to global_batch"
        yield config.problem("moe.balancing", wrong, remedy)
    for name, needed in {"balance_coeff": "global_batch", "bias_update_rate": "aux_free"}.items():
        if moe.balancing != needed and getattr(moe, name) != getattr(MoEConfig, name):
            wrong = f"without effect, for moe.balancing = {moe.balancing}"
            yield config.problem(f"moe.{name}", wrong, f"leave it out, or set moe.balancing to {needed}")
    if 0 < moe.capacity_factor < 1:
        wrong = "below 1 an expert could not take even its even share"
        yield config.problem("moe.capacity_factor", wrong, "give 1 or more, or 0 for none")


def _check_layout(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    expert, split = parallel.expert, parallel.expert_tensor
    if min(expert, split, parallel.tensor, parallel.pipeline) < 1:
        return
    if split not in (1, parallel.tensor):
        wrong = f"neither 1 nor parallel.tensor = {parallel.tensor}"
        yield config.problem("parallel.expert_tensor", wrong, "choose one of them")
    if parallel.tensor > 1 and not parallel.sequence:
        wrong = (
            "with experts and parallel.tensor above 1: each tensor-parallel rank routes the tokens that sequence "
            "parallelism gives it"
        )
        yield config.problem("parallel.sequence", wrong, "set it to true, or parallel.tensor to 1")
    stage, sharing = world_size // parallel.pipeline, expert * split
    if world_size % parallel.pipeline == 0 and stage % sharing != 0:
        wrong = (
            f"a pipeline stage has {stage} tensor x context x data ranks to share the experts out, not a multiple of "
            f"parallel.expert = {expert} x parallel.expert_tensor = {split}"
        )
        divisor = math.gcd(stage // math.gcd(stage, split), config.moe.experts)
        unit = parallel.pipeline * math.lcm(parallel.tensor * parallel.context, sharing)
        enough = f"start {nearest(world_size, unit)} ranks"
        remedy = f"{enough}, or set parallel.expert to a divisor of both, such as {divisor}"
        yield problem_line("world size", world_size, wrong, remedy)
    elif parallel.optimizer_instances > 1 and (replicas := stage // sharing) % parallel.optimizer_instances:
        wrong = f"does not divide the {replicas} replicas of an expert"
        remedy = f"choose a divisor of {replicas}, or a smaller parallel.expert"
        yield config.problem("parallel.optimizer_instances", wrong, remedy)
