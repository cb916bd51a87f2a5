"""End a complete run with validation, n-gram baselines and summary.json, or end a stopped run with its report."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from gsa_data.best_fit import packing_shares
from gsa_data.faults import printable
from gsa_data.source_weights import tokens_by_source
from gsa_data.stream import StateMismatch, whole_epochs
from gsa_train.config import PhaseConfig
from gsa_train.distributed.objects import from_main
from gsa_train.distributed.parallel import shutdown_parallel
from gsa_train.files import write_atomically
from gsa_train.metrics.goodput.account import COMPLETE, INTERRUPTED
from gsa_train.metrics.goodput.account import STOPPED as GOODPUT_STOPPED
from gsa_train.process import exit_codes
from gsa_train.reliability.hang_watchdog import HangWatchdog
from gsa_train.reliability.monitor.corruption import CorruptionFound
from gsa_train.reliability.monitor.monitor import MonitorStop, NotFinite
from gsa_train.reliability.stop_signals import Stopped, reason_in_words
from gsa_train.run.folder import STOPPED
from gsa_train.run.saves import newest_save
from gsa_train.run.state import Run
from gsa_train.run.validate import validate, validate_tasks
from gsa_train.run_folder.lock import RunFolderError
from gsa_train.run_folder.paths import run_dir
from gsa_train.run_folder.spike_stop import note_stop
from gsa_train.validation.perplexity import ngram_perplexities, scores_of


def finish(run: Run, last_phase: PhaseConfig) -> None:
    """Validate, then write and print summary.json. Collective.

    Raises:
        Stopped: a stop was requested during the validation; the next start runs the validation again.
        NotFinite: the validation loss is not finite.
        RunFolderError: summary.json cannot be written. Raised on all ranks, after they left the process group.
    """
    step, watchdog = run.state.step, run.services.watchdog

    def stop_if_asked() -> None:  # the last step is saved already
        watchdog.heartbeat(step, "validating")
        reason = run.services.stop_vote.ask()
        if reason:
            raise Stopped(reason, step)

    goodput = run.services.goodput
    with goodput.clock.during("validation"):
        validation = validate(run, last_phase.name, stop_if_asked)
    loss = validation["validation_loss"]
    if not math.isfinite(loss):
        raise NotFinite(
            f"step {step}, the last one: the loss of the validation is {loss}. Go on from an earlier checkpoint "
            "(--resume-from DIR), with a lower learning rate",
            step,
        )
    if run.data.tasks:
        with goodput.clock.during("tasks"):
            validate_tasks(run, last_phase.name, stop_if_asked)
    goodput.end(COMPLETE)
    watchdog.heartbeat(step, "ending")
    text = run.data.batches.state()
    log = run.services.log
    fault = None
    if log.sinks is not None and log.console is not None:
        summary = summary_of(run, validation, text)
        log.console.close()
        try:
            log.sinks.finish(summary)
        except OSError as error:
            fault = (
                f"the run is trained and saved, but its summary.json cannot be written: {error}; make room on its "
                "disk, or mend what is said, and start the same command again: it writes the end again, and trains "
                "no step"
            )
        for name, value in summary.items():
            parts = value if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                label = printable(f"{name} {part}".strip())
                log.message(f"{label:>20}  {'--' if number is None else number}")
        log.message(goodput.in_words())
        _say_where_wandb_is(run)
    fault = from_main(fault)
    if fault is not None:
        _close(run, exit_codes.REFUSED)
        raise RunFolderError(fault)


def summary_of(run: Run, validation: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of summary.json.

    Args:
        text: position of all ranks in the training text.
    """
    config, state, counters = run.config, run.state, text["counters"]
    baselines: dict[str, Any] = {"unigram_perplexity": None, "bigram_perplexity": None}
    samples = state.tokens // config.train.seq_len_tokens  # right also if the batch size has changed
    if config.evaluate.ngram_baselines and samples == text["consumed_samples"]:
        blocks = run.data.validation_sets[0].text.blocks
        try:
            baselines = ngram_perplexities(blocks, run.data.tokenizer, text, config)
        except StateMismatch as error:
            run.services.log.message(
                f"no n-gram baselines: {error}, as where data.source_weights changed at a resume"
            )
    elif config.evaluate.ngram_baselines:
        run.services.log.message(
            f"no n-gram baselines: the run trained on {samples} sequences, and its text is at number "
            f"{text['consumed_samples']}: batches were left out, or the text is another than at the start"
        )
    scores = scores_of(validation)
    # They depend only on the content of training text and tokenizer, not on their paths.
    fingerprints = (text["manifest_fingerprint"], text["tokenizer_fingerprint"])
    summary = {
        "steps": state.step,
        "tokens": state.tokens,
        **{f"val_{name.removeprefix('validation_')}": value for name, value in scores.items()},
        **baselines,
        "recall": validation["validation_recall"],
        "random_recall": validation["validation_random_recall"],
        "spikes": state.monitor.spikes,
        "skipped_updates": state.monitor.skipped_updates,
        "data_epochs": whole_epochs(text),
        "data_fingerprint": hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()[:16],
        "data_tokens_by_source": tokens_by_source(counters),
        **run.services.goodput.summary(),
    }
    if config.data.packing == "best_fit":
        summary |= {f"packing_{name}": share for name, share in packing_shares(counters).items()}
    return summary


def leave(run: Run, stop: Stopped) -> None:
    """End this process after a requested stop. The checkpoint is already saved. Collective."""
    _end_account(run, INTERRUPTED if stop.reason == signal.SIGINT else GOODPUT_STOPPED)
    if run.parallel.is_main:
        facts = {"step": stop.step, "reason": reason_in_words(stop.reason), "unix_seconds": time.time()}
        with _goes_on_without(run, STOPPED):
            write_atomically(run_dir(run.config) / STOPPED, json.dumps(facts) + "\n")
        _say_where_wandb_is(run)
        run.services.log.message(run.services.goodput.in_words())
        run.services.log.message(f"{stop}; exit code {exit_codes.STOPPED}: the same command goes on")
    _close(run, exit_codes.STOPPED)


def give_up(run: Run, stop: MonitorStop, phase: PhaseConfig) -> None:
    """End this process after the monitor stopped the run. All checkpoints are older than the spike. Collective."""
    event = {"event": "stop", "step": run.state.step, "phase": phase.name, "reason": str(stop)}
    run.services.log.log(event)
    _end_account(run, "stopped by the monitor")
    if run.parallel.is_main:
        with _goes_on_without(run, "the note by which the same command is refused"):
            note_stop(run_dir(run.config), stop, run.services.saver.durable_step or 0)
    _close(run, exit_codes.STOPPED_BY_MONITOR)


def give_up_corrupted(run: Run, fault: CorruptionFound) -> None:
    """End this process after a corruption check failed. Collective.

    The fault is logged, and it is also written to a report. When the run restarts from a checkpoint, it drops all
    metrics that are newer than the checkpoint, but it keeps the report.
    """
    newest_save(run)
    _end_account(run, "corrupted")
    if run.parallel.is_main:
        folder = run_dir(run.config) / "faults" / time.strftime("%Y%m%d-%H%M%S")
        with _goes_on_without(run, "the report"):
            folder.mkdir(parents=True, exist_ok=True)
            note = f"{fault}\nno update was made after step {run.state.step} <--\n"
            write_atomically(folder / "report.txt", note)
    _close(run, exit_codes.CORRUPTED)


def _end_account(run: Run, reason: str) -> None:
    run.services.goodput.clock.begin("other")  # An exception may have left another activity open.
    run.services.goodput.end(reason)


@contextmanager
def _goes_on_without(run: Run, what: str) -> Iterator[None]:
    """Log an OSError instead of raising it. An exception would change the exit code and keep other ranks waiting."""
    try:
        yield
    except OSError as error:  # a full disk
        run.services.log.message(f"{what} cannot be written: {error}")


def _say_where_wandb_is(run: Run) -> None:
    log = run.services.log
    for line in log.wandb_place:
        log.message(f"W&B: {line}")


def _close(run: Run, exit_code: int) -> None:
    services = run.services
    services.watchdog.heartbeat(run.state.step, "ending")
    services.watchdog.exit_code = exit_code
    run.data.batches.close()
    services.stop_vote.close()
    services.log.close(0 if exit_code == exit_codes.STOPPED else exit_code)  # to W&B, a stop is not a failure
    leave_world(services.watchdog)


def leave_world(watchdog: HangWatchdog) -> None:
    """Leave the process group with two barriers. Collective.

    The torch.distributed store may be gone once any rank has exited. At the first barrier, the watchdog still uses the
    store, and reports a rank that does not arrive. Afterwards, each rank's watchdog only limits the time to leave the
    process group. After the second barrier, no rank uses the store, so ranks may exit.
    """
    try:
        dist.barrier()
        watchdog.begin_to_leave()
        dist.barrier()
        shutdown_parallel()
    except RuntimeError as error:  # from gloo or NCCL
        watchdog.end_saved(f"leaving its process group failed, as where a peer has died ({error})")
    watchdog.close()
