"""Run by four ranks: train a step in each of several layouts, each from the checkpoint of the one before.

Prints, on rank 0, a JSON line for each step taken: layout, step, loss, gradient norm.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gsa_train.batches import to_micro_batch
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config, ParallelConfig, PhaseConfig
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.monitor.spikes import SpikeDetector
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.parallel import Parallel, init_parallel, leave_layout, shutdown_parallel
from gsa_train.step import Training, train_step
from helpers.checkpoints import run_state
from helpers.single_rank import CONFIG, EOS, random_blocks

PHASE = PhaseConfig(name="sparse", steps=20, attention="sparse", train="all", lr=3e-3, min_lr=3e-3)
LR = 3e-3


def config_of(tensor: int, pipeline: int, distributed_optimizer: bool) -> Config:
    """Every query selects all that it sees, so no rounding can change a selection."""
    return dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, num_layers=4),
        gsa=dataclasses.replace(CONFIG.gsa, k_min=16, k_base=16, k_max=16, indexer_heads=4),
        train=dataclasses.replace(CONFIG.train, micro_batch_size=1, grad_clip=1.0),
        parallel=ParallelConfig(
            tensor=tensor, pipeline=pipeline, distributed_optimizer=distributed_optimizer
        ),
        phases=[PHASE],
    )


def take_step(
    model: Model, optimizer: PhaseOptimizer, config: Config, parallel: Parallel, step: int
) -> tuple[float, float]:
    """Loss and gradient norm of the step after `step`."""
    share = config.train.global_batch_size // parallel.data_size
    blocks = random_blocks(config, seed=step)[parallel.data_rank * share : (parallel.data_rank + 1) * share]
    batches = [to_micro_batch(part, EOS, False) for part in blocks.split(config.train.micro_batch_size)]
    detector = SpikeDetector(config.monitor, parallel.device)
    result = train_step(Training(model, optimizer, config, parallel, detector), batches, LR, step)
    loss = result.loss_sum.double()
    dist.all_reduce(loss)
    return loss.item() / result.loss_tokens.item(), result.grad_norm.item()


def run_layout(layout: tuple[int, int, bool], folder: Path, step: int, steps: int, saves: bool) -> None:
    """From step `step` (from its checkpoint, unless it is 0) over `steps`; saved after the first, while the
    second is already taken."""
    config = config_of(*layout)
    parallel = init_parallel(config.parallel, seed=1)
    model = build_model(config, parallel)
    optimizer = build_optimizer(model, PHASE, config)
    saver = CheckpointSaver(folder, CheckpointConfig(), parallel)
    if step:
        load_checkpoint(folder / f"step_{step:08d}", model, optimizer, parallel, with_optimizer=True)
    for number in range(steps):
        loss, grad_norm = take_step(model, optimizer, config, parallel, step + number)
        if parallel.is_main:
            record = {"layout": layout, "step": step + number + 1, "loss": loss, "grad_norm": grad_norm}
            print("RECORD", json.dumps(record), flush=True)
        if saves and number == 0:
            state = run_state(step + 1, config, parallel.layout)
            assert saver.begin(state, model, optimizer) == []
    if saves:
        (result,) = saver.ended(now=step + steps, wait=True)
        assert result.error is None, result.error
    saver.close()
    close_optimizer(model, optimizer)
    leave_layout()


def main() -> None:
    folder, layouts = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    run_layout(layouts[0], folder, step=0, steps=len(layouts) + 1, saves=False)
    for step, layout in enumerate(layouts):
        run_layout(layout, folder, step, steps=2, saves=True)
    shutdown_parallel()


if __name__ == "__main__":
    main()
