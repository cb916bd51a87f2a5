"""Start and end a study's child processes, and assign devices to them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gsa_study.failure_causes import reason_in
from gsa_study.jobs import Job
from gsa_study.plan import StudyError
from gsa_train.files import own_file
from gsa_train.process import exit_codes
from gsa_train.reliability.last_words import SUBMISSION

PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEVICE_FILES = Path("/dev")
LONGEST_STOP_SECONDS = 600
"""Time that torchrun gives its ranks to finish their step and save."""


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a child process would see, as CUDA_VISIBLE_DEVICES names them, or [] if there is none."""
    visible, there = environ.get("CUDA_VISIBLE_DEVICES"), count_gpus()
    if visible is None or there == 0:
        return list(map(str, range(there or 0)))
    return [name.strip() for name in visible.split(",") if name.strip()]


def count_gpus() -> int | None:
    """Return the number of GPUs in this machine, regardless of CUDA_VISIBLE_DEVICES. Return 0 if no driver device files
    exist, and None if the driver does not report the number."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    driver = any(each.name.startswith(("nvidia", "dxg")) for each in DEVICE_FILES.iterdir())  # dxg: WSL
    return None if driver else 0


def check_devices(jobs: Sequence[Job], gpus: Sequence[str] | None) -> None:
    """Raise StudyError if a GPU of `gpus` does not exist (its jobs would run on CPUs), or if a run needs more GPUs than
    `gpus` has. With gpus=None, all ranks share the CPU cores, so every run fits."""
    there = count_gpus() if gpus else None
    for name in gpus or ():
        by_id = name.startswith(("GPU-", "MIG-"))  # as `nvidia-smi -L` prints them
        if there == 0 or not (by_id or (name.isdecimal() and (there is None or int(name) < there))):
            known = "" if there is None else f", which has {there}"
            raise StudyError(
                f"--gpus {','.join(gpus or ())}: {name} is not a GPU of this machine{known}; name them by numbers from "
                "0, as in --gpus 0,1; --gpus none for CPUs"
            )
    for job in jobs:
        if gpus is not None and job.devices > len(gpus):
            raise StudyError(
                f"{job.run.name} needs {job.devices} GPUs (parallel.tensor x context x pipeline of its config, times "
                f"data_parallel of the study), and there are {len(gpus)}; make them fewer, or name more by --gpus"
            )
        if gpus is not None and job.devices > 1 and len(set(gpus)) < len(gpus):
            raise StudyError(
                f"--gpus {','.join(gpus)}: {job.run.name} needs {job.devices} different GPUs; name each GPU once"
            )


def child_environment(environ: Mapping[str, str], gpus: Sequence[str], notes: Path) -> dict[str, str]:
    """Return the environment of a job on these GPUs, or on CPUs.

    Args:
        notes: folder for the main rank's exit code, because torchrun always exits with 1.
    """
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), SUBMISSION: str(notes)}
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LONGEST_STOP_SECONDS), "PYTHONUNBUFFERED": "1"}
    return {**patience, **environ, **own}


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own. Ctrl-C in a terminal then reaches only the study, which stops the child.
    If the study itself dies, the system sends SIGTERM to the child."""
    with open(log, "ab", opener=own_file) as file:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with(os.getpid()),
        )


def end_with(parent: int) -> Callable[[], None]:
    """Returns a `preexec_fn` that makes the system send the child SIGTERM when the parent dies."""
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork, because the child should load nothing

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has already died
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    log: Path
    notes: Path
    checkpoint_before: str
    log_bytes_before: int

    def exit_code(self) -> int | None:
        """Returns the main rank's exit code if it recorded one, else the process's code. Returns None while the job
        runs."""
        code = self.process.poll()
        if code is None or code <= 0:
            return code
        try:
            return int((self.notes / "exit_code").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return code

    def reason(self, code: int) -> str:
        """Returns why the job failed, from its output since this start."""
        printed = self.log.read_bytes()[self.log_bytes_before :]
        return reason_in(printed.decode("utf-8", errors="replace"), crashed=code == exit_codes.FAILED)

    def kill(self) -> None:
        """Kill the job's session. Ranks of torchrun have their own sessions, and end once torchrun has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
