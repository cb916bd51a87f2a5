"""Handle outages of W&B's server: how long a run waits, and what the run does then.

Training does not depend on W&B. Each wait for the server has a limit. Records that could not be sent stay in the run
folder, and `wandb sync` can send them later. Once the server has all records of one process, these records are marked
as sent, so that `wandb sync` skips them.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, wait
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Limit for any answer of the server before W&B starts, and for pending artifacts at the end."""
INIT_SECONDS = 30.0
"""Limit for W&B's start. A server that answers with errors is asked again until then."""
FINISH_SECONDS = 30.0
"""Limit for sending the last records at the end."""
RETRIES = 10_000
"""Number of retries to send records during an outage: enough for a week, at most a minute apart."""
REFUSED_RECORDS = "filestream: fatal error"
"""Line in W&B's log if the server has refused records, as with a revoked key. W&B then stops sending, and its `finish`
raises nothing."""
SERVICE, SERVICE_END_SECONDS = "wandb-core", 5.0
"""Name of W&B's process, a child of this process, and how long it may take to end."""
MARK = ".wandb.synced"
"""Suffix of the file by which `wandb sync` marks and skips sent records."""


def begin(init: Callable[[str], Run], mode: str, has_begun: bool, run_dir: Path) -> Run:
    """Start a W&B run in `mode`, or offline if the server does not answer.

    Args:
        init: `wandb.init` with all arguments except the mode.
        has_begun: whether the training run has begun. If so, training continues even if the server refuses the
            W&B run, for example because a key has expired.

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
            run = init(mode)
            warn_of_unsent(run_dir, run.id, but=Path(run.settings.sync_dir))
            return run
        except (wandb.Error, OSError) as error:
            refused = time.monotonic() - began < INIT_SECONDS
            if refused and not has_begun:
                raise
            why = " ".join(str(error).split())
            wandb.teardown()  # otherwise its service would report the id as in use
    run = init("offline")
    logger.warning(
        "W&B at %s cannot be used: %s. Records of this start are kept offline; to send them later: %s",
        url,
        why,
        sync_command(run_dir, run.id),
    )
    return run


def sync_command(run_dir: Path, run_id: str) -> str:
    """Returns the shell command that sends the records of all starts of the run to W&B. It calls `wandb sync` once per
    start, because a single call would stop at the incomplete last record of a killed start."""
    return _sync_each(f"{run_dir}/wandb/*run-*-{run_id}*")


def _sync_each(folders: str) -> str:
    return f'for start in {folders}; do wandb sync --include-online "$start"; done'


def finish(run: Run, exit_code: int) -> str | None:
    """End a run. Returns why W&B may lack some records, or None if W&B has all of them or the run is offline."""
    import wandb

    try:
        if not _finishes(run, exit_code, FINISH_SECONDS + ANSWER_SECONDS):
            raise TimeoutError
    except TimeoutError:
        return f"has not taken the last records in {FINISH_SECONDS:g} s"
    except (wandb.Error, OSError) as error:
        return f"may lack the last records, its service failed: {error}"
    if run.offline:
        return None
    try:
        with Path(run.settings.log_internal).open(errors="replace") as file:
            if any(REFUSED_RECORDS in line for line in file):
                return "has refused the last records"
        Path(run.settings.sync_file).with_suffix(MARK).touch()
    except OSError as error:
        logger.warning(
            "W&B's folder cannot be marked as sent, the next start may name it as unsent: %s", error
        )
    return None


def _finishes(run: Run, exit_code: int, seconds: float) -> bool:
    """Returns whether `run.finish` ends in time. If the server hangs, W&B's service may not answer, and `run.finish`
    exceeds its own limit. The service is then ended, so that no later call waits for it."""
    import wandb

    done: Future[None] = Future()

    def finish() -> None:
        try:
            done.set_result(run.finish(exit_code=exit_code))
        except BaseException as error:  # noqa: BLE001  the caller gets it
            done.set_exception(error)

    threading.Thread(target=finish, daemon=True).start()
    wait([done], seconds)
    if done.done():
        done.result()
        return True
    services = [each for each in psutil.Process().children() if each.name() == SERVICE]
    for service in services:
        service.terminate()
    _, alive = psutil.wait_procs(services, SERVICE_END_SECONDS)
    for service in alive:
        service.kill()
    wait([done], SERVICE_END_SECONDS)
    with contextlib.suppress(wandb.Error, OSError):
        wandb.teardown()  # otherwise W&B's exit handler does so, with a traceback
    return False


def warn_of_unsent(run_dir: Path, run_id: str, but: Path) -> None:
    """Warn about earlier starts whose records W&B may lack.

    W&B lacks records if the training process was killed before sending them, or if the server could not be reached.

    Args:
        but: the current start's folder, which is left out.
    """
    folders = {path.parent for path in run_dir.glob(f"wandb/*run-*-{run_id}*/*.wandb")}
    left = [each for each in folders if each != but and not any(each.glob(f"*{MARK}"))]
    left.sort(key=_when_written)
    if left:
        logger.warning(
            "W&B may lack records of earlier starts of this run (%d); to send them: %s",
            len(left),
            _sync_each(" ".join(map(str, left))),
        )


def _when_written(folder: Path) -> tuple[str, int]:
    """Returns a sort key: the second of a start, from its W&B folder's name, then the time of its last record."""
    second = folder.name.removeprefix("offline-").removeprefix("run-").split("-")[0]
    return second, max(each.stat().st_mtime_ns for each in folder.glob("*.wandb"))


def why_no_answer(url: str, seconds: float) -> str | None:
    """Returns the cause if a server does not answer, else None. No credential is sent."""
    answers: list[str | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            answers.append(None)
        except (urllib.error.HTTPError, ValueError):  # an answer, or an invalid address, which W&B explains
            answers.append(None)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            # W&B has its own list of certificates, and may trust this server.
            answers.append(None if isinstance(reason, ssl.SSLError) else str(reason) or repr(reason))

    # A thread is needed, because looking up a host name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer in {seconds:g} s"
