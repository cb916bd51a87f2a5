"""Makes DeepSpeed's ZeRO-3 treat tiny models like a large model."""

from collections.abc import Callable
from typing import Any

import torch

from gsa_train.optimizer import zero

_settings = zero._settings


def settings_of_a_large_model(*args: Any) -> dict[str, Any]:
    """Replace `zero._settings`, so that DeepSpeed treats a tiny model like a large one: it shards every parameter, and
    releases a gathered parameter after each use. With its default settings it would not shard a tiny model."""
    settings = _settings(*args)
    settings["zero_optimization"].update(
        stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=100
    )
    return settings


def leave_out_what_nobody_reads(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Skip the GPU profiler's ranges around functions, and an unused description of all parameters, to save time."""
    from deepspeed.utils import nvtx  # imported here, where it runs

    set_attribute(nvtx, "enable_nvtx", False)
    set_attribute(torch.nn.Parameter, "__repr__", object.__repr__)
