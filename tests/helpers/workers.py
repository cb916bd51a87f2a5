"""Forks workers of a test session after all tests are collected: `pytest --workers N`.

Importing torch, megatron-core, transformers and all tests takes many CPU seconds. With pytest-xdist, each worker is a
separate interpreter and imports everything again. Here the pytest session imports everything once, and then forks its
workers. A worker runs whole test files, so that the shared fixtures of a file are created once. The session prints and
counts the results.
"""

import atexit
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
import torch

from helpers import forked

STARTING_RANKS = {"distributed", "resume", "e2e"}
"""Folders whose tests fork ranks from one server, which starts before the workers."""

Start = tuple[str, tuple[str, int | None, str]]
"""A test's node id and location."""


@dataclass
class Worker:
    pid: int
    received: Connection
    running: list[Start] = field(default_factory=list)


def run_in_workers(session: pytest.Session, count: int) -> None:
    if torch.cuda.is_initialized():
        raise pytest.UsageError("--workers: collecting the tests has initialized CUDA; pass --workers 1")
    if any(STARTING_RANKS & set(item.path.parts) for item in session.items):
        forked.start_server({**os.environ, **forked.OF_RANKS})
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, fill = os.pipe()
    for number in range(len(files)):
        os.write(fill, number.to_bytes(2, "big"))
    os.close(fill)  # a reader of the empty pipe then gets end-of-file
    workers = [_fork(session, files, queue) for _ in range(count)]
    os.close(queue)
    try:
        finished = _listen(session, {worker.received: worker for worker in workers})
    except BaseException:
        for worker in workers:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(worker.pid, signal.SIGINT)
                os.waitpid(worker.pid, 0)
        raise
    if finished != len(session.items) and not session.shouldfail:
        raise session.Interrupted(f"{len(session.items) - finished} tests did not run")


def _fork(session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int) -> Worker:
    received, sent = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _work(session, files, queue, sent)
    sent.close()  # the worker has the only copy, and closing it signals its end
    return Worker(pid, received)


def _listen(session: pytest.Session, workers: dict[Any, Worker]) -> int:
    """Forward what workers report until all have ended; return how many tests have run."""
    hook, finished = session.config.hook, 0
    while workers:
        for received in wait(list(workers)):
            worker = workers[received]
            try:
                kind, content = worker.received.recv()
            except EOFError:
                _bury(session, workers.pop(received))
                continue
            if kind == "start":
                worker.running = [content]
                hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=content)
                hook.pytest_runtest_logreport(report=report)
            elif kind == "finish":
                worker.running, finished = [], finished + 1
                hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
            else:
                hook.pytest_warning_recorded.call_historic(kwargs=content)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    return finished


def _bury(session: pytest.Session, worker: Worker) -> None:
    """Report a worker's end: a code other than 0 means that its current test has failed."""
    code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    if code == 0 and not worker.running:
        return
    if code == 2:
        raise KeyboardInterrupt
    for nodeid, location in worker.running:
        report = pytest.TestReport(
            nodeid, location, {}, "failed", f"its worker ended with exit code {code}", "call"
        )
        session.config.hook.pytest_runtest_logreport(report=report)


class _Reporter:
    def __init__(self, config: pytest.Config, sent: Connection) -> None:
        self._config, self._sent = config, sent

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._sent.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sent.send(("report", content))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._sent.send(("finish", (nodeid, location)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Send a warning's text, because the session may not know its class."""
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = warnings.WarningMessage(
            UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
        )
        content = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._sent.send(("warning", content))


class _Silent(pytest.TerminalReporter):
    """Replaces the terminal in a worker, because other plugins ask for it."""

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        pass

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        pass

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        pass


def _work(
    session: pytest.Session, files: Sequence[list[pytest.Item]], queue: int, sent: Connection
) -> NoReturn:
    code = 1
    try:
        manager = session.config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(_Silent(session.config, StringIO()), "terminalreporter")
        manager.register(_Reporter(session.config, sent))
        capture = manager.get_plugin("capturemanager")
        capture.stop_global_capturing()  # it would go to one file for all workers
        capture.start_global_capturing()
        forked.keep_server()
        items = _in_order(files, queue)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        capture.stop_global_capturing()
        code = 0
    except KeyboardInterrupt:
        code = 2
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        atexit._run_exitfuncs()  # ends what tests have started
        os._exit(code)


def _in_order(files: Sequence[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    while number := os.read(queue, 2):
        yield from files[int.from_bytes(number, "big")]
