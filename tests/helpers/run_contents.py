"""Lists the contents of a run folder."""

from pathlib import Path


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of each file except the lock."""
    stats = {path: path.stat() for path in folder.rglob("*") if path.name != "lock"}
    return {path: (each.st_size, each.st_mtime_ns) for path, each in stats.items()}
