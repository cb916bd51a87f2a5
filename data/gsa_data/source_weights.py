"""Weights of sources: how often a document comes in an epoch, and where its copies stand.

A document of weight w comes floor((e + 1) w + u) - floor(e w + u) times in epoch e, with a number u of its own from
[0, 1). So over any E epochs it comes floor(E w) or ceil(E w) times, whatever E is, and nothing has to be remembered:
weight 0 leaves a source out, 0.5 takes every other epoch, 2 gives two copies an epoch.

The order of a unit of n documents is a grid of slots (document, copy): at slot j stand copy 0 of the j-th document,
copy 1 of the document n / 2 places before it, copy 2 of that n / 4 before, and so on by the van der Corput sequence,
round the unit's end. A slot whose document has fewer copies is passed over. So copies of one document are far apart
(next to each other only in units of a few documents), the mixture is the same all along a unit, and the grid knows
no weights: they may change at any slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa_data.faults import DataFault, printable

NO_SOURCE = "unknown"
"""Source of the documents whose line names none."""
MAX_WEIGHT = 100.0
"""Each slot of the grid is visited, due or not, so copies cost a little; repeats past a few dozen teach nothing more
(Muennighoff et al. 2023, arXiv 2305.16264)."""

TOKENS_OF = "tokens of "
"""Begins the counters of the tokens, EOS included, of the documents that were taken."""
LEFT_OUT_OF = "left out of "
"""Begins the counters of the documents that an epoch left out for their weight."""


class LineSources(NamedTuple):
    """The sources of the lines of a shard."""

    names: list[str]
    of_line: NDArray[np.int64]
    """[lines] place in `names`; -1 for a line without a document."""


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ValueError for a weight that is negative, not finite or above MAX_WEIGHT."""
    for name, weight in weights.items():
        if not 0 <= weight <= MAX_WEIGHT:  # not so for NaN
            raise ValueError(
                f"source_weights {name}={weight} must be between 0 (left out) and {MAX_WEIGHT:g}"
            )


def weights_of_lines(sources: LineSources, weights: Mapping[str, float]) -> NDArray[np.float64]:
    """[lines]; 1 for sources without a weight and for lines without a document, whose fault is to be counted."""
    by_name = [weights.get(name, 1.0) for name in sources.names]
    return np.array([*by_name, 1.0])[sources.of_line]  # -1 is the last


def copies_in_epoch(
    weights: NDArray[np.float64], offsets: NDArray[np.float64], epoch: int
) -> NDArray[np.int64]:
    """[n] how often documents of these weights, with their numbers u as offsets, come in one epoch."""
    # The same expression at both ends, so that the counts of epochs add up however it is rounded.
    before, after = (np.floor(each * weights + offsets) for each in (epoch, epoch + 1))
    return (after - before).astype(np.int64)


def document_offsets(key: int, lines: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] the numbers u from [0, 1) of the documents in these lines of the shard that `key` (64 bits) stands for.

    The generator splitmix64 at place `line` (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators"): exact integer arithmetic, the same everywhere.
    """
    state = (lines.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.array(
        [key], np.uint64
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    offsets: NDArray[np.float64] = (state >> np.uint64(11)) * 2.0**-53
    return offsets


@lru_cache(maxsize=256)
def place_of_copy(copy: int) -> float:
    """Returns the offset of a copy from copy 0 within a unit: 0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput, base 2)."""
    place, step = 0.0, 0.5
    while copy:
        place += step * (copy % 2)
        copy, step = copy // 2, step / 2
    return place


def most_copies(weights: Mapping[str, float]) -> int:
    """Returns the largest number of copies of a document in one epoch."""
    return math.ceil(max([1.0, *weights.values()]))


def tokens_by_source(counters: Mapping[str, int]) -> dict[str, int]:
    """Source -> tokens of its documents taken so far, in the order of the names."""
    return {
        name.removeprefix(TOKENS_OF): count
        for name, count in sorted(counters.items())
        if name.startswith(TOKENS_OF)
    }


def never_met(weights: Mapping[str, float], counters: Mapping[str, int]) -> list[str]:
    """Returns the weighted sources that no document has come from so far, taken or left out."""
    return [
        name
        for name in weights
        if f"{TOKENS_OF}{name}" not in counters and f"{LEFT_OUT_OF}{name}" not in counters
    ]


def check_known(weights: Mapping[str, float], documents: Mapping[str, int], root: str) -> None:
    """Raises DataFault for a name that is none of the sources in `documents`, and when nothing is left."""
    found = ", ".join(map(printable, sorted(documents))) or "none"
    for name in weights:
        if name not in documents:
            raise DataFault(
                f"source_weights names {name!r}, but the sources of {root!r} are: {found}; correct the name, or "
                "remove it"
            )
    if documents and not any(weights.get(name, 1.0) > 0 for name in documents):
        raise DataFault(
            f"source_weights leaves out every source of {root!r} ({found}); give one a weight above 0"
        )
