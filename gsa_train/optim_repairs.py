"""What must be repaired in megatron-core 0.16.1's optimizers before they are saved or loaded."""

from __future__ import annotations

import types
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """megatron-core's optimizers inside this one, or itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Those of megatron-core's that have parameters on this rank."""
    return [o for o in chained(optimizer) if isinstance(o.optimizer, torch.optim.AdamW)]


def repair_for_checkpoints(optimizer: MegatronOptimizer) -> None:
    """Make what megatron-core 0.16.1 saves and loads right, with torch's AdamW (without Transformer Engine or Apex),
    and on GPUs let that update in one kernel.

    1. Saving or loading an optimizer that has not stepped fails on its missing step counts: create the state.
    2. So it does on a rank whose shard holds no parameter, but padding: give it an empty one, which counts steps.
    3. DistributedOptimizer then writes to a state named "step" that it never saved: leave the counts alone.
    4. It packs its buckets for a save without their padding, and looks parameters up where they are with it: from the
       second bucket on it saved shifted states. Buckets keep their padding.
    The fifth fault needs `unshare_step_counts` after loading.
    """
    for inner in inner_optimizers(optimizer):
        _use_one_kernel(inner.optimizer)
        if not any(group["params"] for group in inner.optimizer.param_groups):
            nothing = torch.zeros(0, device=torch.cuda.current_device())
            nothing.grad = torch.zeros_like(nothing)
            inner.optimizer.param_groups[0]["params"].append(nothing)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                inner.optimizer.state[parameter].update(
                    step=torch.zeros((), device=parameter.device),
                    exp_avg=torch.zeros_like(parameter.data),
                    exp_avg_sq=torch.zeros_like(parameter.data),
                )
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = types.MethodType(_set_states, inner)
            for buffer in inner.buffers:
                buffer.numel_unpadded = buffer.numel
                for bucket in buffer.buckets:
                    bucket.numel_unpadded = bucket.grad_data.numel()


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
