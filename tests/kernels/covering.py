"""Builds cases in which every pair of option values occurs together at least once, instead of all products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

Case = dict[str, Any]


def covering(**options: Sequence[Any]) -> list[Case]:
    """Choose greedily: each case is the first product that covers the most new pairs."""
    sizes = [len(values) for values in options.values()]
    new = {}
    """Maps two options to an array that is 1 for each pair of values without a case yet. The array broadcasts to all
    products."""
    for pair in combinations(range(len(sizes)), 2):
        new[pair] = np.ones([size if i in pair else 1 for i, size in enumerate(sizes)], np.int16)
    cases = []
    while any(pairs.any() for pairs in new.values()):
        counts = sum(new.values(), np.zeros(sizes, np.int16))
        places = np.unravel_index(counts.argmax(), sizes)
        for pair, pairs in new.items():
            pairs[tuple(place if i in pair else 0 for i, place in enumerate(places))] = 0
        cases.append({name: values[at] for (name, values), at in zip(options.items(), places, strict=True)})
    return cases


def covered(name: str, **options: Sequence[Any]) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` of the argument `name` with `covering(**options)`."""
    return pytest.mark.parametrize(name, covering(**options), ids=_name)


def _name(case: Mapping[str, Any]) -> str:
    return "-".join(f"{name}={value}".removeprefix("dtype=torch.") for name, value in case.items())
