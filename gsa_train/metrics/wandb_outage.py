"""W&B's server away: how long a run waits for it, and what it does then.

Training needs no W&B. Each wait has a limit; what was not sent lies in the run folder, for `wandb sync`.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""For a server to answer anything at all, before W&B starts; at the end, for artifacts still on their way."""
INIT_SECONDS = 30.0
"""For W&B to start: a server that answers with errors is asked again so long."""
FINISH_SECONDS = 30.0
"""For the last records at the end."""
RETRIES = 10_000
"""Of records while the server is away, at most a minute apart: a week. W&B's own number ends after two hours."""


def begin(init: Callable[[str], Run], mode: str, has_begun: bool, sync_command: Callable[[Run], str]) -> Run:
    """A W&B run in `mode`; an offline one where the server is away.

    Args:
        init: `wandb.init` with everything but the mode.
        has_begun: the training run has begun. It also goes on where the server refuses it, as with a key that is valid
            no more: it must not end at night by a restart.

    Raises:
        wandb.Error: the server refuses a new run.
    """
    import wandb

    if mode not in ("online", "shared"):
        return init(mode)
    url = wandb.setup().settings.base_url
    why = why_no_answer(url, ANSWER_SECONDS)
    if why is None:
        began = time.monotonic()
        try:
            return init(mode)
        except (wandb.Error, OSError) as error:
            refused = time.monotonic() - began < INIT_SECONDS
            if refused and not has_begun:
                raise
            why = " ".join(str(error).split())
            wandb.teardown()  # its service would say that the id is in use
    run = init("offline")
    logger.warning(
        "W&B at %s cannot be used: %s. The run goes on, this start's records are kept offline; to send them later: %s",
        url,
        why,
        sync_command(run),
    )
    return run


def why_no_answer(url: str, seconds: float) -> str | None:
    """None where a server answers, whatever it says. No credential is sent."""
    answers: list[str | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            answers.append(None)
        except (urllib.error.HTTPError, ValueError):  # an answer; no address, which W&B explains
            answers.append(None)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            # Another list of certificates than W&B's: it may well trust this server.
            answers.append(None if isinstance(reason, ssl.SSLError) else str(reason) or repr(reason))

    # In a thread: looking up a name has no limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer in {seconds:g} s"
