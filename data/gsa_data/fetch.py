"""Read bytes from any address that fsspec knows. Every wait has a limit, and failed reads are tried again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import fsspec
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from gsa_data.faults import DataFault, Reading
from gsa_data.whole_files import check_kind

T = TypeVar("T")

logger = logging.getLogger("gsa_data")

PIECE_BYTES = 1 << 24

# The libraries below fsspec's remote file systems. Some of their errors are not OSErrors.
NETWORK_LIBRARIES = frozenset(
    {
        "aiohttp",
        "aiobotocore",
        "botocore",
        "gcsfs",
        "google",
        "http",
        "httpcore",
        "httpx",
        "paramiko",
        "requests",
        "urllib3",
    }
)
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp",
    "https": "aiohttp", "abfs": "adlfs", "az": "adlfs", "sftp": "paramiko", "ssh": "paramiko",
}  # fmt: skip


class ReadError(OSError):
    """A read failed, and may be tried again."""


class NoSuchKind(OSError):
    """A pipe or a device is in the place of a file, or a file is too large."""


# A retry does not help after these errors.
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NoSuchKind)


class Pulse:
    """Records the progress of a long action, which calls `beat`. Only the time without progress is limited."""

    def __init__(self) -> None:
        self.last_seconds = time.monotonic()

    def beat(self) -> None:
        self.last_seconds = time.monotonic()


def file_system(address: str, reading: Reading) -> tuple[Any, str]:
    """Returns the fsspec file system of an address, and the path in it. A failed connection is tried again.

    Do not call this function from short-lived threads. Each calling thread gets a helper thread (`_Connector`), which
    stays alive and holds the connections.

    Raises DataFault if there is no connection, the protocol is unknown, or its package is not installed.
    """
    try:
        return with_retries(
            lambda: connected(address, reading.timeout_seconds),
            f"connection to {address!r}",
            reading,
            Counter(),
        )
    except OSError as error:
        raise DataFault(
            f"{address!r} cannot be connected to ({type(error).__name__}: {error}); check address and access, and that "
            "its server answers"
        ) from error


def connected(address: str, limit_seconds: float) -> tuple[Any, str]:
    """Try once to connect for `file_system`. Raises OSError if there is no connection."""
    protocol = fsspec.utils.get_protocol(address)
    try:
        if protocol in LocalFileSystem.protocol:
            return fsspec.core.url_to_fs(address)  # needs no connection
        return _of_thread().connect(address, limit_seconds)
    except ImportError as error:
        package = PACKAGES.get(protocol, f"the fsspec package of {protocol}")
        raise DataFault(f"{address}: {error}; run: pip install {package}") from error
    except ValueError as error:
        raise DataFault(f"{address}: {error}; give a folder, or an address that fsspec knows") from error


def read_bytes(
    address: str, reading: Reading, counters: Counter[str], most_bytes: int | None = None
) -> bytes:
    """Read the whole file. Raises OSError if the file is missing, not regular or larger than `most_bytes`, or if all
    tries failed."""
    limit = reading.timeout_seconds

    def read() -> bytes:
        filesystem, path = connected(address, limit)
        if isinstance(filesystem, LocalFileSystem):
            try:
                in_time(lambda: check_kind(path), limit)
            except ValueError as error:
                raise NoSuchKind(str(error)) from None
        file = in_time(lambda: filesystem.open(path, "rb"), limit)
        pieces = []
        while piece := in_time(lambda: file.read(PIECE_BYTES), limit):
            pieces.append(piece)
            if most_bytes is not None and sum(map(len, pieces)) > most_bytes:
                raise NoSuchKind(f"{path}: has more than the {most_bytes} bytes that such a file may have")
        expected = getattr(file, "size", None)
        file.close()
        content = b"".join(pieces)
        if expected is not None and len(content) < expected:
            raise ReadError(f"the connection ended after {len(content)} of {expected} bytes")
        return content

    return with_retries(read, address, reading, counters)


def patiently(action: Callable[[Pulse], T], what: str, reading: Reading, counters: Counter[str]) -> T:
    """Run an action and return its result. Retry after an error, or after `timeout_seconds` without a `beat` call.

    Raises OSError if all tries failed, or a retry cannot help.
    """

    def once() -> T:
        pulse = Pulse()
        return in_time(lambda: action(pulse), reading.timeout_seconds, pulse)

    return with_retries(once, what, reading, counters)


def with_retries(action: Callable[[], T], what: str, reading: Reading, counters: Counter[str]) -> T:
    """Returns the result of `action`, which is tried again after a transient OSError. Counts `read_retries`."""
    for retry, wait_seconds in enumerate(reading.waits_seconds, 1):
        try:
            return action()
        except LASTING:
            raise
        except OSError as error:
            counters["read_retries"] += 1
            logger.warning(
                "%s: %s; retry %d of %d in %g s",
                what,
                error or repr(error),
                retry,
                reading.retries,
                wait_seconds,
            )
            time.sleep(wait_seconds)
    return action()


def in_time(action: Callable[[], T], seconds: float, pulse: Pulse | None = None) -> T:
    """Returns the result of `action`, or raises ReadError after `seconds` without a `beat` call on its pulse.

    `action` runs in a thread of its own, which is abandoned when time runs out.
    """
    pulse = pulse or Pulse()
    outcome = in_background(action)
    while not outcome.done() and (left := pulse.last_seconds + seconds - time.monotonic()) > 0:
        wait([outcome], left)
    if not outcome.done():
        raise ReadError(f"no answer within {seconds:g} s")
    return _result(outcome)


def in_background(action: Callable[[], T]) -> Future[T]:
    """Start an action in a daemon thread, because a read that hangs cannot be stopped, and a daemon thread lets the
    process end."""
    outcome: Future[T] = Future()
    threading.Thread(target=_settle, args=(outcome, action), name="gsa_data read", daemon=True).start()
    return outcome


def _settle(outcome: Future[T], action: Callable[[], T]) -> None:
    try:
        outcome.set_result(action())
    except BaseException as error:  # noqa: BLE001  the waiting thread gets it
        outcome.set_exception(error)


def _result(outcome: Future[T]) -> T:
    """Returns the result of a finished action, or raises its error, as a ReadError if a retry may help."""
    error = outcome.exception()
    if error is None:
        return outcome.result()
    # The timeout errors of fsspec, and of asyncio before Python 3.11, are not OSErrors.
    library = type(error).__module__.partition(".")[0]
    passing = isinstance(error, FSTimeoutError | EOFError) or library in NETWORK_LIBRARIES | {"asyncio"}
    if passing and not isinstance(error, OSError):
        raise ReadError(repr(error)) from error
    raise error


class _Connector(threading.Thread):
    """Helper thread that connects to file systems for one reading thread.

    fsspec caches file systems per thread, so one helper makes all connections for the reading thread. If a server does
    not answer, the helper hangs. The reading thread then abandons the hanging helper and starts a new helper.
    """

    def __init__(self) -> None:
        super().__init__(name="gsa_data connections", daemon=True)
        self._requests: SimpleQueue[tuple[str, Future[tuple[Any, str]]] | None] = SimpleQueue()
        self.is_left = False
        self.start()

    def run(self) -> None:
        while (request := self._requests.get()) is not None:
            address, outcome = request
            _settle(outcome, partial(fsspec.core.url_to_fs, address))

    def connect(self, address: str, limit_seconds: float) -> tuple[Any, str]:
        outcome: Future[tuple[Any, str]] = Future()
        self._requests.put((address, outcome))
        if not wait([outcome], limit_seconds).done:
            self.is_left = True
            self._requests.put(None)
            raise ReadError(f"no answer within {limit_seconds:g} s")
        return _result(outcome)


_connectors = threading.local()
"""One connector per thread, like fsspec's cache of file systems"""


def _of_thread() -> _Connector:
    """Returns the connector of this thread. A forked process gets a new connector, because a fork copies no threads."""
    connector: _Connector | None = getattr(_connectors, "connector", None)
    if connector is None or connector.is_left or not connector.is_alive():
        connector = _connectors.connector = _Connector()
    return connector
