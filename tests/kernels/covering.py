"""Cases of several options in which every pair of values comes together at least once, instead of all products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]


def covering(**options: Sequence[Any]) -> list[Case]:
    """Greedy: each case takes from all products the one with most pairs that no case has yet. The same each time."""
    bits: dict[Any, int] = {}
    products = []
    for places in product(*(range(len(values)) for values in options.values())):
        pairs = sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(enumerate(places), 2))
        products.append((places, pairs))
    uncovered = (1 << len(bits)) - 1
    cases = []
    while uncovered:
        places, pairs = max(products, key=lambda each: (uncovered & each[1]).bit_count())
        uncovered &= ~pairs
        cases.append({name: values[at] for (name, values), at in zip(options.items(), places, strict=True)})
    return cases


def covered(name: str, **options: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` of the argument `name` with `covering(**options)`."""
    return pytest.mark.parametrize(name, covering(**options), ids=_name)


def _name(case: Mapping[str, Any]) -> str:
    return "-".join(f"{name}={value}".removeprefix("dtype=torch.") for name, value in case.items())
