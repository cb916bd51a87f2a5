"""Train a model: launch/pretrain.py of a checkout, `gsa-pretrain` and `python -m gsa_train` of an installation.

    torchrun --nproc_per_node=N launch/pretrain.py --config FILE [key=value ...]
    torchrun --nproc_per_node=N -m gsa_train --config NAME [key=value ...]

Options: --resume-from DIR, --no-resume, --resume-after-stop, --accept-new-data, --dry-run [--world-size N --device
NAME --mfu SHARE].

Each rank exits with one of the codes in gsa_train/process/exit_codes.py. If the code of any rank is not 0, torchrun
shows the codes of the ranks, and itself exits with 1.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os

from gsa_train.cli import parse_arguments, refuse
from gsa_train.config import ConfigError, load_config
from gsa_train.config.file_checks import has_local_tokenizer
from gsa_train.distributed.cuda_connections import compute_capability, prepare_connections
from gsa_train.distributed.megatron_import import import_megatron, quiet_libraries
from gsa_train.planning.choices import unknown_choices
from gsa_train.planning.dry_run import describe
from gsa_train.process import exit_codes
from gsa_train.process.as_command import as_command
from gsa_train.process.console import open_descriptors, take_console
from gsa_train.reliability.last_words import end_launcher, forget_end, note_end, say_last, tell_torchrun
from gsa_train.reliability.stop_signals import (
    Stopped,
    StopRequest,
    find_deadline,
    job_start_time,
)
from gsa_train.run.kernel_cache import prepare_kernel_cache
from gsa_train.run.start_header import first_line

SHARED_MEMORY_REMEDY = (
    "/dev/shm is too small or full for NCCL: make room there (df -h /dev/shm; a container's: --shm-size=8g, or "
    "--ipc=host), or set NCCL_SHM_DISABLE=1, which is slower"
)


def main() -> int:
    open_descriptors()
    forget_end()
    try:
        code = run_command()
        note_end(code)
        return code
    except Exception as error:
        tell_torchrun(f"{type(error).__name__}: {error}\n(the traceback is further up)")
        raise


def run_command() -> int:
    request = StopRequest()
    request.watch()
    is_main = os.environ.get("RANK", "0") == "0"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parse_arguments()
    except SystemExit as end:
        if not end.code:  # --help
            raise
        take_console()
        return refuse(said.getvalue().rstrip())
    if not arguments.dry_run:  # A dry run only prints, and waits for a slow reader.
        take_console()
    logging.basicConfig(
        level=logging.INFO if is_main else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    quiet_libraries()
    try:
        config = load_config(
            arguments.config_path, arguments.overrides, arguments.world_size, need_data=not arguments.dry_run
        )
        if wrong := unknown_choices(config):
            raise ConfigError(arguments.config_path, wrong)
    except ConfigError as error:
        return refuse(error)
    if arguments.dry_run:
        if has_local_tokenizer(config.data):
            # imported here: not needed without a tokenizer, nor for --help
            from gsa_data.tokenizer_json import TokenizerError
            from gsa_train.data.tokenizer import load_tokenizer

            try:
                load_tokenizer(config)
            except TokenizerError as error:
                return refuse(error)
        if is_main:
            with as_command():
                print(describe(config, arguments.world_size, arguments.device, arguments.mfu))
        return 0
    try:
        request.deadline = find_deadline(
            config.run.time_limit_minutes, config.run.slurm_margin_minutes, os.environ, job_start_time()
        )
    except ValueError as error:
        return refuse(error)
    if request.reason and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return exit_codes.STOPPED  # torchrun mistakes a stop for a failure, and restarts
    if is_main:
        print(first_line(config, arguments), flush=True)
    capability = compute_capability()
    prepare_connections([config.parallel], os.environ, capability)
    if capability is not None:  # on CPUs nothing is compiled
        prepare_kernel_cache(config.run, os.environ)
    # W&B reads this variable at import. Its telemetry delays a process's end if the server hangs.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import_megatron()
    # Imported here, so that a wrong config is reported before torch and megatron-core are loaded.
    from gsa_data.tokenize import TokenizerError
    from gsa_data.validation import TooLittleText
    from gsa_train.checkpoint.load import StateError
    from gsa_train.checkpoint.save import CheckpointError
    from gsa_train.distributed.parallel import DeviceError, RendezvousError
    from gsa_train.metrics.wandb_sink import WandbRefused
    from gsa_train.profiling.profiler import ProfileError
    from gsa_train.reliability.health.check import UnhealthyDevice
    from gsa_train.reliability.monitor.corruption import CorruptionFound
    from gsa_train.reliability.monitor.monitor import MonitorStop
    from gsa_train.run_folder.lock import RunFolderError
    from gsa_train.run_folder.resume import ResumeError
    from gsa_train.run_folder.same_on_all import OtherConfig
    from gsa_train.run_folder.spike_stop import SpikeAhead
    from gsa_train.train import train
    from gsa_train.validation.loop_tasks import TaskError

    try:
        train(config, arguments, request)
    except Stopped as stop:
        tell_torchrun(f"{stop}: the same command goes on")
        return exit_codes.STOPPED
    except (
        ResumeError,
        StateError,
        RunFolderError,
        OtherConfig,
        TokenizerError,
        ProfileError,
        TaskError,
        TooLittleText,
        WandbRefused,
    ) as error:
        return refuse(error, request=request)
    except (DeviceError, RendezvousError) as error:
        note_end(exit_codes.FAILED)  # A fault of this node or moment: another start may succeed.
        return refuse(error, request=request)
    except SpikeAhead as error:
        return refuse(error, exit_codes.STOPPED_BY_MONITOR, request)
    except MonitorStop as stop:
        if is_main:  # All ranks decide the same.
            say_last(str(stop))
        return exit_codes.STOPPED_BY_MONITOR
    except CorruptionFound as fault:
        if is_main:  # All ranks compare the same.
            say_last(str(fault))
        return exit_codes.CORRUPTED
    except UnhealthyDevice as error:
        note_end(exit_codes.UNHEALTHY, by_any_rank=True)
        refuse(error, exit_codes.UNHEALTHY, request)  # the main rank ends first, unless it hangs itself
        end_launcher()
        return exit_codes.UNHEALTHY
    except CheckpointError as error:
        if is_main:  # all ranks agree
            say_last(str(error))
        return exit_codes.SAVE_FAILED
    except RuntimeError as error:
        words = known_failure(error)
        if words is None:
            raise
        say_last(f"rank {os.environ.get('RANK', '0')}: {words}")
        return exit_codes.FAILED
    return 0


def known_failure(error: RuntimeError) -> str | None:
    """Returns the message for an error that a traceback would not explain, else None."""
    from gsa_data.faults import DataFault

    # torch reports a dead reader by a signal, which may interrupt this process anywhere.
    if isinstance(error, DataFault) or str(error).startswith("DataLoader worker"):
        return f"the text failed: {error}"
    if "shared memory segment" in str(error):  # NCCL has one segment for each pair of GPUs.
        return f"{error}\n{SHARED_MEMORY_REMEDY}"
    return None
