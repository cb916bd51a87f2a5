"""Runs megatron-core with one rank in this process, on models small enough for unit tests."""

import dataclasses
import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gsa_kernels.packed_mask import unpack_mask
from gsa_train.config import Config, GSAConfig, ModelConfig, ParallelConfig, PhaseConfig, TrainConfig
from gsa_train.config.checks import check_config
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.distributed.parallel import Parallel, init_parallel
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.phases import enter_phase
from gsa_train.reliability.monitor.spikes import SpikeDetector, Verdict
from gsa_train.step import StepResult, Training, train_step

EOS = 0

WARM_UP = PhaseConfig(name="warm-up", steps=10, attention="dense", train="indexer", lr=1e-3, min_lr=1e-4)
SPARSE = PhaseConfig(name="sparse", steps=10, attention="sparse", train="all", lr=1e-2, min_lr=1e-3)
DENSE = PhaseConfig(name="dense", steps=10, attention="dense", train="base", lr=1e-2, min_lr=1e-3)

# init_std is large, so that attention, scores and budgets differ clearly between tokens.
CONFIG = Config(
    model=ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_hidden_size=24,
        vocab_size=32,
        init_std=0.4,
    ),
    gsa=GSAConfig(indexer_heads=3, indexer_dim=6, k_base=5, k_min=2, k_max=9),
    phases=[SPARSE],
    train=TrainConfig(seq_len_tokens=16, micro_batch_size=2, global_batch_size=4, grad_clip=0.0),
)


@cache
def single_rank() -> Parallel:
    """Join a world of one, once per process, because megatron-core keeps its groups in global variables."""
    assert "RANK" not in os.environ, "these tests make their own world of one rank"
    torch.set_num_threads(1)  # the tensors here are small
    return init_parallel(ParallelConfig(), seed=1)


def with_sections(
    config: Config, sections: dict[str, dict[str, Any]], phases: list[PhaseConfig] | None = None
) -> Config:
    """Return the config with other fields in the named sections, and with other phases if there are any."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()
    }
    return dataclasses.replace(config, **changed, **({"phases": phases} if phases else {}))


def tiny_config(phases: list[PhaseConfig] | None = None, **sections: dict[str, Any]) -> Config:
    """Return `CONFIG` with other fields in the named sections: `tiny_config(gsa={"k_base": 3})`."""
    config = with_sections(CONFIG, sections, phases)
    assert check_config(config, world_size=1) == []
    return config


def tiny_model(config: Config, variance_ema: float | None = None) -> Model:
    """Return a model with moving averages as if it had trained before."""
    model = build_model(config, single_rank())
    if variance_ema is not None:
        for attention in model.attentions:
            if attention.variance is not None:
                attention.variance.ema.fill_(variance_ema)
    return model


def random_blocks(config: Config, seed: int = 0) -> torch.Tensor:
    """Draw int32 [global batch, L + 1]; about every sixth token ends a document."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.train.global_batch_size, config.train.seq_len_tokens + 1)
    tokens = torch.randint(1, config.model.vocab_size, shape, generator=generator, dtype=torch.int32)
    ends = torch.rand(shape, generator=generator) < 1 / 6
    return tokens.masked_fill(ends, EOS)


def random_batches(config: Config, seed: int = 0, attend_across: bool = False) -> list[MicroBatch]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = random_blocks(config, seed).to(device).split(config.train.micro_batch_size)
    return [to_micro_batch(part, EOS, attend_across) for part in parts]


def token_losses(model: Model, batch: MicroBatch, **of_pass: Any) -> torch.Tensor:
    """Compute the cross-entropy of each label, [B, L], by a forward pass of the whole model.

    Args:
        of_pass: other fields of the `AttentionPass`.
    """
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    with model.runtime.during(dataclasses.replace(model.runtime.attention_pass, **of_pass)):
        return model.module(batch.tokens, positions, batch.document_ids, labels=batch.labels)


def take_step(
    model: Model,
    optimizer: PhaseOptimizer,
    batches: list[MicroBatch],
    config: Config,
    lr: float,
    step: int = 0,
    detector: SpikeDetector | None = None,
    measures: bool = False,
    hold_update: Callable[[], None] = lambda: None,
) -> StepResult:
    detector = detector or SpikeDetector(config.monitor, single_rank().device)
    training = Training(model, optimizer, config, single_rank(), detector, hold_update=hold_update)
    return train_step(training, batches, lr, step, measures=measures)


class LeavesOut(SpikeDetector):
    """Applies no update, as if each step were a spike."""

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor, grad_clip: float) -> Verdict:
        verdict = super().judge(loss, grad_norm, grad_clip)
        return verdict._replace(applied=torch.zeros_like(verdict.applied))


def step_gradients(
    model: Model,
    phase: PhaseConfig,
    batches: list[MicroBatch],
    config: Config,
    step: int = 0,
    measures: bool = False,
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Take a step with learning rate 0, and return the gradients of the phase's trained parameters."""
    optimizer = build_optimizer(model, phase, config)
    result = take_step(model, optimizer, batches, config, lr=0.0, step=step, measures=measures)
    gradients = {
        name: parameter.main_grad.clone()
        for name, parameter in model.gpt.named_parameters()
        if parameter.requires_grad
    }
    close_optimizer(model, optimizer)
    return result, gradients


def named_weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.gpt.named_parameters()}


def shared_mask(model: Model) -> torch.Tensor:
    """Return bool [B, L, L]: the selection of the last layer that ran."""
    packed_mask = model.runtime.shared_selection[0].packed_mask
    return unpack_mask(packed_mask, packed_mask.shape[1])


def read_stats(model: Model) -> dict[str, list[float]]:
    """Return the layers' statistics since the last reset, by name and layer; NaN for a layer without."""
    return as_numbers(model.runtime.stats.read())


def averages(model: Model) -> list[float]:
    """Return V̄ of each layer with an indexer."""
    return [tracker.ema.item() for tracker in model.variance_trackers]


def as_numbers(layers: dict[str, list[float | None]]) -> dict[str, list[float]]:
    return {name: [math.nan if each is None else each for each in row] for name, row in layers.items()}


def measure(config: Config, phase: PhaseConfig) -> dict[str, list[float]]:
    model = tiny_model(config, variance_ema=0.02)
    enter_phase(model, phase)
    for batch in random_batches(config):
        token_losses(model, batch, measuring=True)
    return read_stats(model)
