"""Handle outages of W&B's server. Each wait has a limit, and unsent records stay in the run folder for `wandb sync`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

INIT_SECONDS = 30.0
"""Limit for W&B's start. A server that answers with errors is asked again until then."""
FINISH_SECONDS = 30.0
"""Limit for sending the last records at the end."""
RETRIES = 10_000
"""Retries of sending records during an outage, at most a minute apart, for a week. W&B's default ends after two
hours."""


def begin(init: Callable[[str], Run], mode: str, has_begun: bool, run_dir: Path) -> Run:
    """Start a W&B run in `mode`, or offline if the server does not answer.

    Args:
        init: `wandb.init` with everything but the mode.
        has_begun: whether the training run has begun. If so, it continues even if the server refuses the W&B run, as
            with an expired key.

    Raises:
        wandb.Error: the server refuses a new run.
    """
    import wandb

    if mode not in ("online", "shared"):
        return init(mode)
    began = time.monotonic()
    try:
        return init(mode)
    except (wandb.Error, OSError) as error:
        refused = time.monotonic() - began < INIT_SECONDS
        if refused and not has_begun:
            raise
        why = " ".join(str(error).split())
        wandb.teardown()  # otherwise its service would report the id as in use
    run = init("offline")
    logger.warning(
        "W&B cannot be used: %s. Records of this start are kept offline; to send them later: %s",
        why,
        sync_command(run_dir, run.id),
    )
    return run


def sync_command(run_dir: Path, run_id: str) -> str:
    """Returns the command that sends every start that W&B may lack. Starts are sent one by one: a killed start has an
    incomplete last record, and `wandb sync` sends nothing after it."""
    folders = f"{run_dir}/wandb/*run-*-{run_id}*"
    return f'for start in {folders}; do wandb sync --include-online "$start"; done'


def finish(run: Run, exit_code: int) -> str | None:
    """End a run. Returns why W&B may lack some records, or None if W&B has all or the run is offline."""
    import wandb

    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        return f"has not taken the last records in {FINISH_SECONDS:g} s"
    except (wandb.Error, OSError) as error:
        return f"may lack the last records, its service failed: {error}"
    return None
