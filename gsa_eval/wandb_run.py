"""Log an evaluation as a separate W&B run, next to the training run."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa_train.config import Config
from gsa_train.metrics import wandb_outage
from gsa_train.metrics.record_checks import is_number
from gsa_train.metrics.wandb_sink import wandb_mode, without_credentials

if TYPE_CHECKING:
    from wandb import Run

LINK = "training_run"
"""Field of the W&B config: the id of the training run's W&B run."""
TEXT_SCORES = ("perplexity", "bits_per_byte")
REQUEST_SCORES = ("accuracy", "length_normalised_accuracy", "bits_per_byte")

logger = logging.getLogger(__name__)


def log_to_wandb(
    results: dict[str, Any], folder: Path, config: Config, training_id: str | None, choice: str = ""
) -> str | None:
    """Log an evaluation as a new W&B run, and return the run's id. Return None if W&B is disabled, or if the scores
    cannot be logged. If logged scores cannot be uploaded, a warning gives the command to upload them.

    The new run has the project, entity, group and tags of the training's W&B run, which is not opened again. The field
    LINK of the new run's config holds the training run's id.

    Args:
        folder: folder of the results, which also gets W&B's files.
        choice: overrides `logging.wandb` unless empty.

    Raises:
        WandbRefused: WANDB_MODE is not a mode of W&B.
    """
    mode = wandb_mode(choice or config.logging.wandb, os.environ)
    if mode == "disabled":
        return None
    if "WANDB_MODE" in os.environ:  # as in wandb_sink.open_wandb
        os.environ["WANDB_MODE"] = mode
    import wandb

    scored = ("data", "requests", "tasks", "ruler")
    about = {key: value for key, value in results.items() if key not in scored}

    def init(mode: str) -> Run:
        return wandb.init(
            project=config.logging.wandb_project,
            entity=config.logging.wandb_entity or None,
            group=config.logging.wandb_group or config.run.name,
            tags=list(config.logging.wandb_tags),
            name=f"{config.run.name} {folder.name}",
            id=secrets.token_hex(4),  # regardless of WANDB_RUN_ID
            job_type="evaluation",
            dir=str(folder),
            config=without_credentials({**about, LINK: training_id}),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_meta=True,  # the command line is in the config, without credentials
                init_timeout=wandb_outage.INIT_SECONDS,
                finish_timeout=wandb_outage.FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )

    try:
        run = wandb_outage.begin(init, mode, has_begun=True, run_dir=folder)
        scores = scores_of(results)
        place = {"step": results["model"].get("step"), "tokens": results["model"].get("tokens_trained")}
        known = {key: value for key, value in place.items() if value is not None}
        rows = [[name, value] for name, value in scores.items()]
        table = wandb.Table(columns=["score", "value"], data=rows)
        run.log({**{f"eval/{name}": value for name, value in scores.items()}, **known, "eval/scores": table})
    except (wandb.Error, OSError) as error:
        logger.warning("W&B lacks this evaluation: %s; its results are in %s", error, folder)
        return None
    why = wandb_outage.finish(run, exit_code=0)
    if why:
        logger.warning("W&B %s; to send them later: %s", why, wandb_outage.sync_command(folder, run.id))
    elif run.offline:
        logger.info("W&B: kept offline; to send it: %s", wandb_outage.sync_command(folder, run.id))
    else:
        logger.info("W&B: %s", run.url)
    return str(run.id)


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """Returns the scores of a results.json by name: `<score>/<text, task or length>`."""
    found: dict[str, Any] = {}
    for section, scores in (("data", TEXT_SCORES), ("requests", REQUEST_SCORES)):
        for name, each in results.get(section, {}).items():
            found |= {f"{score}/{name}": each.get(score) for score in scores}
    for name, each in results.get("tasks", {}).get("results", {}).items():
        metrics = {key.partition(",")[0]: value for key, value in each.items()}
        found |= {f"{key}/{name}": value for key, value in metrics.items() if not key.endswith("_stderr")}
    means = results.get("ruler", {}).get("mean", {})
    found |= {f"ruler/{length}": mean for length, mean in means.items()}
    return {name: float(value) for name, value in found.items() if is_number(value)}
