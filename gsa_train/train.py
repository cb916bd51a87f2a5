"""Run pretraining from start to end.

1. Create the parallel groups from the config, and find the checkpoint to start from.
2. Open data, model, optimizer, checkpoint and run folder (run/open.py), then the services.
3. For each phase build an optimizer and run the steps (trainer.py).
"""

from __future__ import annotations

import gc
from contextlib import ExitStack

from gsa_train.arguments import Arguments
from gsa_train.config import Config
from gsa_train.distributed.parallel import init_parallel, join_world
from gsa_train.metrics.goodput.goodput_log import GoodputNotes
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.optimizer.main_weights import MainWeights, carry_over, keep_main_weights
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.phases import PhaseRange, phase_ranges
from gsa_train.profiling.work_time import StragglerWarning
from gsa_train.reliability.health.check import check_health, check_presence
from gsa_train.reliability.monitor.corruption import CorruptionFound
from gsa_train.reliability.monitor.monitor import MonitorStop
from gsa_train.reliability.stop_signals import Stopped, StopRequest
from gsa_train.run.finish import finish, give_up, give_up_corrupted, leave, leave_world
from gsa_train.run.open import open_run
from gsa_train.run.saves import save_the_end
from gsa_train.run.state import Run
from gsa_train.run.warnings import BlindIndexerWarning, DenseQueriesWarning, warn_of_cpus
from gsa_train.run_folder.lock import RunLock
from gsa_train.run_folder.paths import run_dir
from gsa_train.run_folder.resume import choose_start
from gsa_train.run_folder.same_on_all import check_same_config
from gsa_train.services import Service
from gsa_train.trainer import run_phase


def train(config: Config, arguments: Arguments, request: StopRequest) -> None:
    """Train a checked config to the end, from step 0 or from a checkpoint.

    Before this function raises `Stopped`, `MonitorStop` or `CorruptionFound`, the process leaves its process group.

    Raises:
        Stopped: a rank received a stop request; a checkpoint of the current step is saved.
        MonitorStop: a spike ended the run; the newest checkpoint is older than the spike.
        CorruptionFound: a check found wrong results of a device, or weights that differ between ranks.
        UnhealthyDevice: a device failed the health check at the start.
        OtherConfig: a rank has a config that differs from rank 0.
    """
    clock = RunClock()
    if config.run.health_check_seconds > 0:
        clock.begin("health")
        check_presence()
    clock.begin("process_groups")
    join_world(config.parallel)
    check_same_config(config)
    parallel = init_parallel(config.parallel, config.run.seed)
    warn_of_cpus(config, parallel)
    if config.run.health_check_seconds > 0:
        clock.begin("health")
        check_health(parallel, config.run.health_check_seconds)
    request.listen()  # until here a signal ends this process: nothing to save, and a peer may be missing
    ranges = phase_ranges(config.phases)
    lock = RunLock(run_dir(config))
    lock.take()  # before checkpoints are read: the previous holder may have written new ones
    with ExitStack() as refused:
        refused.callback(lock.take_back)
        clock.begin("checkpoint")
        start = choose_start(config, arguments, ranges, parallel, tensors_later=True)
        run = open_run(config, arguments, request, start, parallel, clock)
        run.listening = services_of(run)
        refused.pop_all()
    try:
        train_phases(run, ranges)
        run.data.batches.close()
        finish(run, ranges[-1].phase)
    except Stopped as stop:
        leave(run, stop)
        raise
    except MonitorStop as stop:
        give_up(run, stop, next(each.phase for each in ranges if run.state.step <= each.end))
        raise
    except CorruptionFound as fault:
        give_up_corrupted(run, fault)
        raise
    finally:
        run.services.saver.close()  # also after an error: finish the current save
        for service in run.listening:
            service.on_stop()
    run.services.stop_vote.close()
    leave_world(run.services.watchdog)
    lock.close()


def services_of(run: Run) -> list[Service]:
    config, services = run.config, run.services
    ratio = config.logging.straggler_ratio
    warnings = [StragglerWarning(ratio), DenseQueriesWarning(run), BlindIndexerWarning()]
    return [
        services.watchdog,
        services.profiler,
        GoodputNotes(services.goodput, services.log.message, services.saver.take_held_seconds, ratio),
        *(warnings if run.parallel.is_main else []),
    ]


def train_phases(run: Run, ranges: list[PhaseRange]) -> None:
    """Train from `run.start` to the last checkpoint."""
    if run.start.state is not None:
        run.start.restore_rng(run.parallel)
    kept: MainWeights | None = None
    for phase_range in ranges[run.start.phase_index :]:
        if kept is not None:
            # Phases train different parameters, so each phase builds its own gradient buffers and optimizer.
            run.phase_optimizer = build_optimizer(run.model, phase_range.phase, run.config)
            carry_over(kept, run.phase_optimizer)
            kept = None  # free their memory before the phase
        assert run.phase_optimizer is not None
        try:
            run_phase(run, phase_range, run.phase_optimizer)
            if phase_range is ranges[-1]:
                save_the_end(run, phase_range, run.phase_optimizer)
        finally:
            run.services.log.write_late()  # after an error too
        if phase_range is not ranges[-1]:
            whole_state = ranges[phase_range.index + 1].phase.keep_optimizer
            kept = keep_main_weights(run.model, run.phase_optimizer, whole_state)
        run.services.saver.hold_update()
        close_optimizer(run.model, run.phase_optimizer)
        # In fp32 the optimizer's shards are views of the weights. These views keep autograd nodes alive, and so the
        # hooks of this phase's gradient buffers. Free the optimizer before the next phase registers its hooks.
        run.phase_optimizer = None
        gc.collect()
