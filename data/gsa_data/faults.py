"""Define the faults of text, their names in the counters, and the policy for faults."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

OnBadShard = Literal["fail", "skip"]

BAD_LINES = ("bad_utf8", "bad_json", "missing_text", "missing_messages", "bad_message")
"""Faults that count towards `max_bad_line_fraction`"""
HARMLESS_LINES = ("empty_text", "huge_document", "no_assistant", "template_refused")
LOST_LINES = "lost_lines"
"""Counter of lines that a shard has lost between a save and a resume"""
FAILED_READINGS = ("shards_missing", "shards_unreadable")
BAD_SHARDS = (
    *FAILED_READINGS,
    "shards_damaged",
    "shards_bad_lines",
    "shards_duplicate",
)

logger = logging.getLogger("gsa_data")


def printable(word: str) -> str:
    """Escape invisible characters of untrusted text, so that the text cannot break a line or move the cursor of a
    terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in word)


class DataFault(RuntimeError):
    """The corpus cannot be read. The message names the shard, the value and the remedy."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Prefix errors about the value of a command's option with the option's name.

    Raises:
        DataFault: the block raised a DataFault or a ValueError
    """
    try:
        yield
    except (DataFault, ValueError) as fault:
        raise DataFault(f"{option}: {fault}") from fault


@dataclass(frozen=True)
class Reading:
    """Settings for reading shards and for the treatment of faults. No setting changes the order of the documents."""

    on_bad_shard: OnBadShard = "fail"
    """A shard is bad if it is missing, unreadable, damaged or a copy of another shard, or if it has too many bad lines.
    "fail" stops the run at a bad shard. "skip" leaves out, counts and logs the bad part."""
    max_bad_line_fraction: float = 0.01
    """Largest share of bad lines in a good shard. Bad lines of a good shard are left out and counted."""
    max_document_bytes: int = 1 << 25
    """Longer documents (in UTF-8) are left out and counted, because tokenizing takes seconds per MiB."""
    retries: int = 5
    """Number of times that a failed read is tried again"""
    timeout_seconds: float = 60.0
    """A read, an opening, a listing or a connection without progress for this time fails."""
    backoff_seconds: float = 0.5
    """The wait before the first retry. The wait doubles each time, up to a minute."""
    or_skip: str = ", or set on_bad_shard=skip"
    """End of an error's remedy. It offers "skip" only where it is allowed."""

    def __post_init__(self) -> None:
        if self.on_bad_shard not in ("fail", "skip"):
            raise ValueError(f"on_bad_shard={self.on_bad_shard!r} must be 'fail' or 'skip'")
        if not 0.0 <= self.max_bad_line_fraction <= 1.0:
            raise ValueError(f"max_bad_line_fraction={self.max_bad_line_fraction} must be between 0 and 1")
        if self.max_document_bytes < 1:
            raise ValueError(f"max_document_bytes={self.max_document_bytes} must be at least 1")
        if self.retries < 0 or self.backoff_seconds < 0:
            raise ValueError(
                f"retries={self.retries}, backoff_seconds={self.backoff_seconds} must be 0 or more"
            )
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} must be above 0")

    @property
    def waits_seconds(self) -> list[float]:
        return [min(60.0, self.backoff_seconds * 2.0 ** min(retry, 60)) for retry in range(self.retries)]

    @property
    def longest_wait_seconds(self) -> float:
        """Returns the time from the first try of a read to its last failure."""
        return (self.retries + 1) * self.timeout_seconds + sum(self.waits_seconds)

    def for_validation(self) -> Reading:
        """Returns the same policy, but a bad shard always fails, so that perplexities stay comparable."""
        remedy = " (on_bad_shard=skip leaves no validation text out)"
        return replace(self, on_bad_shard="fail", or_skip=remedy)


DEFAULT_READING = Reading()


def skipped_totals(counters: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers of skipped shards and lines, and of read retries, under the names that runs log."""
    return {
        "data_skipped_documents": sum(
            counters.get(name, 0) for name in (*BAD_LINES, *HARMLESS_LINES, LOST_LINES)
        ),
        "data_skipped_shards": sum(counters.get(name, 0) for name in BAD_SHARDS),
        "data_read_retries": counters.get("read_retries", 0),
    }


@functools.lru_cache(maxsize=4096)
def warn_once(message: str) -> None:
    """Log a warning in one line, but only once per process, because a small corpus is read many times and would repeat
    its warnings. Invisible characters are escaped."""
    logger.warning("%s", printable(message))
