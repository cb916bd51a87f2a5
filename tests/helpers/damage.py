"""Damages files, and tabulates what happens when a run starts with a damaged file."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

Damage = Callable[[Path], object]


def flip(place: float) -> Damage:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 4
        path.write_bytes(content)

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Damage] = {
    "bit in head": flip(0.0), "bit in middle": flip(0.5), "bit in tail": flip(1.0), "cut": cut,
    "emptied": empty, "deleted": Path.unlink,
}  # fmt: skip


def damages_of(path: Path, others: dict[str, Path]) -> dict[str, Damage]:
    """Return damages for any file, and exchanges with `others`, which maps an exchange's name to the replacement."""
    exchanges = {
        f"exchanged: {name}": partial(shutil.copyfile, other)
        for name, other in others.items()
        if other.is_file() and other.read_bytes() != path.read_bytes()
    }
    return DAMAGES | exchanges


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Table:
    """Maps file and damage to the result."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, file: str, damage: str, outcome: str) -> None:
        self.rows.append((file, damage, " ".join(outcome.split())))

    def __str__(self) -> str:
        return "\n".join(f"{file:44} {damage:26} {outcome}" for file, damage, outcome in self.rows)
