"""Tests kills at random moments, with each start in another layout: every step sees an undisturbed run's text.

tests/unit/data/test_data_oracle.py has dozens of such cases with other ranks and without kills. This test compares
`data_checksum`, which identifies the sequences of a step's global batch and their positions in the run. A start repeats
the steps after its checkpoint, so steps that a kill undid are compared, too.
"""

import random
import time
from pathlib import Path

import pytest

from helpers.runs import Run, kill, start, train

STEPS = 48
"""More than all killed starts take together, 43."""
SAVE_AT_THE_END = "checkpoint.every_steps=1000"
OPTIONS = (
    "train.micro_batch_size=1",
    "model.num_layers=1",
    "data.num_lanes=24",  # enough that readers of the layouts below share none
    f"phases.1.steps={STEPS - 10}",
    "phases.1.min_lr=0",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=2",
    "evaluate.split_by_source=false",
    "evaluate.max_blocks=1",
)
LAYOUTS = {
    "one rank": (1, 1),
    "data 2": (2, 1),
    "data 4": (4, 1),
    "tensor 2": (2, 2),
    "tensor 2 x data 2": (4, 2),
}
"""Ranks, tensor-parallel size. A rank takes its share of the four sequences in one micro-batch."""
STARTS = [
    ("data 4", 1, 8),
    ("one rank", 3, 64),
    ("tensor 2 x data 2", 0, 1),
    ("data 2", 3, 1),
    ("tensor 2", 1, 64),
]
"""Layouts of the starts that are killed, with readers per data group and blocks that they read ahead."""

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def start_as(
    run_dir: Path, layout: str, workers: int, prefetch: int, *overrides: str, most_steps: int
) -> Run:
    """Start or resume. If this process is slow, the run's last rank waits after `most_steps` steps. Otherwise the run
    could end before it is killed."""
    ranks, tensor = LAYOUTS[layout]
    split = (f"parallel.tensor={tensor}", f"train.micro_batch_size={4 * tensor // ranks}")
    options = (*split, f"data.num_workers={workers}", f"data.prefetch_blocks={prefetch}")
    faults = {"held_after": [most_steps, ranks - 1]}
    return start(run_dir, *OPTIONS, *options, *overrides, ranks=ranks, faults=faults)


def test_every_step_sees_its_text_through_kills(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, *OPTIONS, SAVE_AT_THE_END, name="undisturbed").series("data_checksum")
    assert len(set(undisturbed)) == STEPS

    chance = random.Random(22)
    seen: list[int] = []  # steps of all killed starts
    saved = set()
    for layout, workers, prefetch in STARTS:
        steps, delay_seconds = chance.randint(4, 9), chance.uniform(0, 0.03)
        run = start_as(tmp_path, layout, workers, prefetch, most_steps=steps + 2)
        run.wait_until(lambda run=run, steps=steps: len(run.steps_printed()) >= steps)
        time.sleep(delay_seconds)
        kill(run)
        logged = run.series("step")
        assert logged == list(range(1, len(logged) + 1))
        assert run.series("data_checksum") == undisturbed[: len(logged)], (layout, workers, prefetch)
        seen += run.steps_printed()
        saved.add(run.latest)
    assert len(seen) - len(set(seen)) >= len(STARTS) / 2  # repeated steps
    assert len(saved) >= len(STARTS) / 2  # of most starts; a save may be later than the kill

    last = start_as(tmp_path, "data 2", 1, 8, SAVE_AT_THE_END, most_steps=STEPS)
    assert last.wait().series("data_checksum") == undisturbed
