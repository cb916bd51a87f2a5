"""A phase's optimizer: megatron-core's data-parallel wrapper and AdamW over the parameters that the phase trains.
(`parallel.strategy: deepspeed` has another: zero.py.)

Each phase builds its own and takes it down at the end, so that a frozen base costs no gradient buffer and no
optimizer state, and the sparse phase starts with fresh moments.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from gsa_train.config import Config, PhaseConfig
from gsa_train.model.build import Model
from gsa_train.parallel import Parallel
from gsa_train.phase_optimizer import PhaseOptimizer
from gsa_train.phases import enter_phase
from gsa_train.work_time import WorkTime


@dataclass
class MegatronPhaseOptimizer(PhaseOptimizer):
    """`parallel.strategy: megatron`. Its methods are the functions below."""

    ddps: list[DistributedDataParallel]
    """The model's chunks, each inside megatron-core's data-parallel wrapper."""
    optimizer: MegatronOptimizer
    phase: PhaseConfig
    work_time: WorkTime

    def __post_init__(self) -> None:
        self.modules = self.ddps
        self.local_backward = self.phase.train == "indexer"
        ddp = self.ddps[0]
        self.state_format = "plain_bf16" if ddp.config.bf16 else "plain"
        if ddp.ddp_config.use_distributed_optimizer:
            self.state_format = "distributed"

    def begin_step(self) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
            ddp.train()
        self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        finalize_gradients(self.work_time, self.ddps, None)

    def set_learning_rate(self, lr: float, weight_decay: float) -> None:
        set_learning_rate(self.optimizer, lr, weight_decay)

    def reduce_grad_norm(
        self, loss_share: torch.Tensor, parallel: Parallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reduce_grad_norm(self.optimizer, loss_share, parallel)

    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        clipped_step(self.optimizer, norm, max_norm, applied)

    def update_norm(self, applied: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        return update_norm(self.optimizer, applied, parallel)

    def close(self, model: Model) -> None:
        _close(model, self)

    def whole_weights(self, changes: bool) -> AbstractContextManager[None]:
        for ddp in self.ddps:
            if ddp.use_forward_hook and not changes:
                ddp.disable_forward_pre_hook()  # parameters under way must arrive first
                ddp.enable_forward_pre_hook()
        return nullcontext()

    def sharded_state(
        self, model_state: dict[str, Any], is_loading: bool, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=metadata
        )
        return state

    def load_sharded_state(self, loaded: dict[str, Any]) -> None:
        of_config = [
            {name: group[name] for name in ("betas", "eps")} for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(loaded)
        for group, values in zip(self.optimizer.param_groups, of_config, strict=True):
            group.update(values)  # a checkpoint brings its own along
        unshare_step_counts(self.optimizer)

    def loaded_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, ddp in enumerate(self.ddps):
            for name, parameter in ddp.named_parameters():
                if parameter.requires_grad:
                    yield f"{number}.{name}", parameter

    @torch.no_grad()
    def fill(self, loaded: dict[str, dict[str, torch.Tensor]], step_count: float) -> None:
        (inner,) = inner_optimizers(self.optimizer)
        for name, parameter in self.loaded_parameters():
            tensors = {"param": parameter.detach(), **loaded[name]}
            if isinstance(inner, DistributedOptimizer):
                if parameter not in inner.model_param_group_index_map:
                    continue  # all of it is other ranks'
                part = inner._get_model_param_range_map(parameter)["param"]
                flat = {kind: tensor.flatten()[part.start : part.end] for kind, tensor in tensors.items()}
                inner._set_main_param_and_optimizer_states(parameter, flat)
            else:
                main = getattr(parameter, "main_param", parameter)
                main.data.copy_(tensors["param"])
                for moment in ("exp_avg", "exp_avg_sq"):
                    inner.optimizer.state[main][moment].copy_(tensors[moment])
        for state in inner.optimizer.state.values():
            state["step"].fill_(step_count)

    def start_from_weights(self) -> None:
        self.optimizer.reload_model_params()


def build_optimizer(model: Model, phase: PhaseConfig, config: Config) -> PhaseOptimizer:
    """Freeze for the phase, wrap the model, and make its optimizer."""
    enter_phase(model, phase)
    if config.parallel.strategy == "deepspeed":
        from gsa_train.zero import build_zero_optimizer  # imports DeepSpeed

        return build_zero_optimizer(model, phase, config)
    return _build_megatron_optimizer(model, phase, config)


def close_optimizer(model: Model, phase_optimizer: PhaseOptimizer) -> None:
    """Release gradients, hooks and optimizer state before the next phase builds its own. Collective."""
    phase_optimizer.close(model)
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        parameter.grad = None
    config = model.mcore_config
    config.grad_scale_func = config.finalize_model_grads_func = config.no_sync_func = None


def _build_megatron_optimizer(model: Model, phase: PhaseConfig, config: Config) -> MegatronPhaseOptimizer:
    layout, train = config.parallel, config.train
    # In the warm-up each layer runs its own backward pass; there is no single one to overlap with.
    trains_base = phase.train != "indexer"
    overlap_grad_reduce = layout.overlap_grad_reduce and trains_base
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.grad_reduce_dtype == "fp32",
        use_distributed_optimizer=layout.distributed_optimizer,
        num_distributed_optimizer_instances=layout.optimizer_instances,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather and trains_base,
    )
    # One bucket for each chunk but the first: the others' reductions overlap with its work anyway (Megatron-LM).
    ddps = [
        DistributedDataParallel(model.mcore_config, ddp_config, module, disable_bucketing=number > 0)
        for number, module in enumerate(model.modules)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=phase.lr,
            min_lr=phase.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_epsilon,
            clip_grad=train.grad_clip,
            bf16=model.mcore_config.bf16,
            params_dtype=model.mcore_config.params_dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.overlap_param_gather and trains_base,
        ),
        ddps,
        config_overrides=_group_overrides(phase),
    )
    repair_torch_adam(optimizer)
    model.mcore_config.grad_scale_func = optimizer.scale_loss
    model.mcore_config.finalize_model_grads_func = partial(finalize_gradients, model.work_time)
    no_sync = [ddp.no_sync for ddp in ddps]
    model.mcore_config.no_sync_func = (
        (no_sync if len(no_sync) > 1 else no_sync[0]) if overlap_grad_reduce else None
    )
    return MegatronPhaseOptimizer(ddps, optimizer, phase, model.work_time)


def finalize_gradients(work_time: WorkTime, *args: Any, **kwargs: Any) -> None:
    """megatron-core's reduction of the gradients, before which a rank has done its own work. Collective."""
    work_time.end()
    with work_time.part("gradient_reduction"):
        megatron_finalize_model_grads(*args, **kwargs)


def lr_multipliers(phase: PhaseConfig) -> dict[str, float]:
    """Learning rate of each trained group over the phase's learning rate, under the names of the metrics."""
    if phase.train == "indexer":
        return {"indexer": 1.0}
    multipliers = {"base": 1.0, "gates": phase.gate_lr_mult}
    if phase.train == "all":
        multipliers["indexer"] = phase.indexer_lr_mult
    return multipliers


def _group_overrides(phase: PhaseConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Parameter groups of megatron-core: no weight decay on vectors, multiplied learning rates.

    `lr_mult` is also by what megatron-core tells groups apart in a checkpoint: without it, a resumed run
    trained the base at the indexer's learning rate.
    """
    multipliers = lr_multipliers(phase)
    overrides = get_standard_config_overrides(OptimizerConfig(lr=phase.lr))
    for group, attribute in (("gates", "gsa_gate"), ("indexer", "gsa_indexer")):
        if multipliers.get(group, 1.0) != 1.0:
            overrides[ParamKey(attr=attribute)] = ParamGroupOverride(lr_mult=multipliers[group])
    return overrides


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Give each group its learning rate and weight decay for the next step; both follow from the config, so
    nothing that a checkpoint brought along can change them."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


@torch.no_grad()
def reduce_grad_norm(
    optimizer: MegatronOptimizer, loss_share: torch.Tensor, parallel: Parallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the reduced gradients and the loss over all ranks, in one collective.

    Collective over all ranks, so that each has the same bits to decide by; nothing is read back on a GPU.

    Args:
        loss_share: 0-d: what this rank adds to the loss of the global batch.

    Returns:
        0-d fp32 norm before clipping, 0-d fp64 loss.
    """
    optimizer.prepare_grads()
    grads = [g for inner in _chained(optimizer) for g in inner.get_main_grads_for_grad_norm()]
    # Without the distributed optimizer every data-parallel replica holds all of them.
    copies = parallel.world_size // optimizer.get_grad_stats_parallel_group().size()
    sums = torch.stack([sum_of_squares(grads, parallel.device) / copies, loss_share.double()])
    dist.all_reduce(sums)
    return sums[0].sqrt().float(), sums[1]


@torch.no_grad()
def clipped_step(
    optimizer: MegatronOptimizer, norm: torch.Tensor, max_norm: float, applied: torch.Tensor
) -> None:
    """Clip the reduced gradients and update; without `applied` no weight, no moment and no step count changes.

    megatron-core's own `step` makes the host wait for each tensor's norm; here nothing is read back on a GPU, where
    AdamW scales and skips by tensors on the device.

    Args:
        norm: 0-d: their norm, of `reduce_grad_norm`.
        max_norm: largest global norm; 0 does not clip.
        applied: 0-d bool, the same on all ranks.
    """
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    if norm.is_cuda:
        for inner in inner_optimizers(optimizer):
            inner.optimizer.grad_scale = divisor
            inner.optimizer.found_inf = applied.logical_not().float()
        optimizer.step_with_ready_grads()
    elif applied:
        for parameter in (p for inner in _chained(optimizer) for p in inner.get_parameters()):
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        optimizer.step_with_ready_grads()


@torch.no_grad()
def update_norm(optimizer: MegatronOptimizer, applied: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """0-d fp32: norm of the change that the last step made to the weights, weight decay included; 0 where it made none.

    From AdamW's moments after the step, some tensors at a time: nothing is kept from before it. Collective.
    """
    squares = torch.zeros((), dtype=torch.float64, device=parallel.device)
    copies = parallel.world_size // optimizer.get_grad_stats_parallel_group().size()
    for inner in inner_optimizers(optimizer):
        adam, counted = inner.optimizer, {id(p) for p in inner.get_parameters() if counts_for_norms(p)}
        for group in adam.param_groups:
            for part in _parts([p for p in group["params"] if id(p) in counted]):
                squares += squared_change([adam.state[p] for p in part], group, part, parallel.device)
    squares = torch.where(applied, squares / copies, 0)
    dist.all_reduce(squares)
    return squares.sqrt().float()


def squared_change(
    states: list[dict[str, torch.Tensor]],
    group: dict[str, Any],
    parameters: list[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """0-d fp64: of parameters of one group, by AdamW's states after the step.

    w' = (1 - lr decay) w - lr u, so w' - w = -lr (u + decay w') / (1 - lr decay).
    """
    step, (beta1, beta2) = states[0]["step"], group["betas"]  # all have the same count
    correction = (1 - beta2**step).sqrt()
    roots = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
    torch._foreach_add_(roots, group["eps"] * correction)
    changes = torch._foreach_div([state["exp_avg"] for state in states], roots)
    torch._foreach_mul_(changes, correction / (1 - beta1**step))
    lr, decay = group["lr"], group["weight_decay"]
    torch._foreach_add_(changes, parameters, alpha=decay)
    return sum_of_squares(list(changes), device) * (lr / (1 - lr * decay)) ** 2


def _parts(tensors: list[torch.Tensor], elements: int = 1 << 26) -> Iterator[list[torch.Tensor]]:
    """In order, about as many elements at a time: temporary copies of them stay below half a gigabyte."""
    part: list[torch.Tensor] = []
    for tensor in tensors:
        if part and sum(each.numel() for each in part) + tensor.numel() > elements:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def counts_for_norms(parameter: torch.Tensor) -> bool:
    """Not a copy of what another rank has, as megatron-core counts gradients."""
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """0-d fp64. On CPUs torch adds up squares in fp32 nearly in one go: over half a million gradients that is 3e-5
    beside the norm, another 3e-5 for each way of cutting them, and clipping carries it into the weights."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        norms = list(torch._foreach_norm(tensors))
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).double().square().sum()


def _close(model: Model, phase_optimizer: MegatronPhaseOptimizer) -> None:
    for ddp in phase_optimizer.ddps:
        if ddp.use_forward_hook:
            ddp.disable_forward_pre_hook()  # also waits for parameters under way
        # Autograd holds each hook, which holds the wrapper, which holds autograd's node: a cycle that Python's
        # collector cannot see. Left alone, the old hooks would go on adding to the old buffers.
        ddp.grad_accs.clear()
    for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
        for attribute in ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad"):
            if hasattr(parameter, attribute):
                delattr(parameter, attribute)


def _chained(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Those of megatron-core's that have parameters on this rank."""
    return [o for o in _chained(optimizer) if isinstance(o.optimizer, torch.optim.AdamW)]


def repair_torch_adam(optimizer: MegatronOptimizer) -> None:
    """Make megatron-core 0.16.1's checkpoints work with torch's AdamW (without Transformer Engine or Apex), and on
    GPUs let it update in one kernel.

    1. Saving or loading an optimizer that has not stepped fails on its missing step counts: create the state.
    2. DistributedOptimizer then writes to a state named "step" that it never saved: leave the counts alone.
    The third fault needs `unshare_step_counts` after loading.
    """
    for inner in inner_optimizers(optimizer):
        _use_one_kernel(inner.optimizer)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                inner.optimizer.state[parameter].update(
                    step=torch.zeros((), device=parameter.device),
                    exp_avg=torch.zeros_like(parameter.data),
                    exp_avg_sq=torch.zeros_like(parameter.data),
                )
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = types.MethodType(_set_states, inner)


def _use_one_kernel(adam: torch.optim.AdamW) -> None:
    """On GPUs; torch otherwise passes about ten times over the weights. Its step counts are on the device then."""
    on_gpu = torch.cuda.is_available()
    # Also in groups of which this rank has no parameter: a checkpoint compares the ranks.
    for group in adam.param_groups:
        group["fused"], group["foreach"] = on_gpu, False if on_gpu else None


def _set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    group_index, group_order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][group_order]
    for name, value in tensors.items():
        if name == "param":
            main_param.data.copy_(value)
        elif name in ("exp_avg", "exp_avg_sq"):
            self.optimizer.state[main_param][name].copy_(value)


def unshare_step_counts(optimizer: MegatronOptimizer) -> None:
    """DistributedOptimizer.load_state_dict puts one step tensor into all states, where AdamW then adds 1 to it
    once per parameter; give each its own, on its device. The choice of the kernel came with the checkpoint, too."""
    for inner in inner_optimizers(optimizer):
        _use_one_kernel(inner.optimizer)
        for state in inner.optimizer.state.values():
            state["step"] = state["step"].to(state["exp_avg"].device, copy=True)
