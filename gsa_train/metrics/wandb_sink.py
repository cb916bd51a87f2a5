"""Log to Weights & Biases: one run over all restarts, tokens as the x axis, alerts, config and checkpoint artifacts.

No credential enters the data that W&B stores. W&B reads its API key from the environment or netrc. If an address in the
config has a user or password before an @, this part is removed.
"""

from __future__ import annotations

import logging
import netrc
import os
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from gsa_train.checkpoint.files import step_folder
from gsa_train.config import LoggingConfig
from gsa_train.metrics import wandb_outage
from gsa_train.metrics.alerts import INTERVAL_SECONDS, Alerts
from gsa_train.metrics.panels import BEST, tag_of

if TYPE_CHECKING:
    from wandb import Artifact, Run

logger = logging.getLogger(__name__)

WandbMode = Literal["online", "offline", "shared", "disabled"]
OLD_MODES = {"dryrun": "offline", "run": "online"}
"""W&B's old names of modes, which it still accepts."""
CONTINUES = "continues_wandb_run"
"""Field of the W&B config: the W&B run that this run was copied from."""


class WandbRefused(RuntimeError):
    """W&B did not start. The message has cause and remedy."""


class WandbSink:
    """Holds an open W&B run. If W&B's service fails, training continues without it, and the log says so."""

    def __init__(self, run: Run, run_dir: Path, alerts: Alerts) -> None:
        self.id: str = run.id
        self._run: Run | None = run
        self._run_dir, self._alerts = run_dir, alerts
        self._artifacts = ThreadPoolExecutor(1, "wandb-artifacts")
        self._on_their_way: list[Future[None]] = []

    def log(self, record: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Log one record, as in `metrics.jsonl` and by tags."""
        # W&B's own step only grows, but a restart repeats steps. The step is therefore logged as a metric.
        place = {key: record[key] for key in ("step", "tokens", "phase") if key in record}
        self._tell("log", {**scalars, **place})
        for alert in self._alerts.of(dict(record)):
            self._tell(
                "alert",
                title=alert.title,
                text=alert.text,
                level=alert.level,
                wait_duration=INTERVAL_SECONDS / 2,  # Alerts has the limit; W&B's would be a minute
            )
        if record.get("event") == "checkpoint":
            self._log_checkpoint(record)

    def place(self) -> tuple[str, ...]:
        if self._run is None:  # its service failed, and this was logged
            return ()
        if not self._run.offline:
            return (f"{self._run.url}",)
        return (f"kept offline; to send it: {wandb_outage.sync_command(self._run_dir, self.id)}",)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the config of this start, without credentials."""

        def fill(artifact: Artifact) -> None:
            with artifact.new_file("config.yaml") as file:
                file.write(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

        self._log_artifact("config", fill)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._tell("summary.update", summary)

    def close(self, exit_code: int) -> None:
        """Close the run. W&B marks the run as failed when `exit_code` is not 0."""
        if self._run is None:
            return
        late = wait(self._on_their_way, wandb_outage.ANSWER_SECONDS).not_done
        run, self._run = self._run, None
        self._artifacts.shutdown(wait=False, cancel_futures=True)
        if late:
            logger.warning("W&B lacks the last %d artifacts: its server does not answer", len(late))
        why = wandb_outage.finish(run, exit_code)
        if why:
            command = wandb_outage.sync_command(self._run_dir, self.id)
            logger.warning("W&B %s; to send them later: %s", why, command)

    def _log_checkpoint(self, record: Mapping[str, Any]) -> None:
        """Log a checkpoint by reference, without its content. Later checkpoints replace it on disk
        (`checkpoint.keep_last`)."""
        folder = step_folder(self._run_dir / "checkpoints", record["step"]).resolve()
        if not folder.exists():  # deleted before the loop learned of it
            return

        def fill(artifact: Artifact) -> None:
            artifact.add_reference(folder.as_uri(), name=folder.name, checksum=False)

        self._log_artifact("checkpoint", fill, step=record["step"], phase=record["phase"])

    def _log_artifact(self, kind: str, fill: Callable[[Artifact], None], **metadata: Any) -> None:
        """Log an artifact. If W&B's disk for artifacts (WANDB_DATA_DIR) fails, only the artifact is lost."""
        import wandb

        if self._run is None:
            return
        artifact = wandb.Artifact(f"{kind}-{self.id}", type=kind, metadata=metadata)
        try:
            fill(artifact)
        except (wandb.Error, OSError, ValueError) as error:
            logger.error("W&B gets no artifact %s: %s", artifact.name, error)
            return
        steps = [f"step-{metadata['step']}"] if "step" in metadata else []
        self._on_their_way = [each for each in self._on_their_way if not each.done()]
        self._on_their_way.append(self._artifacts.submit(self._send, artifact, ["latest", *steps]))

    def _send(self, artifact: Artifact, aliases: list[str]) -> None:
        """Send an artifact in a separate thread, because W&B waits for its server here."""
        run = self._run
        if run is None:
            return
        try:
            run.log_artifact(artifact, aliases=aliases)
        except Exception as error:  # noqa: BLE001  whatever it is, it costs the artifact and nothing else
            logger.error("W&B gets no artifact %s: %s", artifact.name, error)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the W&B run. If W&B's service has ended, log this, and send no more records until a restart.

        W&B's service is a separate process, and the signal that stops training also ends the service. Calls to the
        service then fail, but this method raises no error, because an error would prevent the last save. A restart
        reopens the W&B run.
        """
        import wandb

        if self._run is None:
            return
        try:
            attrgetter(method)(self._run)(*args, **kwargs)
        except (wandb.Error, OSError) as error:
            logger.error("W&B gets no more records in this start, its service failed: %s", error)
            self._run = None


def open_wandb(
    config: LoggingConfig,
    run_dir: Path,
    run_name: str,
    resolved_config: dict[str, Any],
    run_id: str | None,
    has_begun: bool = False,
    copied_from: str | None = None,
) -> WandbSink | None:
    """Open the W&B run. Returns None if W&B is disabled. The run is offline if the server does not answer.

    Args:
        run_id: the W&B run to continue; None: a new run. WANDB_RUN_ID is ignored. Otherwise, all training runs that one
            shell starts would join the same W&B run.
        has_begun: the training run has begun, so a server's refusal must not end it.
        copied_from: the W&B run of the other run whose checkpoint this run continues.

    Raises:
        WandbRefused: for a new run: no key, a wrong key, no access to the project. For any run: a wrong setting.
    """
    mode = wandb_mode(config.wandb, os.environ)
    if mode == "disabled":
        return None
    if "WANDB_MODE" in os.environ:  # W&B also reads the variable, and refuses an empty one in any case.
        os.environ["WANDB_MODE"] = mode
    import wandb

    shown_config = without_credentials(resolved_config)
    if copied_from is not None:
        shown_config[CONTINUES] = copied_from
    own_id = run_id or secrets.token_hex(4)

    def init(mode: str) -> Run:
        return wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            group=config.wandb_group or None,
            tags=list(config.wandb_tags),
            name=run_name,
            id=own_id,
            resume="allow",  # offline: a new folder with the same id, which `wandb sync` uploads in order
            dir=str(run_dir),
            config=shown_config,
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(
                silent=True,  # the header has the address; for the user's name W&B waits for its server
                console="off",  # the job's own log has the console output
                x_disable_meta=without_credentials(sys.argv) != sys.argv,  # W&B would upload the command line
                init_timeout=wandb_outage.INIT_SECONDS,
                finish_timeout=wandb_outage.FINISH_SECONDS,
                finish_timeout_raises=True,
                x_file_stream_retry_max=wandb_outage.RETRIES,
            ),
        )

    try:
        run = wandb_outage.begin(init, mode, has_begun, run_dir)
    except (wandb.Error, OSError, ValueError) as error:
        raise WandbRefused(
            f"logging.wandb = {config.wandb}: Weights & Biases did not start ({mode}): {str(error).rstrip('.')}. "
            f"To run without it, set logging.wandb=disabled; to keep its files for a later upload, "
            f"logging.wandb=offline."
        ) from error
    define_metrics(run)
    sink = WandbSink(run, run_dir, Alerts(config.straggler_ratio))
    sink.log_config(shown_config)
    return sink


def define_metrics(run: Run) -> None:
    """Make tokens the x axis of all metrics. Some metrics also show their best value in the table of runs."""
    run.define_metric("tokens")
    run.define_metric("step")
    run.define_metric("*", step_metric="tokens")
    for key, best in BEST.items():
        run.define_metric(tag_of(key), step_metric="tokens", summary=f"{best},last")


def wandb_mode(choice: str, environ: Mapping[str, str]) -> WandbMode:
    """Returns W&B's mode. `auto` takes the variable WANDB_MODE, else online when an API key is configured.

    Raises:
        WandbRefused: the variable is not a mode of W&B.
    """
    asked = environ.get("WANDB_MODE") if choice == "auto" else choice
    if not asked:
        return "online" if has_wandb_key(environ) else "offline"
    for mode in get_args(WandbMode):
        if OLD_MODES.get(asked, asked) == mode:
            return mode
    raise WandbRefused(
        f"WANDB_MODE = {asked} in the environment: not one of {', '.join(get_args(WandbMode))}; correct or unset it, "
        "or set logging.wandb"
    )


def has_wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether the environment, or netrc for W&B's host, has an API key."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError) as error:
        warnings.warn(f"W&B stays offline: cannot read its API key from {path}: {error}", stacklevel=2)
        return False


def without_credentials(value: Any) -> Any:
    """Returns the value without `user:password@` in addresses (data folders may be fsspec addresses)."""
    if isinstance(value, dict):
        return {key: without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_credentials(item) for item in value]
    return re.sub(r"://[^/\s@]+@", "://", value) if isinstance(value, str) else value
