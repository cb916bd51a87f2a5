"""launch/study.py in a fork of a process that has imported everything, its runs as forks of it in turn."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from gsa_train.run.stop_signals import STOP_SIGNALS
from gsa_train.study import processes
from gsa_train.study.processes import end_with
from helpers.forked import _become, _run_file, _start
from helpers.runs import ENVIRONMENT, REPOSITORY, inherited


class ForkedStudy:
    """A start of a study.

    Args:
        words: behind `launch/study.py`.
        log: what it prints is appended.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.log = log
        environment = {**inherited(), **ENVIRONMENT}
        command = ["launch/study.py", *words]
        self._process = _start(_run_study, (command, REPOSITORY, environment, log), environment, log)
        atexit.register(self._process.kill)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = 600) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"not over after {seconds} s:\n{self.log.read_text()}"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedJob:
    """A job of the study, with what its runner uses of subprocess.Popen."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.returncode: int | None = None
        ends_with_parent = end_with(os.getpid())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number in (*STOP_SIGNALS, signal.SIGHUP):  # else the study's
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ends_with_parent()
            self._run(list(command[1:]), dict(environment), log)

    @staticmethod
    def _run(command: list[str], environment: dict[str, str], log: Path) -> NoReturn:
        code = 1
        try:
            _become(Path.cwd(), environment, log)
            _run_file(command)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_study(command: list[str], cwd: Path, environment: dict[str, str], log: Path) -> None:
    _become(cwd, environment, log)
    with patch.object(processes, "start_process", ForkedJob):
        _run_file(command)
