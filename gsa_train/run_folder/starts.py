"""Record each start of a run in `starts.jsonl`: step, layout, device, host, source commit and command."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gsa_train.files import append_line
from gsa_train.metrics.record_checks import is_step, is_time
from gsa_train.metrics.record_format import read_lines
from gsa_train.metrics.wandb_sink import without_credentials

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"
SOURCE = Path(__file__).resolve().parents[2]
"""Folder of the source: the checkout, or the folder in which the package is installed."""


def new_run_id() -> str:
    """Returns a random id for a run at step 0: 12 hex digits and their CRC-32. The id distinguishes runs with equal
    names."""
    token = secrets.token_hex(6)
    return f"{token}{zlib.crc32(token.encode()):08x}"


def run_id_of(run_dir: Path) -> str:
    """Returns the run id of the folder's newest start that has an intact id, or "" without any."""
    ids = [start.get("run_id") or "" for start in read_starts(run_dir, warns=False)]
    intact = [each for each in ids if f"{zlib.crc32(each[:12].encode()):08x}" == each[12:]]
    return intact[-1] if intact else ""


def note_start(run_dir: Path, step: int, layout: str, device: str, run_id: str) -> None:
    """Append a line for this start, which continues after `step`."""
    start = {
        "run_id": run_id,
        "unix_seconds": time.time(),
        "step": step,
        "layout": layout,
        "device": device,
        "host": socket.gethostname(),
        "commit": source_commit(SOURCE),
        "torch": version("torch"),
        "command": command_line(sys.argv, os.environ),
    }
    append_line(run_dir / STARTS, json.dumps(start))


def command_line(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the command that repeats this start. It has the torchrun options that the processes know, and no
    credentials in URLs."""
    words = list(argv)
    if Path(words[0]).name == "__main__.py":
        words[:1] = ["-m", Path(words[0]).parent.name]
    starter = ["python"] if words[0].endswith(".py") or words[0] == "-m" else []
    if "TORCHELASTIC_RUN_ID" in environ:
        ranks, of_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        starter = ["torchrun", f"--nproc_per_node={of_node}"]
        starter += [f"--nnodes={ranks // of_node}"] if ranks > of_node else []
    return shlex.join(without_credentials([*starter, *words]))


def read_starts(run_dir: Path, needed: Sequence[str] = (), warns: bool = True) -> list[dict[str, Any]]:
    """Returns the starts in order, or an empty list for runs of versions that recorded none.

    Damaged lines are left out, and a warning is logged. If only the end of the last line is missing, because of a kill
    or a full disk, the line is left out without a warning.

    Args:
        needed: keys that each start must have, in addition to `unix_seconds`.
        warns: False for a second read of the file.
    """
    path = run_dir / STARTS
    if not path.is_file():
        return []
    lines, damaged = read_lines(path, partial(_fault_of_start, needed=needed), "start")
    if damaged and warns:
        logger.warning("%s: %s; left out", path, damaged)
    return [start for _, start in lines]


def _fault_of_start(start: Any, needed: Sequence[str]) -> str:
    if not isinstance(start, dict) or not is_time(start.get("unix_seconds")):
        return "is not an object with unix_seconds"
    for name in ("step", "run_id", "layout", "device", "host", "commit", "torch", "command"):
        value = start.get(name)
        if value is None and name in needed:
            return f"has no {name}"
        if value is not None and not (is_step(value) if name == "step" else isinstance(value, str)):
            return f"has {name} = {value!r:.40}"
    return ""


def source_commit(source: Path) -> str | None:
    """Returns the commit of the running source, with `+` at the end if files were changed after the commit, or None.
    The commit comes from commit.txt of a frozen source, else from GSA_COMMIT of the environment, else from git."""
    frozen = source.parent / "commit.txt"  # of submit.py: the commit, and a line for each changed file
    if source.name == "source" and frozen.is_file():
        commit, *changed = frozen.read_text(encoding="utf-8").splitlines()
        return commit + "+" * bool(changed)
    if said := os.environ.get("GSA_COMMIT"):
        return said
    if not (source / ".git").exists():  # git would report a checkout of a parent folder
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(source, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *words: str) -> str:
    command = ["git", "-C", str(source), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
