"""Exchange picklable objects between ranks. All functions are collective over `group`; None means all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the objects of all ranks, by rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def from_main(mine: T, group: dist.ProcessGroup | None = None) -> T:
    """Returns rank 0's object."""
    shared = [mine]
    dist.broadcast_object_list(shared, src=0, group=group)
    return shared[0]


def first_said(line: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the line of the first rank that has one."""
    return next((each for each in gathered(line, group) if each is not None), None)


def on_main(act: Callable[[], T], *errors: type[Exception]) -> T:
    """Returns the result of `act`, which only rank 0 calls. If `act` raises one of `errors`, all ranks raise it."""
    outcome: Any = None
    if dist.get_rank() == 0:
        try:
            outcome = act()
        except errors as error:
            outcome = error
    outcome = from_main(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[no-any-return]
