"""What is in a run folder, and damage to it."""

from pathlib import Path


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of all in it but the lock."""
    stats = {path: path.stat() for path in folder.rglob("*") if path.name != "lock"}
    return {path: (each.st_size, each.st_mtime_ns) for path, each in stats.items()}


def cut(checkpoint: Path) -> None:
    """Half of a file, as a full disk leaves it."""
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
