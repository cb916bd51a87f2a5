"""Detect silent data corruption: wrong results of a device, or weights that changed in memory.

Two checks run at the intervals of `monitor`:
- One check repeats the forward and backward pass of a step with the same weights, micro-batches and random numbers.
  On each rank, both passes must give the same loss and, before the reduction, the same gradients, bit for bit.
- The other check compares the weights of data-parallel replicas bit for bit.

Both checks are exact, because configs with nondeterministic kernels are refused (gsa_train.config.monitor).

The repeated pass misses an error that is the same in both passes. The comparison of replicas misses an error that is
the same in all replicas. Both miss an error in a shard of the distributed optimizer, which has no replica.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gsa_train.checkpoint.load import local_rng, set_local_rng
from gsa_train.config import MonitorConfig
from gsa_train.distributed.objects import gathered
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.expert_mark import is_of_expert
from gsa_train.optimizer.mcore import bucket_groups
from gsa_train.reliability.monitor.spikes import Verdict


class CorruptionFound(RuntimeError):
    """A result or a weight is wrong. The message names step, ranks and hosts."""


class Computed(NamedTuple):
    """Reduced results of a forward and backward pass over a step's micro-batches."""

    loss_sum: torch.Tensor
    """0-d: this rank's part, as in `StepResult`."""
    grad_norm: torch.Tensor
    loss: torch.Tensor
    """0-d: over all ranks, as the norm."""
    z_loss_sum: torch.Tensor | None = None
    """0-d: this rank's part of the z-loss in a logged step; None without a z-loss."""


class Place(NamedTuple):
    """Describes a rank. Ranks with an equal tuple hold replicas of these weights."""

    host: str
    of_dense_weights: tuple[int, int]
    of_expert_weights: tuple[int, int, int]


class CorruptionCheck:
    """Checks of one phase. Methods that compare are collective."""

    def __init__(
        self,
        config: MonitorConfig,
        model: Model,
        modules: Sequence[Any],
        parallel: Parallel,
        log: Callable[[dict[str, Any]], None],
        phase: str,
    ) -> None:
        """
        Args:
            modules: megatron-core's data-parallel wrappers; the check hooks into their gradient reductions.
        """
        self._config, self._model, self._parallel, self._log = config, model, parallel, log
        self._phase = phase
        self._gradient_bits = torch.zeros((), dtype=torch.int64, device=parallel.device)
        of_dense = parallel.tensor_rank, parallel.pipeline_rank
        of_experts = parallel.expert_tensor_rank, parallel.expert_rank, parallel.pipeline_rank
        self._places = gathered(Place(socket.gethostname(), of_dense, of_experts))
        self._compared_step: int | None = None
        self._noting = self._rechecked = False
        if config.recheck_every_steps or config.recheck_spikes:
            for group in (group for module in modules for group in bucket_groups(module)):
                group.start_grad_sync = partial(self._note_and_reduce, group, group.start_grad_sync)

    # --- a step, twice ---------------------------------------------------------------------------------------

    def compute(self, step: int, compute: Callable[[], Computed]) -> Computed:
        """Run a step's forward and backward pass. If the step is due for a check, repeat the pass.

        Args:
            step: counted from 1.
            compute: computes the step and leaves the reduced gradients in their buffers.

        Raises:
            CorruptionFound: the results differ, and `monitor.on_corruption` is stop.
        """
        every = self._config.recheck_every_steps
        self._rechecked = every > 0 and step % every == 0
        self._noting = self._rechecked or self._config.recheck_spikes
        if self._noting:
            self._before = local_rng(), self._model.runtime.stats.copy()
            self._gradient_bits.zero_()
        first = compute()
        return self.compute_again(step, first, compute) if self._rechecked else first

    def suspects(self, verdict: Verdict) -> bool:
        """Returns True if the verdict requires that the step is computed again. Synchronizes with the device."""
        if not self._config.recheck_spikes or self._rechecked:
            return False
        loss_spikes, norm_spikes, finite, _ = verdict.row[4:].tolist()
        return bool(loss_spikes or norm_spikes or not finite)

    def compute_again(self, step: int, first: Computed, compute: Callable[[], Computed]) -> Computed:
        """Repeat a step, and return the second result. Raises as `compute` does."""
        rng, stats = self._before
        seen = self._bits(first)
        set_local_rng(rng)
        self._model.runtime.stats.restore(stats)
        for attention in self._model.attentions:
            if attention.variance is not None:
                attention.variance.step_sum.zero_()
        for router in self._model.routers:
            router.counts.zero_()
        self._gradient_bits.zero_()
        second = compute()
        rows = self._gather(torch.cat([seen, self._bits(second)]))
        differing = {rank: _difference(row) for rank, row in enumerate(rows) if row[:2] != row[2:]}
        if differing:
            what = "the same step computed twice gave different numbers"
            if self._parallel.tensor_size * self._parallel.pipeline_size * self._parallel.context_size > 1:
                what += " (ranks of one replica pass an error on to each other)"
            self._found(step, "recheck", what, differing)
        return second

    def _note_and_reduce(self, group: Any, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # With a handle this reduction already runs, and the call does nothing.
        if self._noting and group.grad_reduce_handle is None:
            gradients = (bucket.grad_data for bucket in group.buckets)
            self._gradient_bits += bits_of(gradients, self._parallel.device)
        return reduce(*args, **kwargs)

    def _bits(self, computed: Computed) -> torch.Tensor:
        """Returns bit sums of this rank's loss and gradients, int64 [2]."""
        loss = computed.loss_sum.detach().float().reshape(1).view(torch.int32).long()
        return torch.cat([loss, self._gradient_bits.reshape(1)])

    # --- the weights of replicas -----------------------------------------------------------------------------

    def compare_replicas(self, step: int, saves: bool) -> None:
        """Compare the replicas' weights if the step is due for a check or will be saved.

        Call this between the forward pass, which gathers the weights, and the update. Before an unplanned save, call
        this inside `PhaseOptimizer.whole_weights`.

        Raises:
            CorruptionFound: replicas differ, and `monitor.on_corruption` is stop.
        """
        every = self._config.compare_replicas_every_steps
        if every == 0 or (step % every != 0 and not saves):
            return
        parameters = [p for chunk in self._model.chunks for p in chunk.parameters()]
        dense = [p.detach() for p in parameters if not is_of_expert(p)]
        dense += [a.variance.ema for a in self._model.attentions if a.variance is not None]
        dense += [held for router in self._model.routers for held in router.balance()]
        experts = [p.detach() for p in parameters if is_of_expert(p)]
        bits = torch.stack([bits_of(each, self._parallel.device) for each in (dense, experts)])
        replicas: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for rank, (place, (of_dense, of_experts)) in enumerate(
            zip(self._places, self._gather(bits), strict=True)
        ):
            replicas[place.of_dense_weights][rank] = of_dense
            replicas[place.of_expert_weights][rank] = of_experts
        differing = {rank: text for sums in replicas.values() for rank, text in odd_ones_out(sums).items()}
        if differing:
            since = "the start" if self._compared_step is None else f"step {self._compared_step}"
            what = f"replicas have different weights; what was saved after {since} may hold them"
            self._found(step, "weights", what, dict(sorted(differing.items())))
        self._compared_step = step

    # --- what is found ---------------------------------------------------------------------------------------

    def _gather(self, values: torch.Tensor) -> list[list[int]]:
        rows = [torch.empty_like(values) for _ in range(self._parallel.world_size)]
        dist.all_gather(rows, values)
        return [row.tolist() for row in rows]

    def _found(self, step: int, kind: str, what: str, differing: dict[int, str]) -> None:
        named = "; ".join(
            f"rank {rank} on {self._places[rank].host}: {detail}" for rank, detail in differing.items()
        )
        text = f"silent data corruption at step {step}: {what}. {named}"
        event = {"event": "corruption", "step": step, "phase": self._phase, "corruption": kind}
        self._log({**event, "ranks": list(differing), "reason": text, "action": self._config.on_corruption})
        if self._config.on_corruption == "stop":
            raise CorruptionFound(text)


def bits_of(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of the bit patterns of all elements, int64 0-d on `device`, or 0 without tensors. Copies
    nothing."""
    sums = [torch.zeros((), dtype=torch.int64, device=device)]
    for tensor in tensors:
        integers = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
        sums.append(tensor.view(integers).sum(dtype=torch.int64))
    return torch.stack(sums).sum()


def odd_ones_out(sums: dict[int, int]) -> dict[int, str]:
    """Returns a dict from each suspect rank to a text with its checksum, empty if all checksums are equal. A
    checksum that more than half of the replicas have is right. Without a majority all ranks are suspect."""
    (most, count), *others = Counter(sums.values()).most_common()
    if not others:
        return {}
    if 2 * count <= len(sums):
        return {rank: f"weights {value:#x}, no majority" for rank, value in sums.items()}
    return {
        rank: f"weights {value:#x}, {count} others {most:#x}" for rank, value in sums.items() if value != most
    }


def _difference(row: list[int]) -> str:
    first_loss, first_gradients, second_loss, second_gradients = row
    names = ["loss"] if first_loss != second_loss else []
    names += ["gradients"] if first_gradients != second_gradients else []
    return " and ".join(names)


def needs_check(config: MonitorConfig) -> bool:
    return config.recheck_spikes or config.recheck_every_steps > 0 or config.compare_replicas_every_steps > 0
