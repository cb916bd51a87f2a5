"""Weight the sources of a corpus: the weight decides how often a document comes in an epoch.

With weight 0, a source's documents are never read. With 0.5, they are read every other epoch. With 2, they are read
twice per epoch. Each document has a fixed number u in [0, 1). Epoch e reads a document of weight w this many times:

    floor((e + 1) w + u) - floor(e w + u)

Any E consecutive epochs together read the document floor(E w) or ceil(E w) times.

The copies of a document are spread over its unit (a part of a shard, see lanes.py). A unit of n documents has n places,
which are read in order. Place j has one slot (j, c) for each copy number c:

    slot (j, 0) has document j
    slot (j, 1) has document j - n/2
    slot (j, 2) has document j - n/4

In general, slot (j, c) has document (j - v(c) * n) mod n, where v(c) is the van der Corput sequence. Copies of a
document are therefore far apart, and each source's share is nearly constant along a unit.

Slot (j, c) is skipped if the epoch reads its document at most c times. The slots do not depend on the source weights,
so a run may resume at any slot with changed source weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_SOURCE = "unknown"
"""The source of documents whose line names no source"""
MAX_WEIGHT = 100.0
"""The largest allowed weight. The reader visits every slot, and more than a few dozen repeats of a text teach nothing
more (Muennighoff et al. 2023, arXiv 2305.16264)."""

NO_WEIGHTS: Mapping[str, float] = {}

TOKENS_OF = "tokens of "
"""Prefix of the counters of tokens (with EOS) by source"""
LEFT_OUT_OF = "left out of "
"""Prefix of the counters of documents that an epoch left out because of their weight, by source"""


class LineSources(NamedTuple):
    names: list[str]
    of_line: NDArray[np.int64]
    """[lines], index of the source in `names`, or -1 for a line without a document"""


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ValueError for a weight that is negative, not finite or above MAX_WEIGHT."""
    for name, weight in weights.items():
        if not 0 <= weight <= MAX_WEIGHT:  # also refuses NaN
            raise ValueError(
                f"source_weights {name}={weight} must be between 0 (left out) and {MAX_WEIGHT:g}"
            )


def weights_of_lines(sources: LineSources, weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Returns the weight of each line, [lines], which is 1 for lines and sources without a given weight."""
    by_name = [weights.get(name, 1.0) for name in sources.names]
    return np.array([*by_name, 1.0])[sources.of_line]  # -1 indexes the last


def copies_in_epoch(
    weights: NDArray[np.float64], offsets: NDArray[np.float64], epoch: int
) -> NDArray[np.int64]:
    """Returns the number of copies of each document in one epoch, [n]. `offsets` has each document's fixed number u."""
    # Both ends use the same expression, so that rounding cannot change the sum over epochs.
    before, after = (np.floor(each * weights + offsets) for each in (epoch, epoch + 1))
    return (after - before).astype(np.int64)


def document_offsets(key: int, lines: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a fixed number u in [0, 1) for each of the given lines of a shard, [n]. `key` is the shard's 64-bit hash.

    For line i (from 0), u comes from output i of the generator splitmix64 with seed `key` (Steele, Lea, Flood 2014,
    "Fast splittable pseudorandom number generators"). The generator uses only integers, so u is the same on every
    machine.
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
    """Returns the distance of a copy from copy 0 as a share of the unit: 0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput,
    base 2)."""
    place, step = 0.0, 0.5
    while copy:
        place += step * (copy % 2)
        copy, step = copy // 2, step / 2
    return place


def most_copies(weights: Mapping[str, float]) -> int:
    """Returns the largest number of copies of a document in one epoch."""
    return math.ceil(max([1.0, *weights.values()]))


def tokens_by_source(counters: Mapping[str, int]) -> dict[str, int]:
    """Returns source -> number of its tokens so far, sorted by name."""
    return {
        name.removeprefix(TOKENS_OF): count
        for name, count in sorted(counters.items())
        if name.startswith(TOKENS_OF)
    }


def never_met(weights: Mapping[str, float], counters: Mapping[str, int]) -> list[str]:
    """Returns the weighted sources without any document so far, taken or left out."""
    return [
        name
        for name in weights
        if f"{TOKENS_OF}{name}" not in counters and f"{LEFT_OUT_OF}{name}" not in counters
    ]
