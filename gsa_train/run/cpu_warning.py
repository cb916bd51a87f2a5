"""Says before the first step how long steps take where a model for GPUs is started on a machine without one."""

from __future__ import annotations

import os

from gsa_train.config import Config
from gsa_train.metrics.progress import duration
from gsa_train.model.flops import flops_per_token

FLOPS_PER_CORE = 30e9
"""Assumed, per second: matrix products in fp32 on a core with AVX2 reach about that. Other work comes on top."""
PATIENCE_SECONDS = 60.0
"""Longer steps than this on CPUs are hardly meant."""


def cpu_warning(config: Config, cores: int) -> str | None:
    """What to say of the run's steps on so many CPU cores; None where they are short."""
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    flops, name = max(
        (
            tokens
            * flops_per_token(config.model, config.gsa, config.moe, phase, config.train.seq_len_tokens).total,
            phase.name,
        )
        for phase in config.phases
    )
    seconds = flops / (FLOPS_PER_CORE * cores)
    if seconds <= PATIENCE_SECONDS:
        return None
    return (
        f"no CUDA device: on CPUs a step of phase {name} takes about {duration(seconds)} ({flops:.2g} floating-point "
        f"operations, at an assumed {FLOPS_PER_CORE * cores / 1e9:,.0f} GFLOP/s of {cores} "
        f"{'core' if cores == 1 else 'cores'}). Start it on a machine with GPUs, whose torch finds them "
        "(torch.cuda.is_available()), or try --config demo, which is made for CPUs"
    )


def cores_of_the_job(world_size: int, threads_per_rank: int) -> int:
    """CPU cores that compute: each rank's threads, but no more than its machine has. Machines count as alike."""
    local = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return world_size // local * min(local * threads_per_rank, len(os.sched_getaffinity(0)))
