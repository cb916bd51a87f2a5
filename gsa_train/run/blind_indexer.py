"""Warns when the indexer of a sparse phase selects hardly better than at random: the model then trains on noise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gsa_train.config import PhaseConfig

logger = logging.getLogger(__name__)

PATIENCE_STEPS = 100
"""After the warm-up of the rate. No indexer of our studies that learned was below the share then (docs/results)."""
LEAST_SHARE = 0.05
"""Of the attention that random keys miss, found by the indexer."""
LOGGED_STEPS = 3
"""In a row: one step's recall is noisy."""


class BlindIndexerWarning:
    """Of one phase; says it once."""

    def __init__(self, phase: PhaseConfig, start: int) -> None:
        """`start`: the last step before the phase."""
        self._from_step = start + phase.warmup_steps + PATIENCE_STEPS
        self._selects = phase.attention == "sparse"
        self._times = 0

    def look(self, record: Mapping[str, Any]) -> None:
        """At a logged step's metrics."""
        recall, random = record.get("recall"), record.get("random_recall")
        if not self._selects or record["step"] < self._from_step or recall is None or random is None:
            return
        self._times = self._times + 1 if recall - random < LEAST_SHARE * (1 - random) else 0
        if self._times != LOGGED_STEPS:
            return
        saturated = record.get("indexer_saturated")
        flat = "" if saturated is None else f"; {saturated:.0%} of its activations have no slope"
        logger.warning(
            "step %d: the indexer selects hardly better than at random: recall %.3f, of random keys %.3f%s. Usual "
            "reasons: its rate is too high (phases.*.indexer_lr_mult), most of all for gsa.indexer_activation = relu, "
            "whose scores have no bounds; or it was warmed up on random weights, which have no attention to imitate",
            record["step"], recall, random, flat,
        )  # fmt: skip
