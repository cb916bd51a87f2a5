"""One validation of a run: the loss on its validation sets, logged once a step; and samples of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gsa_train.run.state import Run
from gsa_train.services import Service
from gsa_train.validation.perplexity import evaluate
from gsa_train.validation.samples import generate_samples


def validate(run: Run, phase_name: str, stop_if_asked: Callable[[], None]) -> dict[str, Any]:
    """Score the validation sets, let services add theirs, and log, unless this step has been scored. Collective."""
    step, data = run.state.step, run.data
    if run.newest_validation is not None and run.newest_validation[0] == step:
        return run.newest_validation[1]
    eos_id = data.tokenizer.eos_id
    result = evaluate(run.model, data.validation_sets, eos_id, run.config, run.parallel, stop_if_asked)
    for service in run.listening:
        service.on_validate(step, phase_name, stop_if_asked)
    place = {"step": step, "phase": phase_name, "tokens": run.state.tokens}
    run.services.log.log({"event": "validation", **place, **result})
    run.newest_validation = (step, result)
    return result


@dataclass
class Samples(Service):
    """Goes on with `evaluate.prompts` at each validation."""

    run: Run

    def on_validate(self, step: int, phase: str, stop_if_asked: Callable[[], None]) -> None:
        run, data = self.run, self.run.data
        if data.prompts:
            samples = generate_samples(
                run.model, data.prompts, data.tokenizer, run.config, run.parallel, stop_if_asked
            )
            place = {"step": step, "phase": phase, "tokens": run.state.tokens}
            run.services.log.log_samples({"event": "samples", **place, "samples": samples})
