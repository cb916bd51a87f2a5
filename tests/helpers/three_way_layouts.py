"""`three_way_layouts.py FOLDER` trains layouts that combine three kinds of parallelism, on eight ranks. The same ranks
train one layout after another, as in many_layouts.py. The results go to FOLDER/results.json."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsa_train.config import Config
from gsa_train.distributed.parallel import Parallel
from helpers.layout_cases import MORE_STEPS, PAIRS, SELECTED, Case
from helpers.many_layouts import finish, prepare_rank, train_all, train_case

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


def train(config: Config, parallel: Parallel, steps: Sequence[int]) -> tuple[Any, list[dict[str, Any]]]:
    return parallel.layout, train_case(config, parallel, steps, tasks=True)


def main(folder: Path) -> None:
    prepare_rank()
    finish(folder, train_all(CASES, CASES, train))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
