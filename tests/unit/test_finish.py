"""The end of a run that is complete: what cannot be drawn costs no exit code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gsa_train.run.finish import _goes_on_without
from gsa_train.run.state import Run


def run_that_hears(messages: list[str]) -> Run:
    log: Any = SimpleNamespace(message=messages.append)
    return cast(Run, SimpleNamespace(services=SimpleNamespace(log=log)))


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), ModuleNotFoundError("No module named 'plotly'")]
)
def test_a_report_that_cannot_be_written_is_told_and_ends_nothing(error: Exception) -> None:
    messages: list[str] = []
    with _goes_on_without(run_that_hears(messages), "plots and report"):
        raise error
    assert messages == [f"plots and report cannot be written: {error}"]


def test_a_mistake_in_the_report_is_no_missing_file() -> None:
    with pytest.raises(ValueError, match="a mistake"), _goes_on_without(run_that_hears([]), "the report"):
        raise ValueError("a mistake")
