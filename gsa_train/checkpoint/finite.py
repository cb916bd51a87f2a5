"""Check that weights and optimizer state are finite, before a save and after a start has loaded them.

If the check before a save finds NaN or an infinite value, nothing is saved, and no older checkpoint is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from gsa_train.checkpoint.files import faults_in_a_line
from gsa_train.checkpoint.load import sharded_state, sharding_metadata
from gsa_train.checkpoint.optimizer_state import by_parameter
from gsa_train.distributed.objects import gathered
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import MAIN_WEIGHT, PhaseOptimizer


@torch.no_grad()
def not_finite(model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel) -> str | None:
    """Returns a line that names each rank's tensors with NaN or infinite values, or None. The result is equal on all
    ranks. Collective. Call it inside `PhaseOptimizer.whole_weights`."""
    held = [tensor for _, tensor in _weights(model)]
    held += [tensor for part in phase_optimizer.state_parts() for tensor in part.tensors.values()]
    finite = _all_finite(held).to(parallel.device, torch.int32)
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if finite.item():
        return None
    found = gathered(_named_faults(model, phase_optimizer, parallel))
    ranks = [f"rank {rank}: {faults_in_a_line(each, ', ')}" for rank, each in enumerate(found) if each]
    return f"values that are not finite ({faults_in_a_line(ranks)})"


def _weights(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights, including frozen ones, and the averages that are saved with them."""
    for chunk in model.chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield name, tensor


def _all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a 0-d bool. It tests maxima, which keep NaN and infinity, and cannot overflow as sums can."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            alike[tensor.device, tensor.dtype].append(tensor)
    finite = torch.ones((), dtype=torch.bool)
    for (device, _), group in alike.items():
        if device.type == "cuda":
            largest = list(torch._foreach_norm(group, torch.inf))  # a few kernels for all of them
        else:  # reads memory once; a norm on CPUs takes much longer
            largest = [extreme for tensor in group for extreme in tensor.aminmax()]
        finite = finite.to(device) & torch.stack(largest).isfinite().all()
    return finite


def _named_faults(model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel) -> list[str]:
    """Returns this rank's faulty tensors, by their names in checkpoints, which number layers over the whole model."""
    entries = by_parameter(sharded_state(model, None, sharding_metadata(parallel)))
    keys = {key: entry.key for key, entry in entries.items()}
    named = [(keys.get(id(tensor), name), tensor) for name, tensor in _weights(model)]
    for part in phase_optimizer.state_parts():
        for kind, tensor in part.tensors.items():
            of = "fp32 weight" if kind == MAIN_WEIGHT else kind
            named.append((f"{of} of {keys[id(part.parameter)]}", tensor))
    counted = [(name, int((~tensor.isfinite()).sum()), tensor.numel()) for name, tensor in named]
    return [f"{bad} of {size} in {name}" for name, bad, size in counted if bad]
