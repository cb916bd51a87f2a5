"""Runs launch/study.py in a fork of a process that has imported everything; the study forks its runs in turn."""

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from gsa_study import processes
from gsa_study.processes import end_with
from gsa_train.reliability.stop_signals import STOP_SIGNALS
from helpers.forked import Fork, become, kill_unless_over, run_file, start_process, usual_signals
from helpers.runs import ENVIRONMENT, REPOSITORY, inherited


class ForkedStudy:
    """Holds a start of a study.

    Args:
        words: arguments of `launch/study.py`.
        log: file to which its output is appended.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.log = log
        environment = {**inherited(), **ENVIRONMENT}
        command = ["launch/study.py", *words]
        self._process = start_process(_run_study, (command, REPOSITORY, environment, log), environment, log)
        atexit.register(kill_unless_over, self._process)

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


class ForkedJob(Fork):
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        ends_with_parent = end_with(os.getpid())

        def run() -> None:
            usual_signals(STOP_SIGNALS)
            ends_with_parent()
            become(Path.cwd(), dict(environment), log)
            run_file(list(command[1:]))

        super().__init__(run)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_study(command: list[str], cwd: Path, environment: dict[str, str], log: Path) -> None:
    become(cwd, environment, log)
    with patch.object(processes, "start_process", ForkedJob):
        run_file(command)
