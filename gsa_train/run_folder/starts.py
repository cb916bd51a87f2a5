"""Every start of a run, in `starts.jsonl` of its folder: what ran where, from which step, by which source."""

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gsa_train.files import append_line
from gsa_train.metrics.record_checks import is_step, is_time
from gsa_train.metrics.wandb_sink import without_credentials

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"
SOURCE = Path(__file__).resolve().parents[2]
"""The checkout, or the folder that the package is installed in."""


def new_run_id() -> str:
    """Made at a run's step 0: two runs of one name are told apart by it. Its end is the checksum of its beginning."""
    token = secrets.token_hex(6)
    return f"{token}{zlib.crc32(token.encode()):08x}"


def run_id_of(run_dir: Path) -> str:
    """Which run the folder belongs to, by its newest start that says so; "" where none does, or all are damaged."""
    ids = [
        start.get("run_id") or "" for start in _read_starts(run_dir / STARTS)[0]
    ]  # named where they are read whole
    intact = [each for each in ids if f"{zlib.crc32(each[:12].encode()):08x}" == each[12:]]
    return intact[-1] if intact else ""


def note_start(run_dir: Path, step: int, layout: str, device: str, run_id: str) -> None:
    """Append this start, which begins after `step`."""
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
    """The command of this job, to be typed again, with torchrun's own words as far as its processes know them; without
    credentials in addresses."""
    words = list(argv)
    if Path(words[0]).name == "__main__.py":
        words[:1] = ["-m", Path(words[0]).parent.name]
    starter = ["python"] if words[0].endswith(".py") or words[0] == "-m" else []
    if "TORCHELASTIC_RUN_ID" in environ:
        ranks, of_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        starter = ["torchrun", f"--nproc_per_node={of_node}"]
        starter += [f"--nnodes={ranks // of_node}"] if ranks > of_node else []
    return shlex.join(without_credentials([*starter, *words]))


def read_starts(run_dir: Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """In their order; empty for a run of a version that did not note them. A warning counts damaged lines, which are
    left out; not the last one, if a kill or a full disk cut it off.

    Args:
        needed: what each must say, for who reads more of them than `unix_seconds`.
    """
    starts, damaged = _read_starts(run_dir / STARTS, needed)
    if damaged:
        logger.warning("%s: %s; left out", run_dir / STARTS, damaged)
    return starts


def _read_starts(path: Path, needed: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str]:
    """And what is wrong with the others."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    starts, wrong = [], []
    for number, line in enumerate(lines, start=1):
        try:
            start = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong += [f"start {number} is not JSON ({error})"] if line and number < len(lines) else []
            continue
        fault = _fault_of_start(start, needed)
        if fault:
            wrong.append(f"start {number} {fault}")
        else:
            starts.append(start)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return starts, f"{wrong[0]}{more}" if wrong else ""


def _fault_of_start(start: Any, needed: Sequence[str]) -> str:
    """Empty where nothing is wrong with it."""
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
    """The commit that runs: of a frozen source the one that was frozen, else what the environment variable GSA_COMMIT
    says, else git's; with `+` where files were changed after it. None where nothing tells."""
    frozen = (
        source.parent / "commit.txt"
    )  # launch/slurm/submit.py: the commit, and a line for each changed file
    if source.name == "source" and frozen.is_file():
        commit, *changed = frozen.read_text(encoding="utf-8").splitlines()
        return commit + "+" * bool(changed)
    if said := os.environ.get("GSA_COMMIT"):
        return said
    if not (source / ".git").exists():  # a checkout further up is not ours
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(source, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *words: str) -> str:
    command = ["git", "-C", str(source), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
