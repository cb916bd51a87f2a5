"""W&B's server away: how long a run waits for it, and what it does then.

Training needs no W&B. Each wait has a limit; what was not sent lies in the run folder, for `wandb sync`. A start whose
records the server has is marked as `wandb sync` marks it, so that one command sends all others, and these only.
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
"""For a server to answer anything at all, before W&B starts; at the end, for artifacts still on their way."""
INIT_SECONDS = 30.0
"""For W&B to start: a server that answers with errors is asked again so long."""
FINISH_SECONDS = 30.0
"""For the last records at the end."""
RETRIES = 10_000
"""Of records while the server is away, at most a minute apart: a week. W&B's own number ends after two hours."""
REFUSED_RECORDS = "filestream: fatal error"
"""In W&B's own log, where the server has refused records, as with a revoked key: W&B then sends no more, and its
`finish` raises nothing."""
SERVICE, SERVICE_END_SECONDS = "wandb-core", 5.0
"""W&B's process, a child of this one, and how long it may take to end."""
MARK = ".wandb.synced"
"""What `wandb sync` puts beside the records that it has sent, which it passes over from then on."""


def begin(init: Callable[[str], Run], mode: str, has_begun: bool, run_dir: Path) -> Run:
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
            run = init(mode)
            warn_of_unsent(run_dir, run.id, but=Path(run.settings.sync_dir))
            return run
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
        sync_command(run_dir, run.id),
    )
    return run


def sync_command(run_dir: Path, run_id: str) -> str:
    """Returns the command that sends every start that W&B may lack, one by one: `wandb sync` sends nothing after a
    start that was killed, whose last record is incomplete."""
    return _sync_each(f"{run_dir}/wandb/*run-*-{run_id}*")


def _sync_each(folders: str) -> str:
    return f'for start in {folders}; do wandb sync --include-online "$start"; done'


def finish(run: Run, exit_code: int) -> str | None:
    """End a run; None where W&B has all its records or the run is offline, else why it may lack some."""
    import wandb

    late = f"has not taken the last records in {FINISH_SECONDS:g} s"
    try:
        if not _finishes(run, exit_code, FINISH_SECONDS + ANSWER_SECONDS):
            return late
    except TimeoutError:
        return late
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
    """Whether `run.finish` comes back in time. W&B's own limit is not always kept: where the server hangs, its service
    may answer no more. Then the service is ended, and with it all that waits for it."""
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
        wandb.teardown()  # else at the end of this process, with a traceback
    return False


def warn_of_unsent(run_dir: Path, run_id: str, but: Path) -> None:
    """Name the starts of this run, apart from `but`, whose records W&B may not have: one was killed before it had sent
    them, or the server was away."""
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
    """The second of a start, from W&B's name of its folder; for starts within one second, when their records ended."""
    second = folder.name.removeprefix("offline-").removeprefix("run-").split("-")[0]
    return second, max(each.stat().st_mtime_ns for each in folder.glob("*.wandb"))


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
