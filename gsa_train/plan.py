"""Plan the actions of a training step before it begins. The plan depends on the config and the step number, so a
resumed run repeats it. Only retries of failed saves may differ.
"""

from __future__ import annotations

from gsa_train.config import Config
from gsa_train.phases import PhaseRange
from gsa_train.services import StepPlan


def plan_step(
    step: int,
    phase_range: PhaseRange,
    config: Config,
    *,
    steps_before_start: int,
    save_is_due: bool,
) -> StepPlan:
    """Plan one step of a phase.

    Args:
        steps_before_start: steps completed before this start.
        save_is_due: `CheckpointSaver.is_due`: by checkpoint.every_steps, or because an earlier save failed.
    """
    skipped_steps = config.train.iterations_to_skip
    trains = step not in skipped_steps
    begins = step in (phase_range.start + 1, steps_before_start + 1)
    left_out_through = None
    if not trains and (begins or step - 1 not in skipped_steps):
        left_out_through = step
        while left_out_through < phase_range.end and left_out_through + 1 in skipped_steps:
            left_out_through += 1
    # The first and last step of a phase are also logged, so that a resumed run logs the same steps.
    in_turn = step % config.logging.every_steps == 0
    every, tasks_every = config.evaluate.every_steps, config.evaluate.tasks_every_steps
    return StepPlan(
        step=step,
        trains=trains,
        left_out_through=left_out_through,
        logs=trains and (in_turn or step in (phase_range.start + 1, phase_range.end)),
        validates=every > 0 and step % every == 0,
        scores_tasks=bool(config.evaluate.tasks) and tasks_every > 0 and step % tasks_every == 0,
        saves=save_is_due,
        ends_phase=step == phase_range.end,
        ends_run=step == sum(phase.steps for phase in config.phases),
    )
