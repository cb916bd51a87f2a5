"""Watch layer statistics that often jump before the loss does. Logged steps measure them."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

WINDOW = 32
"""Logged steps in the history."""
LEAST = 16
"""Logged steps before the first verdict."""
RECENT = 8
"""Logged steps that a value is compared with. They are few, because the statistics grow slowly during training."""
MIN_RATIO = 4.0
SIGMAS = 8.0
"""Limit in deviations. It is higher than for the loss, because several statistics of many layers are watched."""
FLOORS = {
    "max_activation": 0.0,
    "max_attention_logit": 5.0,
    "indexer_kl": 0.01,
    "variance": 0.0,
    "indexer_saturated": 0.01,
    "value_gate_low": 0.01,
    "value_gate_high": 0.01,
    "output_gate_low": 0.01,
    "output_gate_high": 0.01,
    "update_norm": 0.0,
}
"""Maps each watched statistic to a constant that is added to its value, so that a small change near 0 is not a jump."""


class LayerWatch:
    """Compares each statistic of each layer with its values in earlier logged steps.

    The watch compares logarithms. A value is a jump if its logarithm exceeds the median of the last 8 logarithms by
    more than max(8 deviations, log 4). The deviation is estimated from the differences between the logarithms of
    successive logged steps.
    """

    def __init__(self, history: dict[str, list[list[float]]]) -> None:
        self.history = history
        """Maps each statistic to lists of its values by layer, one list for each of the last logged steps."""

    def look(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the jumps in a logged step's record: signal, layer (from 0; None for the whole model), value and
        threshold. Adds the record to the history."""
        jumps = []
        for name, floor in FLOORS.items():
            values = record.get(f"layer_{name}", record.get(name))
            if values is None:
                continue
            layered = isinstance(values, list)
            values = values if layered else [values]
            seen = self.history.setdefault(name, [])
            for layer, value in enumerate(values):
                limit = _limit([row[layer] for row in seen], floor)
                if value > limit:
                    jump = {"signal": name, "layer": layer if layered else None}
                    jumps.append({**jump, "value": value, "threshold": limit})
            seen.append(list(values))
            del seen[:-WINDOW]
        return jumps


def _limit(seen: list[float], floor: float) -> float:
    logs = [math.log(value + floor) for value in seen if math.isfinite(value) and value + floor > 0]
    if len(logs) < LEAST:
        return math.inf
    steps = [abs(after - before) for before, after in itertools.pairwise(logs)]
    deviation = 1.4826 / math.sqrt(2) * statistics.median(steps)
    return math.exp(statistics.median(logs[-RECENT:]) + max(SIGMAS * deviation, math.log(MIN_RATIO))) - floor
