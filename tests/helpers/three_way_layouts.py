"""Combines three kinds of parallelism in one world of eight ranks: `three_way_layouts.py FOLDER`. The ranks stay and
change their layout, as in many_layouts.py with four ranks. The results go to FOLDER/results.json."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.config import Config
from gsa_train.config.checks import check_config
from gsa_train.distributed.parallel import Parallel, init_parallel, leave_layout
from gsa_train.model.mcore.build import build_model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from helpers.checkpoints import write_checkpoint
from helpers.layout_cases import MORE_STEPS, PAIRS, SELECTED, TIED, Case
from helpers.many_layouts import finish, prepare_rank, take_step, train_all, train_case

WORLD = 8
TENSOR_PIPELINE_CONTEXT = "tensor x pipeline x context"
TENSOR_PIPELINE_DATA = "tensor x pipeline x data"
TENSOR_CONTEXT_DATA = "tensor x context x data"
LAYOUTS: dict[str, dict[str, Any]] = {
    TENSOR_PIPELINE_CONTEXT: {"tensor": 2, "pipeline": 2, "context": 2},
    TENSOR_PIPELINE_DATA: {"tensor": 2, "pipeline": 2},
    TENSOR_CONTEXT_DATA: {"tensor": 2, "context": 2},
}
MICRO_BATCHES = {name: {} if name == TENSOR_PIPELINE_DATA else PAIRS for name in LAYOUTS}
"""Two micro-batches per step for a pipeline, one otherwise."""
CASES = {name: Case(layout, SELECTED, MICRO_BATCHES[name], MORE_STEPS) for name, layout in LAYOUTS.items()}
CHAIN = ((TENSOR_PIPELINE_CONTEXT, TENSOR_PIPELINE_DATA), (TENSOR_CONTEXT_DATA, TENSOR_PIPELINE_CONTEXT))
"""Layouts that take the steps of each phase, one each; each continues from the previous layout's checkpoint."""
PHASE_STEPS = len(CHAIN[0])
CHAINED = Case({"pipeline": 2}, TIED, steps=(PHASE_STEPS, PHASE_STEPS))
"""The config that the chain trains; the pipeline sets the number of layers."""


def go_on(name: str, phase: int, step: int, folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Take step `step` + 1 of the chain in this layout, from the previous checkpoint, and save a checkpoint.

    Returns:
        The layout, and the step's numbers.
    """
    config = CHAINED.config(LAYOUTS[name], **MICRO_BATCHES[name])
    parallel = init_parallel(config.parallel, seed=1)
    assert check_config(config, parallel.world_size) == []
    model = build_model(config, parallel)
    optimizer = build_optimizer(model, config.phases[phase], config)
    if step:
        in_phase = step % PHASE_STEPS > 0
        load_checkpoint(folder / f"step_{step:08d}", model, optimizer, parallel, with_optimizer=in_phase)
    measures = (step + 1) % PHASE_STEPS == 0  # as in `train_case`
    record = take_step(step, model, optimizer, config, parallel, measures)
    if step < len(CHAIN) * PHASE_STEPS - 1:
        write_checkpoint(folder, step + 1, model, optimizer, config, parallel=parallel)
    close_optimizer(model, optimizer)
    leave_layout()
    return parallel.layout, record


def train(config: Config, parallel: Parallel, steps: Sequence[int]) -> tuple[Any, list[dict[str, Any]]]:
    return parallel.layout, train_case(config, parallel, steps, tasks=True)


def main(folder: Path) -> None:
    prepare_rank()
    trained = train_all(CASES, CASES, train)
    order = [(number, name) for number, names in enumerate(CHAIN) for name in names]
    chained = [go_on(name, number, step, folder) for step, (number, name) in enumerate(order)]
    finish(folder, {"trained": trained, "chained": chained})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
