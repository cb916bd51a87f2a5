"""Describe the parallel layout: one frozen object holds megatron-core's process groups."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from gsa_train.config import ParallelConfig


class DeviceError(ValueError):
    """A field asks for a device or precision that this machine lacks. The message names value and remedy."""


class RendezvousError(RuntimeError):
    """The ranks of this job cannot meet. The message has address and remedy."""


@dataclass(frozen=True)
class Parallel:
    """Describes this process's place in the layout.

    Ranks are ordered as in megatron-core: the tensor rank changes fastest, then the context, data and pipeline ranks.
    For experts, the ranks of a pipeline stage have another order: the expert-tensor rank changes fastest, then the
    expert rank, then the index of the expert's replica.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    expert_rank: int
    expert_size: int
    expert_tensor_rank: int
    expert_tensor_size: int
    device: torch.device
    groups: ProcessGroupCollection
    """megatron-core's groups: `tp`, `cp`, `pp`, `dp`, `dp_cp`, `mp` (tensor x pipeline), `ep`, `expt_tp`, ..."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def reads_data(self) -> bool:
        """Whether this is the first rank of its data-parallel replica, which reads the text for the others."""
        return self.tensor_rank == self.context_rank == self.pipeline_rank == 0

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Returns tensor, pipeline, data and context sizes, which a checkpoint stores."""
        return self.tensor_size, self.pipeline_size, self.data_size, self.context_size

    def describe(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        experts = ""
        if self.expert_size * self.expert_tensor_size > 1:
            experts = f"; of experts expert {self.expert_size} x tensor {self.expert_tensor_size}"
        return (
            f"{ranks} on {self.device.type} = tensor {self.tensor_size} x context "
            f"{self.context_size} x pipeline {self.pipeline_size} x data {self.data_size}{experts}"
        )


def init_parallel(config: ParallelConfig, seed: int) -> Parallel:
    """Join this job's process group, if not yet done, and create megatron-core's groups.

    Args:
        config: sizes, already checked against the world size.
        seed: seeds torch and megatron-core's random-number tracker, per tensor and pipeline rank.
    """
    device = join_world(config)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        # megatron-core expects None, not 1, for a pipeline that is not interleaved.
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        num_distributed_optimizer_instances=config.optimizer_instances,
        distributed_timeout_minutes=collective_timeout(config).total_seconds() / 60,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    axes = {
        "tensor": groups.tp,
        "context": groups.cp,
        "pipeline": groups.pp,
        "data": groups.dp,
        "expert": groups.ep,
        "expert_tensor": groups.expt_tp,
    }
    place: dict[str, Any] = {f"{axis}_rank": group.rank() for axis, group in axes.items()}
    place |= {f"{axis}_size": group.size() for axis, group in axes.items()}
    parallel = Parallel(dist.get_rank(), dist.get_world_size(), device=device, groups=groups, **place)
    assert math.prod(parallel.layout) == parallel.world_size
    return parallel


def join_world(config: ParallelConfig) -> torch.device:
    """Join the process group of this job, unless this process is in it. Returns the rank's device."""
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        from gsa_kernels.miscompile_guard import refuse_wrong_sums  # imports Triton

        refuse_wrong_sums()
    if not dist.is_initialized():  # a process may change its layout
        _join_world(use_cuda, device, collective_timeout(config))
    return device


def collective_timeout(config: ParallelConfig) -> timedelta:
    """Returns a timeout slightly longer than the limit of `HangWatchdog`, whose report is more detailed."""
    return timedelta(minutes=config.timeout_minutes) * 1.25


def _join_world(use_cuda: bool, device: torch.device, timeout: timedelta) -> None:
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        from gsa_train.distributed import cpu_backend

        cpu_backend.install()
    join = partial(dist.init_process_group, "nccl" if use_cuda else "gloo", timeout=timeout)
    device_id = device if use_cuda else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun (2.13) keeps its store over restarts. The store then has the addresses of the previous ranks.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(
            f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}",
            dist.TCPStore(address, port, is_master=False, timeout=timeout),
        )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        join(store=store, rank=rank, world_size=world_size, device_id=device_id)
    elif "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise RendezvousError(
                f"RANK = {os.environ['RANK']} in the environment, but no {' and no '.join(missing)}: "
                "start with torchrun, or unset it"
            )
        try:
            join(device_id=device_id)
        except dist.DistNetworkError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            in_use = "EADDRINUSE" in str(error)
            raise RendezvousError(
                f"MASTER_ADDR:MASTER_PORT = {place}: "
                + (
                    "the port is in use"
                    if in_use
                    else f"the ranks cannot meet there ({str(error).splitlines()[0]})"
                )
                + "; set MASTER_PORT to a free port, the same on all ranks, or start with torchrun --standalone"
            ) from error
    else:  # Plain `python launch/pretrain.py` has one rank and no rendezvous to wait for.
        join(store=dist.HashStore(), rank=0, world_size=1)


def leave_layout() -> None:
    """Destroy all groups except the world; `init_parallel` may then create others."""
    mpu.destroy_model_parallel()
    # megatron-core only drops its references. On CPUs each group has threads, which would keep waking up.
    world = dist.distributed_c10d._world
    for group in [group for group in world.pg_map if group is not world.default_pg]:
        dist.destroy_process_group(group)


def shutdown_parallel() -> None:
    """Leave all groups, so that a finished job ends without warnings or waiting peers."""
    leave_layout()
    dist.destroy_process_group()
