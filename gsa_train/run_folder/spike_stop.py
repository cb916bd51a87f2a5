"""Refuse to restart a run that the monitor stopped, until the user changes something.

A file in the run folder records that a spike stopped the run. Without this record, torchrun or Slurm would restart the
run from the same checkpoint. The run would then train on the same batches and meet the same spike.
"""

from __future__ import annotations

from pathlib import Path

from gsa_train.arguments import Arguments
from gsa_train.config import Config
from gsa_train.distributed.objects import from_main
from gsa_train.distributed.parallel import Parallel
from gsa_train.files import read_checked, write_checked
from gsa_train.reliability.monitor.monitor import MonitorStop
from gsa_train.run_folder.paths import MONITOR_STOP as FILE

KEYS = ("first_step", "last_step", "saved_step", "reason")


class SpikeAhead(ValueError):
    """The start would meet the spike that ended the run. The message says what to do."""


def note_stop(run_dir: Path, stop: MonitorStop, saved_step: int) -> None:
    """Record the stop in the run folder. Call it on the main rank.

    Args:
        saved_step: step of the newest checkpoint; 0 if there is none.
    """
    facts = {"first_step": stop.first_step, "last_step": stop.last_step, "saved_step": saved_step}
    write_checked(run_dir / FILE, {**facts, "reason": str(stop)})


def refuse_same_spike(run_dir: Path, config: Config, arguments: Arguments, parallel: Parallel) -> None:
    """Refuse a start that would meet the recorded spike. Collective.

    Args:
        arguments: arguments of a new start; a restart of the same job has no --resume options.

    Raises:
        SpikeAhead: the spike's batches are not skipped and no option asks to continue. Raised on all ranks.
    """
    path = run_dir / FILE
    goes_on = arguments.resume_after_stop or arguments.no_resume or arguments.resume_from
    stop = damage = None
    if parallel.is_main and path.exists():
        try:
            stop = read_checked(path, KEYS)
        except ValueError as error:
            damage = str(error)
    stop, damage = from_main((stop, damage))
    if damage is not None and not goes_on:
        raise SpikeAhead(
            f"the monitor stopped this run, and {path}, which says where, is damaged ({damage}): see the log for the "
            "spike, and add --resume-after-stop, or start from an earlier checkpoint (--resume-from DIR)"
        )
    if stop is None:
        return
    spike = [*range(stop["first_step"], stop["last_step"] + 1)]  # empty after `NotFinite`
    left_out = bool(spike) and set(spike) <= set(config.train.iterations_to_skip)
    if left_out or goes_on:
        return
    skip = str(sorted({*config.train.iterations_to_skip, *spike})).replace(" ", "")
    leave_out = f"  - leave out its batches: train.iterations_to_skip={skip}\n" if spike else ""
    raise SpikeAhead(
        f"the monitor stopped this run ({path}):\n  {stop['reason']}\n"
        f"From step {stop['saved_step']} on, the same command would run into the same spike. Instead\n"
        f"{leave_out}"
        "  - or change what made it (phases.*.lr, the text), or nothing if it was the hardware, "
        "and add --resume-after-stop\n"
        "  - or start from an earlier checkpoint (--resume-from DIR), or from step 0 (--no-resume)."
    )
