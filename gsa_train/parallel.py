"""The parallel layout: process groups from megatron-core as one frozen object."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# megatron-core warns at import that Transformer Engine and Apex are missing; we use neither.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (are|is) not installed.*")

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

from gsa_train.config import ParallelConfig  # noqa: E402


@dataclass(frozen=True)
class Parallel:
    """Where this process stands. Ranks are ordered tensor fastest, then data, then pipeline (megatron-core)."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    device: torch.device
    groups: ProcessGroupCollection
    """megatron-core's groups: `tp`, `pp`, `dp`, `dp_cp`, `mp` (tensor x pipeline), ..."""
    model_source_rank: int
    """Global rank of the first rank of this model-parallel group: it reads the data for the others."""

    @property
    def is_main(self) -> bool:
        """The one process that prints and writes metrics."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def reads_data(self) -> bool:
        """The first rank of each model-parallel group reads the text of its data-parallel replica."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    def describe(self) -> str:
        return (
            f"{self.world_size} ranks on {self.device.type} = tensor {self.tensor_size} x pipeline "
            f"{self.pipeline_size} x data {self.data_size}"
        )


def world_size_from_environment() -> int:
    """Number of ranks that torchrun or Slurm announced; 1 for a plain `python` start."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_parallel(config: ParallelConfig, seed: int) -> Parallel:
    """Join the process group of this job and cut it into megatron-core's groups.

    Args:
        config: sizes, already checked against the world size.
        seed: seeds torch and megatron-core's random-number tracker, per tensor and pipeline rank.
    """
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        from gsa_train import cpu_backend

        cpu_backend.install()
        device = torch.device("cpu")
    _join_world(use_cuda, device, collective_timeout(config))
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        distributed_timeout_minutes=collective_timeout(config).total_seconds() / 60,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parallel = Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=groups.tp.rank(),
        tensor_size=groups.tp.size(),
        pipeline_rank=groups.pp.rank(),
        pipeline_size=groups.pp.size(),
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        device=device,
        groups=groups,
        model_source_rank=dist.get_process_group_ranks(groups.mp)[0],
    )
    assert parallel.tensor_size * parallel.pipeline_size * parallel.data_size == parallel.world_size
    return parallel


def collective_timeout(config: ParallelConfig) -> timedelta:
    """A little later than `Watch`, which says more."""
    return timedelta(minutes=config.timeout_minutes) * 1.25


def _join_world(use_cuda: bool, device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if use_cuda else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun (2.13) keeps its store over restarts, and in it the addresses of the ranks before.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(
            f"start_{os.environ['TORCHELASTIC_RESTART_COUNT']}",
            dist.TCPStore(address, port, is_master=False, timeout=timeout),
        )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device_id = device if use_cuda else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device if use_cuda else None)
    else:  # plain `python launch/pretrain.py`: one rank, no rendezvous to wait for
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def shutdown_parallel() -> None:
    """Leave the groups, so that a finished job ends without warnings or waiting peers."""
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
