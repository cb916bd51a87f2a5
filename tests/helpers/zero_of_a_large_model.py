"""DeepSpeed's ZeRO-3 as a large model meets it, for tiny models."""

from collections.abc import Callable
from typing import Any

import torch

from gsa_train.optimizer import zero

_settings = zero._settings


def settings_of_a_large_model(*args: Any) -> dict[str, Any]:
    """In place of `zero._settings`: every parameter is cut, released after each use and gathered again, and at the end
    of a forward pass some are on their way for a backward pass. DeepSpeed's defaults would keep a tiny model whole."""
    settings = _settings(*args)
    settings["zero_optimization"].update(
        stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=100
    )
    return settings


def leave_out_what_nobody_reads(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """DeepSpeed's ranges for a profiler of GPUs, around each of its functions, and the text of all parameters, which
    each start makes and does not print: together some 6% of what tiny models take."""
    from deepspeed.utils import nvtx  # here, where it runs

    set_attribute(nvtx, "enable_nvtx", False)
    set_attribute(torch.nn.Parameter, "__repr__", object.__repr__)
