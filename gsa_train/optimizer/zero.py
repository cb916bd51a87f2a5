"""Implement `parallel.strategy: deepspeed`: DeepSpeed's ZeRO replaces megatron-core's gradient buffers and optimizer.

megatron-core still provides the model, the pipeline schedule, tensor parallelism and sequence parallelism. DeepSpeed
reduces the gradients over the data-parallel ranks and updates the weights. It shards the fp32 weights and moments, and
in stage 3 the model weights. This module reads internal lists of DeepSpeed 0.19.8 (`params_in_partition`,
`averaged_gradients`, ...), which other versions may change. For each stage, a test therefore compares every step of a
sharded run with a single-rank run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Without the first variable DeepSpeed guesses with a warning. It requires the second even without torchrun.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("LOCAL_RANK", "0")

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

from gsa_train.config import Config, PhaseConfig
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.build import OptimizerKind, optimizer_kind
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer, StatePart
from gsa_train.optimizer.norms import counts_for_norms, sum_of_squares
from gsa_train.optimizer.zero_parts import Piece, groups_as_named, pieces, pieces_of_shards, remember
from gsa_train.phases import lr_multipliers

PERSISTENT_ELEMENTS = 100_000
"""ZeRO-3 keeps parameters with fewer elements whole. This is DeepSpeed's default."""

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# On CPUs DeepSpeed would compile its own collectives at the first start. Use gloo's collectives instead.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_zero_optimizer(model: Model, phase: PhaseConfig, config: Config) -> ZeroPhaseOptimizer:
    """Freeze parameters for the phase and wrap the model in DeepSpeed's engine. Collective."""
    parallel = model.parallel
    trained = [(name, each) for name, each in model.gpt.named_parameters() if each.requires_grad]
    kind = optimizer_kind(config.train)
    fused = parallel.device.type == "cuda" or config.parallel.offload_optimizer
    plugged = kind.build(_groups(trained, phase), config.train, fused)
    deepspeed.comm.init_distributed(
        deepspeed.get_accelerator().communication_backend_name(), dist_init_required=False
    )
    settings = _settings(config, parallel, model.mcore_config.bf16)
    mpu, take_off = groups_as_named(parallel), remember(model.module)
    engine = _Engine(
        args=None,
        model=model.module,
        optimizer=plugged,
        mpu=mpu,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
        dont_change_device=True,
    )
    if config.parallel.zero_stage == 3:
        _announce(model)
    return ZeroPhaseOptimizer(engine, model, kind, phase, dict(trained), take_off)


def _announce(model: Model) -> None:
    """Register indexer parameters that attention reads directly, so that ZeRO-3 gathers them.

    DeepSpeed detects reads of another module's parameters only in forward passes. With recomputation, the indexer's
    temperature is first read in the backward pass, where DeepSpeed would miss it.
    """
    for attention in model.attentions:
        if attention.indexer is not None:
            for name in ("score_bias", "weight_bias", "log_inverse_temperature"):
                parameter = getattr(attention.indexer, name)
                if parameter is not None:
                    deepspeed.zero.register_external_parameter(attention, parameter)


def _groups(trained: list[tuple[str, torch.nn.Parameter]], phase: PhaseConfig) -> list[dict[str, Any]]:
    """Build the parameter groups that megatron-core builds from `mcore._group_overrides`."""
    multipliers = lr_multipliers(phase)
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in trained:
        kind = next((kind for kind in ("indexer", "gate") if hasattr(parameter, f"gsa_{kind}")), "base")
        lr_mult = multipliers["gates" if kind == "gate" else kind]
        wd_mult = 0.0 if parameter.dim() == 1 or name.endswith(".bias") else 1.0
        groups.setdefault((lr_mult, wd_mult), []).append(parameter)
    return [{"params": group, "lr_mult": lr, "wd_mult": wd} for (lr, wd), group in groups.items()]


def _settings(config: Config, parallel: Parallel, bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's config, with its own scheduling, loss scaling and output disabled."""
    layout, train = config.parallel, config.train
    offload = {"device": "cpu", "pin_memory": parallel.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        # megatron-core's schedule scales the loss; `no_sync` tells where a step ends.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.grad_clip,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": layout.grad_reduce_dtype},
        "communication_data_type": layout.grad_reduce_dtype,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW; DeepSpeed's own would be compiled at the start
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": layout.zero_stage,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "overlap_comm": parallel.device.type == "cuda",
            "round_robin_gradients": False,
            **({"offload_optimizer": offload} if layout.offload_optimizer else {}),
        },
        "steps_per_print": None,
    }


class _Engine(DeepSpeedEngine):  # type: ignore[misc]
    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Always use ZeRO's optimizer. For stage 1 with bf16 weights and fp32 gradients, DeepSpeed would choose an
        optimizer with another state layout."""
        return ZERO_OPTIMIZATION


class _Callable(torch.nn.Module):
    """Wraps the engine for megatron-core's schedule, which would mistake the engine's `config` for the model's."""

    engine: DeepSpeedEngine

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__()
        self.module = engine.module
        self.__dict__["engine"] = engine  # not a submodule, because it holds this module's parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)


def _begin_graph(embedding: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


class ZeroPhaseOptimizer(PhaseOptimizer):
    state_copy = 0
    # ZeRO-2 and 3 reduce gradients at the end of a backward pass. ZeRO-3 also gathers weights for this pass.
    local_backward = False

    def __init__(
        self,
        engine: DeepSpeedEngine,
        model: Model,
        kind: OptimizerKind,
        phase: PhaseConfig,
        trained: dict[str, torch.nn.Parameter],
        take_off: Callable[[], None],
    ) -> None:
        self.kind, self.phase, self.modules = kind, phase, [_Callable(engine)]
        self._engine, self._zero, self._trained = engine, engine.optimizer, trained
        self._parallel = parallel = model.parallel
        self._model, self._take_off = model, take_off
        self._shards_weights = engine.zero_optimization_partition_weights()
        self.weights_stay = not self._shards_weights
        self._offloads = engine.zero_cpu_offload()
        self._flat: list[torch.Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if self._shards_weights
            else self._zero.single_partition_of_fp32_groups
        )
        self._pieces = list(pieces_of_shards(self._zero) if self._shards_weights else pieces(self._zero))
        self.state_group = parallel.groups.dp
        self._norm = torch.zeros(())
        self.updates, self.updaters = torch.zeros((), device=parallel.device), [self._zero.optimizer]
        for flat in self._flat:
            self._zero.optimizer.state[flat].update(kind.new_state(flat.detach()))
        # DeepSpeed clips by its own fp32 norm, and skips an update whose norm is not finite. Replace its norm by ours,
        # or by NaN to skip the update.
        if self._shards_weights:
            self._zero._get_norm_groups = lambda: [self._norm]
        else:
            self._zero.scaled_global_norm = lambda norm_type=2: self._norm
        # In the indexer warm-up no tensor before the first indexer requires a gradient. Recomputed layers whose input
        # requires no gradient would skip their backward pass.
        self._embedding_hook = model.gpt.embedding.register_forward_hook(_begin_graph)
        config = model.mcore_config
        config.grad_scale_func = None
        config.no_sync_func = self._not_the_last
        config.finalize_model_grads_func = self._finalize

    # --- a step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.train()

    @contextmanager
    def _not_the_last(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        yield
        self._engine.set_gradient_accumulation_boundary(True)

    def reduce_gradients(self) -> None:
        raise AssertionError("ZeRO reduces gradients inside the schedule")

    def _finalize(self, *_: Any, **__: Any) -> None:
        """Reduce gradients of parameters replicated over tensor-parallel ranks, as megatron-core's finalize_model_grads
        does. ZeRO splits these parameters identically on every tensor-parallel rank, so gradient shards can be reduced
        directly."""
        self._model.work_time.end()
        tensor = self._parallel.groups.tp
        if tensor.size() == 1:
            return
        with self._model.work_time.part("gradient_reduction"):
            kept = {id(parameter): self._reduction(name) for name, parameter in self._trained.items()}
            pairs = list(self._gradients())
            for reduction, divisor in (("average", tensor.size()), ("sum", 1)):
                grads = [grad for piece, grad in pairs if kept[id(piece.parameter)] == reduction]
                if not grads:
                    continue
                together = torch.cat(grads).to(self._parallel.device)
                dist.all_reduce(together, group=tensor)
                together /= divisor
                for grad, reduced in zip(grads, together.split([len(grad) for grad in grads]), strict=True):
                    grad.copy_(reduced)

    def _reduction(self, name: str) -> str | None:
        config, parameter = self._model.mcore_config, self._trained[name]
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            return "average"
        sees_some_tokens = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        sees_some_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        return "sum" if sees_some_tokens or sees_some_heads else None

    def _gradients(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield each piece with its gradient, reduced over the data-parallel ranks, as a flat view."""
        if self._offloads:
            if self._parallel.device.type == "cuda":
                torch.cuda.synchronize()  # DeepSpeed copies gradients to the host on other streams.
            for piece in self._pieces:
                grad = self._flat[piece.group].grad
                assert grad is not None
                yield piece, grad[piece.in_group]
            return
        groups = {
            group: [grad for grad in grads if not getattr(grad, "_zero_padding", False)]
            for group, grads in self._zero.averaged_gradients.items()
        }
        for piece in self._pieces:
            yield piece, groups[piece.group][piece.number].view(-1)[: piece.length]

    @torch.no_grad()
    def reduce_grad_norm(self, loss_share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grads = [grad for piece, grad in self._gradients() if counts_for_norms(piece.parameter)]
        squares = sum_of_squares(grads, self._flat[0].device).to(self._parallel.device)
        sums = torch.stack([squares, loss_share.double()])
        dist.all_reduce(sums)
        return sums[0].sqrt().float(), sums[1]

    def clipped_step(self, norm: torch.Tensor, max_norm: float, applied: torch.Tensor) -> None:
        assert max_norm == self._engine.gradient_clipping()
        device = self._flat[0].device  # of the gradients
        self._norm = torch.where(applied, norm, torch.nan).to(device)
        self._engine.step()  # the host waits for the verdict on the update
        self.updates += applied
        if self._offloads and not self._shards_weights:
            # DeepSpeed keeps the gradients of a skipped update, and would add the next step's gradients to them.
            self._zero.averaged_gradients = dict.fromkeys(self._zero.averaged_gradients)

    @torch.no_grad()
    def update_norm(self, applied: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._flat[0].device)
        for piece in self._pieces:
            if counts_for_norms(piece.parameter):
                flat, state = self._flat[piece.group], self._zero.optimizer.state[self._flat[piece.group]]
                index = self._zero.sub_group_to_group_id[piece.group] if self._shards_weights else piece.group
                group = self._zero.optimizer.param_groups[index]
                own = {**state, **{name: state[name][piece.in_group] for name in self.kind.state}}
                weights = [flat.detach()[piece.in_group]]
                total += self.kind.squared_change([own], group, weights)
        squares = torch.where(applied, total.to(self._parallel.device), 0)
        dist.all_reduce(squares)
        return squares.sqrt().float()

    @torch.no_grad()
    def close(self, model: Model) -> None:
        engine = self._engine
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        self._embedding_hook.remove()
        if self._shards_weights:
            self._zero.empty_partition_cache()
            parameters: list[Any] = list(model.module.parameters())
            parameters[0].all_gather(param_list=parameters)
        engine.destroy()
        self._take_off()

    # --- a checkpoint ------------------------------------------------------------------------------------

    @contextmanager
    def whole_weights(self, changes: bool) -> Iterator[None]:
        if not self._shards_weights:
            yield
            return
        # After validation, all-gathers for a backward pass that never runs are still in progress. DeepSpeed would
        # treat their weights as complete.
        self._zero.empty_partition_cache()
        parameters = list(self._engine.module.parameters())
        # modifier_rank is the rank in the data-parallel group
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if changes else None):
            yield

    @torch.no_grad()
    def state_parts(self) -> Iterator[StatePart]:
        for piece in self._pieces:
            if piece.length > 0:
                flat = self._flat[piece.group]
                state = self._zero.optimizer.state[flat]
                tensors = {name: state[name][piece.in_group] for name in self.kind.state}
                if piece.parameter.dtype != torch.float32:
                    tensors[MAIN_WEIGHT] = flat.detach()[piece.in_group]
                yield StatePart(piece.parameter, piece.start, piece.length, tensors)

    def start_from_weights(self) -> None:
        self._zero.refresh_fp32_params()
