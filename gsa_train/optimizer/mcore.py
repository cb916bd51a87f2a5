"""Implement a phase's optimizer for `parallel.strategy: megatron`: torch's optimizer (build.py) inside megatron-core's
data-parallel wrapper and sharding.

Each phase builds its own optimizer and closes it at the end. If a phase freezes the base model, the base model has no
gradient buffers and no optimizer state. A phase starts with fresh optimizer state, unless it has `keep_optimizer`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
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

from gsa_train.config import Config, PhaseConfig, TrainConfig
from gsa_train.distributed.megatron_versions import main_grads
from gsa_train.distributed.objects import gathered
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.expert_mark import is_of_expert
from gsa_train.optimizer.build import OptimizerKind, optimizer_kind
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer, StatePart
from gsa_train.optimizer.micro_batch_graph import leave_default_stream
from gsa_train.optimizer.muon import Matrices, MatrixShard
from gsa_train.optimizer.norms import chained, counts_for_norms, inner_optimizers, sum_of_squares
from gsa_train.optimizer.qk_clip import QKClip
from gsa_train.phases import enter_phase, lr_multipliers
from gsa_train.profiling.work_time import WorkTime

Hook = Callable[..., None]


class PhaseDataParallel(DistributedDataParallel):
    """Wraps a model as megatron-core does, with gradient hooks that can be removed at the end of the phase.

    megatron-core's hooks are on the parameters' autograd nodes, and reference the wrapper, its gradient buffers and the
    model. A module that keeps a tensor with an autograd graph would thus close a reference cycle: tensor, graph, hooks,
    wrapper, model. Python cannot collect a cycle through autograd, so the hooks of this class hold only a weak
    reference to the wrapper. Old hooks must also be disabled for the next phase, whose wrapper uses the same nodes.
    """

    _gradient_hooks: dict[torch.nn.Parameter, Hook]
    """megatron-core's hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gradient_hooks = {}  # filled by megatron-core's constructor
        super().__init__(*args, **kwargs)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Hook:
        self._gradient_hooks[param] = super()._make_backward_post_hook(param)
        reference = weakref.ref(self)

        def hook(*gradients: Any) -> None:
            wrapper = reference()
            if wrapper is not None and param in wrapper._gradient_hooks:
                wrapper._gradient_hooks[param](*gradients)

        return hook

    def drop_gradient_hooks(self) -> None:
        """Disable this wrapper's hooks, also on autograd nodes that the next wrapper shares."""
        self._gradient_hooks.clear()


@dataclass
class MegatronPhaseOptimizer(PhaseOptimizer):
    """Implements `parallel.strategy: megatron`."""

    ddps: list[PhaseDataParallel]
    """The model's chunks, each inside megatron-core's data-parallel wrapper."""
    optimizer: MegatronOptimizer
    kind: OptimizerKind
    phase: PhaseConfig
    work_time: WorkTime
    qk_clip: QKClip | None
    parallel: Parallel

    def __post_init__(self) -> None:
        self.modules = self.ddps
        self.local_backward = self.phase.train == "indexer"
        ddp = self.ddps[0]
        self.updates = torch.zeros((), device=next(ddp.parameters()).device)
        self.updaters = [inner.optimizer for inner in inner_optimizers(self.optimizer)]
        self.state_group, self.state_copy, self.expert_state_group = None, None, None
        if ddp.ddp_config.use_distributed_optimizer:
            self.state_group, self.expert_state_group = ddp.intra_dp_cp_group, ddp.intra_expt_dp_group
            instances = ddp.ddp_config.num_distributed_optimizer_instances
            self.state_copy = ddp.inter_dist_opt_group.rank() if instances > 1 else 0

    def begin_step(self) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
            ddp.train()
        self.optimizer.zero_grad()
        if self.qk_clip is not None:
            self.qk_clip.begin_step()

    def reduce_gradients(self) -> None:
        finalize_gradients(self.work_time, self.ddps, None)

    @torch.no_grad()
    def reduce_grad_norm(self, loss_share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Use one collective over all ranks, so that all ranks decide from equal bits."""
        self.optimizer.prepare_grads()
        squares = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
        for inner in chained(self.optimizer):  # experts have other replicas than dense parameters
            by_copies[self._copies(inner)] += main_grads(inner)
        for copies, grads in by_copies.items():
            squares = squares + sum_of_squares(grads, self.parallel.device) / copies
        sums = torch.stack([squares, loss_share.double()])
        dist.all_reduce(sums)
        return sums[0].sqrt().float(), sums[1]

    @torch.no_grad()
    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        """Unlike in megatron-core's version, the host does not wait for norms if torch's optimizer is fused. A fused
        optimizer reads two numbers on the device: the divisor of the gradients, and whether to skip the update."""
        if self.qk_clip is not None:
            self.qk_clip.measure(applied)  # _qk_clip's hook scales with the result
        divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
        # torch's GradScaler recognizes such optimizers by this attribute.
        if norm.is_cuda and all(getattr(each, "_step_supports_amp_scaling", False) for each in self.updaters):
            for updater in self.updaters:
                fused: Any = updater
                fused.grad_scale, fused.found_inf = divisor, applied.logical_not().float()
            self.optimizer.step_with_ready_grads()
        elif applied:
            for parameter in (p for inner in chained(self.optimizer) for p in inner.get_parameters()):
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
            self.optimizer.step_with_ready_grads()
        self.updates += applied

    @torch.no_grad()
    def update_norm(self, applied: torch.Tensor) -> torch.Tensor:
        """Use the state after the step, without a copy of the old weights."""
        squares = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        for inner in inner_optimizers(self.optimizer):
            updated, counted = inner.optimizer, {id(p) for p in inner.get_parameters() if counts_for_norms(p)}
            for group in updated.param_groups:
                parameters = [p for p in group["params"] if id(p) in counted]
                if parameters:
                    states = [updated.state[p] for p in parameters]
                    squares += self.kind.squared_change(states, group, parameters) / self._copies(inner)
        squares = torch.where(applied, squares, 0)
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def _copies(self, inner: Any) -> int:
        """Count the ranks with the same gradients and state: the replicas, or the distributed optimizer's instances."""
        sharing: int = inner.get_grad_stats_parallel_group().size()
        return self.parallel.world_size // sharing

    def close(self, model: Model) -> None:
        if self.qk_clip is not None:
            self.qk_clip.close()
        for ddp in self.ddps:
            if ddp.use_forward_hook:
                ddp.disable_forward_pre_hook()  # also waits for all-gathers in progress
            ddp.drop_gradient_hooks()
        for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
            for attribute in ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad"):
                if hasattr(parameter, attribute):
                    delattr(parameter, attribute)

    def whole_weights(self, changes: bool) -> AbstractContextManager[None]:
        for ddp in self.ddps:
            if ddp.use_forward_hook and not changes:
                ddp.disable_forward_pre_hook()  # wait for all-gathers in progress
                ddp.enable_forward_pre_hook()
        return nullcontext()

    @torch.no_grad()
    def state_parts(self) -> Iterator[StatePart]:
        for inner in inner_optimizers(self.optimizer):
            for ddp in self.ddps:
                for parameter in ddp.parameters():
                    main, start = _main_weight(inner, parameter)
                    if main is not None:
                        state = inner.optimizer.state[main]
                        tensors = {name: state[name].view(-1) for name in self.kind.state_of(parameter)}
                        if parameter.dtype != torch.float32:
                            tensors[MAIN_WEIGHT] = main.detach().view(-1)
                        yield StatePart(parameter, start, main.numel(), tensors)

    def start_from_weights(self) -> None:
        self.optimizer.reload_model_params()


def _main_weight(inner: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """Return this rank's main-weight shard of a parameter, or None, and its offset in the flat parameter."""
    if not isinstance(inner, DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
        # Expert parameters belong to another optimizer.
        return main if main in inner.optimizer.state else None, 0
    if parameter not in inner.model_param_group_index_map:
        return None, 0  # frozen, or entirely on other ranks
    group, order = inner.model_param_group_index_map[parameter]
    start: int = inner._get_model_param_range_map(parameter)["param"].start
    return inner.optimizer.param_groups[group]["params"][order], start


def build_optimizer(model: Model, phase: PhaseConfig, config: Config) -> PhaseOptimizer:
    """Freeze parameters for the phase, wrap the model and build its optimizer."""
    enter_phase(model, phase)
    if config.train.cuda_graphs:
        leave_default_stream(model.parallel.device)
    if config.parallel.strategy == "deepspeed":
        from gsa_train.optimizer.zero import build_zero_optimizer  # imports DeepSpeed

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
    # In the indexer warm-up each layer runs its own backward pass, so there is no backward pass to overlap with.
    trains_base = phase.train != "indexer"
    overlap_grad_reduce = layout.overlap_grad_reduce and trains_base
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.grad_reduce_dtype == "fp32",
        use_distributed_optimizer=layout.distributed_optimizer,
        num_distributed_optimizer_instances=layout.optimizer_instances,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather and trains_base,
    )
    # Each chunk except the first has one bucket. Its reduction overlaps with the first chunk's backward pass (as in
    # Megatron-LM).
    ddps = [
        PhaseDataParallel(model.mcore_config, ddp_config, module, disable_bucketing=number > 0)
        for number, module in enumerate(model.modules)
    ]
    kind = optimizer_kind(train)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=phase.lr,
            min_lr=phase.min_lr,
            weight_decay=train.weight_decay,
            clip_grad=train.grad_clip,
            bf16=model.mcore_config.bf16,
            params_dtype=model.mcore_config.params_dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.overlap_param_gather and trains_base,
        ),
        ddps,
        config_overrides=_group_overrides(phase, kind),
    )
    _plug_in(optimizer, kind, train)
    if kind.matrix_state is not None:
        for inner in inner_optimizers(optimizer):
            _describe_matrices(inner, ddps, model.parallel)
    model.mcore_config.grad_scale_func = optimizer.scale_loss
    model.mcore_config.finalize_model_grads_func = partial(finalize_gradients, model.work_time)
    no_sync: Any = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    model.mcore_config.no_sync_func = no_sync if overlap_grad_reduce else None
    clip = _qk_clip(model, optimizer, train.qk_clip) if train.qk_clip > 0 and trains_base else None
    return MegatronPhaseOptimizer(ddps, optimizer, kind, phase, model.work_time, clip, model.parallel)


def _qk_clip(model: Model, optimizer: MegatronOptimizer, threshold: float) -> QKClip:
    """Build the QK-clip. It scales the fp32 weights after the update, before megatron-core copies and gathers them."""
    clip = QKClip(model.attentions, threshold, model.parallel.groups.dp_cp)
    for inner in inner_optimizers(optimizer):
        main_weight = partial(_main_weight, inner)
        inner.optimizer.register_step_post_hook(lambda *_, of=main_weight: clip.scale(of))
    return clip


def _plug_in(optimizer: MegatronOptimizer, kind: OptimizerKind, train: TrainConfig) -> None:
    """Replace megatron-core's AdamW, the only optimizer that it shards, with the config's optimizer.

    The optimizer's state is created before the first step, so that a checkpoint can fill it. On GPUs the optimizer
    uses torch's fused kernels if there are any.
    """
    for inner in inner_optimizers(optimizer):
        made = inner.optimizer
        groups, shards = made.param_groups, [group["params"] for group in made.param_groups]
        for group in groups:
            for setting in made.defaults.keys() - {"lr", "weight_decay"}:
                group.pop(setting, None)
            group["params"] = [torch.empty(0)]  # torch takes leaf tensors only, and shards are views
        inner.optimizer = kind.build(groups, train, torch.cuda.is_available())
        for group, params in zip(inner.optimizer.param_groups, shards, strict=True):
            group["params"] = params
            for parameter in params:
                inner.optimizer.state[parameter].update(kind.new_state(parameter.data, "matrices" in group))


def _describe_matrices(inner: Any, ddps: list[PhaseDataParallel], parallel: Parallel) -> None:
    """Set `matrices` of the groups that are updated as matrices. Collective."""
    data_group = inner.data_parallel_group if isinstance(inner, DistributedOptimizer) else None
    parameters: list[Any] = [each for ddp in ddps for each in ddp.parameters() if each.requires_grad]
    trained = [parameter for parameter in parameters if hasattr(parameter, "matrix_rows")]
    mains = [_main_weight(inner, parameter) for parameter in trained]
    own = [(start, 0 if main is None else main.numel()) for main, start in mains]
    parts = [own] if data_group is None else gathered(own, data_group)
    shards = {}
    for number, (parameter, (main, _)) in enumerate(zip(trained, mains, strict=True)):
        tensor_group = parallel.groups.expt_tp if is_of_expert(parameter) else parallel.groups.tp
        is_split = getattr(parameter, "tensor_model_parallel", False) and tensor_group.size() > 1
        shards[id(main)] = MatrixShard(
            number=number,
            shape=tuple(parameter.shape),
            rows=parameter.matrix_rows,
            parts=[of_rank[number] for of_rank in parts],
            tensor_group=tensor_group if is_split else None,
            tensor_dim=parameter.partition_dim - parameter.dim() if is_split else -2,
            dtype=parameter.dtype,
        )
    for group in inner.optimizer.param_groups:
        if "matrices" in group:
            own_shards = [shards[id(main)] for main in group["params"]]
            group["matrices"] = Matrices(own_shards, data_group, parallel.device)


def bucket_groups(ddp: PhaseDataParallel) -> list[Any]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def finalize_gradients(work_time: WorkTime, *args: Any, **kwargs: Any) -> None:
    """Run megatron-core's gradient reduction, which ends the rank's own work time. Collective."""
    work_time.end()
    with work_time.part("gradient_reduction"):
        megatron_finalize_model_grads(*args, **kwargs)


def _group_overrides(phase: PhaseConfig, kind: OptimizerKind) -> dict[ParamKey, ParamGroupOverride]:
    """Return overrides of megatron-core's parameter groups. Vectors have no weight decay. Gates and indexer have their
    own groups if they have a learning-rate multiplier. Matrices have their own groups if the optimizer updates them as
    matrices."""
    multipliers = lr_multipliers(phase)
    overrides = get_standard_config_overrides(OptimizerConfig(lr=phase.lr))
    for group, attribute in (("gates", "gsa_gate"), ("indexer", "gsa_indexer")):
        if multipliers.get(group, 1.0) != 1.0:
            overrides[ParamKey(attr=attribute)] = ParamGroupOverride(lr_mult=multipliers[group])
    if kind.matrix_state is not None:
        overrides[ParamKey(attr="matrix_rows")] = ParamGroupOverride(matrices=True)
    return overrides
