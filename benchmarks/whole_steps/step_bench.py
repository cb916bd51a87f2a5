"""Runs a model's training steps on random tokens or text, and measures their cost, for benches of whole models."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.flops import flops_per_token, peak_flops_per_second
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.optimizer.micro_batch_graph import WARM_UP_STEPS, new_graph
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, train_step

NO_TOKEN = -1
"""End-of-document id that no random token equals, so that each sequence is one document."""


def random_batches(config: Config, parallel: Parallel) -> list[MicroBatch]:
    """Create this replica's micro-batches of one step, with the same tokens for every model and layout."""
    train = config.train
    generator = torch.Generator(parallel.device).manual_seed(0)
    shape = (train.global_batch_size, train.seq_len_tokens + 1)
    blocks = torch.randint(0, config.model.vocab_size, shape, generator=generator, device=parallel.device)
    mine = blocks.chunk(parallel.data_size)[parallel.data_rank]
    return [to_micro_batch(part, NO_TOKEN, True) for part in mine.split(train.micro_batch_size)]


class OurTrainee:
    """Runs a config's phase through the framework."""

    def __init__(
        self,
        config: Config,
        phase: PhaseConfig,
        parallel: Parallel,
        prepare: Callable[[Model], None] | None = None,
        lr: float | None = None,
    ) -> None:
        """
        Args:
            prepare: called with the model before its optimizer is built.
            lr: learning rate of all steps; None: the phase's rate.
        """
        self.config, self.parallel = config, parallel
        self.lr = phase.lr if lr is None else lr
        self.model: Model = build_model(config, parallel)
        if prepare is not None:
            prepare(self.model)
        self.optimizer: PhaseOptimizer = build_optimizer(self.model, phase, config)
        self.detector = SpikeDetector(config.monitor, parallel.device)
        self.graph = new_graph(self.optimizer, config)

    @property
    def warm_up_steps(self) -> int:
        """Return the number of first steps that differ from later ones, apart from compilation."""
        return 0 if self.graph is None else WARM_UP_STEPS + 1  # a step with measurements

    @property
    def graph_bytes(self) -> int:
        """Return the bytes that the CUDA graph reserves for intermediate tensors, which do not count as tensors."""
        return 0 if self.graph is None else self.graph.memory_bytes

    @property
    def phase(self) -> PhaseConfig:
        return self.optimizer.phase

    def step(
        self,
        batches: list[MicroBatch],
        measures: bool = False,
        hold_update: Callable[[], None] = lambda: None,
    ) -> None:
        parts = (self.model, self.optimizer, self.config, self.parallel, self.detector)
        training = Training(*parts, graph=self.graph, hold_update=hold_update)
        measures |= self.graph is not None and not self.graph.has_measured
        self.result = train_step(training, batches, self.lr, step=0, measures=measures)

    def loss(self) -> float:
        """Return the last step's loss per token. Collective. Waits for the device."""
        total = self.result.loss_sum.double()
        dist.all_reduce(total)
        return float(total / self.result.loss_tokens)

    def close(self) -> None:
        close_optimizer(self.model, self.optimizer)
        del self.model, self.optimizer, self.graph


def time_steps(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Return the seconds of successive steps. As in training, the host does not wait for a GPU between steps."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def speed(
    config: Config, phase: PhaseConfig, seconds: float, device: torch.device, devices: int = 1
) -> tuple[float, float]:
    """Return the tokens per second per device, and the MFU. The MFU is NaN on CPUs and unknown GPUs."""
    train = config.train
    rate = train.global_batch_size * train.seq_len_tokens / devices / seconds
    if device.type != "cuda":
        return rate, float("nan")
    precision = "fp32" if train.precision == "fp32" else "bf16"
    peak = peak_flops_per_second(torch.cuda.get_device_name(device), precision)
    flops = flops_per_token(config.model, config.gsa, config.moe, phase, train.seq_len_tokens)
    return rate, float("nan") if peak is None else rate * flops.total / peak


def release_memory(device: torch.device) -> int:
    """Free memory without references, and return the bytes that are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def over_ranks(values: Sequence[float], parallel: Parallel) -> list[list[float]]:
    """Return each rank's numbers, in the order of the ranks. Collective."""
    local = torch.tensor(list(values), dtype=torch.float64, device=parallel.device)
    every = [torch.empty_like(local) for _ in range(parallel.world_size)]
    dist.all_gather(every, local)
    return [each.tolist() for each in every]
