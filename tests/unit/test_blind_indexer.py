"""A run says when its indexer selects no better than at random, once a phase, and not while it is still learning."""

import logging
from collections.abc import Iterable

import pytest

from gsa_train.config import PhaseConfig
from gsa_train.run.blind_indexer import BlindIndexerWarning

START = 20
SPARSE = PhaseConfig(name="sparse", attention="sparse", steps=300, warmup_steps=30)


def messages(
    caplog: pytest.LogCaptureFixture,
    recalls: Iterable[float | None],
    phase: PhaseConfig = SPARSE,
    random: float = 0.2,
) -> list[str]:
    """Of a phase that begins after step 20 and logs each tenth step, with these recalls."""
    warning = BlindIndexerWarning(phase, START)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for number, recall in enumerate(recalls, start=1):
            step = START + 10 * number
            warning.look({"step": step, "recall": recall, "random_recall": random, "indexer_saturated": 0.96})
    return caplog.messages


def test_it_is_said_once_after_the_warm_up_of_the_rate_and_some_steps(caplog):
    (said,) = messages(caplog, [0.21] * 28)
    # 30 steps of warm-up and 100 more: steps 150, 160 and 170 are looked at.
    assert said.startswith(
        "step 170: the indexer selects hardly better than at random: recall 0.210, of random keys 0.200; 96% of its "
        "activations have no slope. Usual reasons: "
    )
    assert messages(caplog, [0.21] * 14) == [], "still learning"


def test_what_it_finds_counts_of_what_random_keys_miss(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, [0.241] * 28) == []  # 0.041 of 0.8
    assert messages(caplog, [0.239] * 28) != []
    assert messages(caplog, [0.905] * 28, random=0.9) == []


def test_single_steps_and_phases_that_select_nothing_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, [0.2, 0.2, 0.5] * 9) == []
    assert messages(caplog, [None] * 28) == []
    warm_up = PhaseConfig(name="warm-up", attention="dense", train="indexer", steps=300)
    assert messages(caplog, [0.2] * 28, phase=warm_up) == []
